"""Membership: which ranks form the expert-parallel group, and the change from one group to the next."""
