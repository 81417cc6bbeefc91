"""Prompts, their order, rewards, and the small task and model of the quickstart.

Importing this package costs nothing: reward workers load it, so each module imports what it needs by itself.
"""
