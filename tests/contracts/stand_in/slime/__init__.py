"""Stands in for slime where slime is not installed: only what our functions touch, written anew.

`slime_facts.read` of this folder must give the recorded facts, so it cannot drift from the record.
"""
