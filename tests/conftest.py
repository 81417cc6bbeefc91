"""For all tests."""

from hypothesis import settings

# A loaded machine stops a test for longer than hypothesis' 200 ms.
settings.register_profile("flexfloor", deadline=None)
settings.load_profile("flexfloor")
