"""The limits of what tests wait for grow with how slow the machine is, and say so when they are reached."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.harness import patience
from tests.harness.patience import Patience, alarm, run_patiently, slowness, wait_until

# Takes 0.6 seconds of a core's time, however long that is by the clock
WORK = "import time\nwhile time.process_time() < 0.6: pass"


@contextmanager
def others(count: int) -> Iterator[None]:
    """Other processes on the one core that is left to this one and its children."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    patience._measured = None
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
        os.sched_setaffinity(0, cores)
        patience._measured = None


def test_work_beside_other_work_gets_more_time() -> None:
    with others(4):
        assert slowness() > 2
        assert run_patiently([sys.executable, "-c", WORK], 2).returncode == 0  # three seconds by the clock


def test_a_limit_that_is_reached_says_which_and_how_it_grew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_measured", (time.monotonic(), 4.0))
    with pytest.raises(AssertionError, match=r"still runs; the limit of 0.3 s is reached after .* 4.0 times slower"):
        run_patiently([sys.executable, "-c", "import time; time.sleep(60)"], 0.3)
    monkeypatch.setattr(patience, "_measured", (time.monotonic(), 4.0))
    with pytest.raises(AssertionError, match=r"a sign has not come; the limit of 0.1 s .* 4.0 times(.|\n)*nothing yet"):
        wait_until(lambda: False, "a sign", 0.1, lambda: "nothing yet")


@pytest.mark.parametrize(("step", "times"), [(0.001, 1.0), (3 * patience.REFERENCE_SECONDS, 3.0), (99.0, 10.0)])
def test_a_limit_never_shrinks_and_never_grows_without_end(
    monkeypatch: pytest.MonkeyPatch, step: float, times: float
) -> None:
    monkeypatch.setattr(patience, "_measured", None)
    monkeypatch.setattr(patience, "reference_step", lambda: step)
    assert slowness() == pytest.approx(times)
    assert not Patience(1000).is_over()


def test_the_limit_for_one_test_rings_and_says_why() -> None:
    said: list[str] = []
    cancel = alarm(0.05, said.append)
    wait_until(lambda: said, "the alarm", 10, pause=0.01)
    cancel()
    assert said[0].startswith("the limit of 0.05 s is reached after ")
