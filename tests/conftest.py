"""Shared by all tests."""

import signal
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings

from tests import quick
from tests.harness import processes
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=["quick", "rest", "long", "all"],
        help="which tests of the named folders, by tests/quick.py: quick (the default), rest, long, or all",
    )  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of one tier. Who names a file or a test wants all of it."""
    named = any(".py" in argument for argument in config.args)
    tier = config.option.tier or ("all" if named else "quick")
    if not named:
        files = {item.nodeid.partition("::")[0] for item in items}
        gone = [one for one in quick.listed() if one.partition("::")[0] in files
                and not any(quick.names(one, item.nodeid) for item in items)]  # fmt: skip
        if gone:
            raise pytest.UsageError(f"tests/quick.py lists what is no test: {', '.join(gone)}")
    if tier != "all":
        kept = [item for item in items if quick.tier_of(item.nodeid) == tier]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def used_so_far() -> float:
    return processes.cpu_seconds() + sum(processes.used_by_ranks)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    item.stash[BEGAN] = used_so_far()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    if call.when == "teardown":
        item.user_properties.append(("cpu_seconds", used_so_far() - item.stash[BEGAN]))
    return (yield)


BEGAN = pytest.StashKey[float]()
USED: dict[str, float] = {}  # CPU seconds of each test; a clock would measure what else the machine does


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, value in report.user_properties:
        if name == "cpu_seconds" and isinstance(value, float):
            USED[report.nodeid] = value


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints where the time goes, and what a test said that was repeated: `--reruns` in the Makefile."""
    files: Counter[str] = Counter()
    for test, used in USED.items():
        files[test.partition("::")[0]] += used  # type: ignore[assignment]
    for what, slowest in (("files", files.most_common(15)), ("tests", Counter(USED).most_common(15))):
        terminalreporter.section(f"slowest {what}, CPU seconds of {sum(USED.values()):.0f}")
        for name, used in slowest:
            terminalreporter.write_line(f"{used:7.1f}  {name}")
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"repeated: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)
