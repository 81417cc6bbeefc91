"""What foreign drivers load: a router for verl, a rollout function for slime, and the client both use.

No module here imports verl, ray or slime when it is loaded: those call us, in their own processes.
"""
