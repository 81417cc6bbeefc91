"""Decisions of the planner and the dispatcher. PURE: no clock, no sockets, no threads."""
