"""Shared by all tests."""

import signal
from typing import Any

import pytest
from hypothesis import settings

from tests.harness.patience import alarm

# Cores are shared with other work: how long an example takes says nothing.
settings.register_profile("shardwise", deadline=None)
settings.load_profile("shardwise")

# Started in the background of a shell, this process ignores Ctrl-C, and so would every run that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """pytest-timeout's limit grows with the load, as every other limit of a test."""

    def ring(why: str) -> None:
        pytest.fail(f"{item.nodeid} is ended by the limit for one test: {why}")

    item.cancel_timeout = alarm(settings.timeout, ring)  # type: ignore[attr-defined]
    return True
