"""Shared by all tests."""

import signal

from hypothesis import settings

# Cores are shared with other work: how long an example takes says nothing.
settings.register_profile("shardwise", deadline=None)
settings.load_profile("shardwise")

# Started in the background of a shell, this process ignores Ctrl-C, and so would every run that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
