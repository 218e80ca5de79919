"""Shared by all tests."""

from hypothesis import settings

# Cores are shared with other work: how long an example takes says nothing.
settings.register_profile("shardwise", deadline=None)
settings.load_profile("shardwise")
