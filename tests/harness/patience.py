"""Limits for what a test waits for. They are written for an idle machine and grow with how slow this machine is now.

How slow it is, a reference step tells: a fixed piece of work, timed anew every few seconds for as long as a test waits.
A machine that other work keeps busy, or a slow one, gets more time; a run that hangs is still ended.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

REFERENCE_SECONDS = 0.05  # what the reference step takes on the idle machine for which the limits are written
AT_MOST = 10.0  # times as long: beyond that a test fails, whatever the machine does
REFRESH_SECONDS = 5.0

_measured: tuple[float, float] | None = None  # when, and how slow the machine was


def slowness() -> float:
    """How many times longer than on an idle machine work takes now: from 1 to AT_MOST."""
    global _measured
    if _measured is None or time.monotonic() - _measured[0] > REFRESH_SECONDS:
        times = reference_step() / REFERENCE_SECONDS
        _measured = time.monotonic(), min(max(times, 1.0), AT_MOST)
    return _measured[1]


def reference_step() -> float:
    """Seconds by the clock for a fixed amount of work on one core."""
    begin, total = time.perf_counter(), 0
    for number in range(1_000_000):
        total += number * number
    return time.perf_counter() - begin


class Patience:
    """A limit of `seconds` on an idle machine. Time that passes while the machine is slow counts for less."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.spent = seconds, 0.0
        self.begin = self.last = time.monotonic()

    def is_over(self) -> bool:
        now = time.monotonic()
        self.spent += (now - self.last) / slowness()
        self.last = now
        return self.spent > self.seconds

    def __str__(self) -> str:
        waited = self.last - self.begin
        return (
            f"the limit of {self.seconds:g} s is reached after {waited:.1f} s by the clock: while the test waited, the "
            f"machine was {waited / max(self.spent, 1e-9):.1f} times slower than an idle one (by the reference step of "
            f"tests/harness/patience.py, which scales every limit by 1 to {AT_MOST:g})"
        )


def wait_until(
    condition: Callable[[], Any], what: str, seconds: float, told: Callable[[], str] = str, pause: float = 0.1
) -> None:
    """Fails the test with `what` has not come, the limit and what `told()` says, when the limit is reached."""
    patience = Patience(seconds)
    while not condition():
        assert not patience.is_over(), f"{what} has not come; {patience}\n{told()}"
        time.sleep(pause)


def exit_code(process: subprocess.Popen[Any], seconds: float, told: Callable[[], str] = str) -> int:
    """Of the process when it has ended."""
    wait_until(lambda: process.poll() is not None, f"the end of {process.args}", seconds, told)
    return int(process.returncode)


def run_patiently(command: list[str], seconds: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """subprocess.run with a limit that grows with the load. stdout and stderr are captured unless `options` differ."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    patience = Patience(seconds)
    with subprocess.Popen(command, **options) as process:
        while True:
            try:
                out, err = process.communicate(timeout=1)
                return subprocess.CompletedProcess(command, process.returncode, out, err)
            except subprocess.TimeoutExpired:
                if patience.is_over():
                    process.kill()
                    out, err = process.communicate()
                    raise AssertionError(f"{command} still runs; {patience}\n{out}\n{err}") from None
            except BaseException:
                process.kill()
                raise


def alarm(seconds: float, ring: Callable[[str], None]) -> Callable[[], None]:
    """Calls `ring(why)` in the main thread when the limit is reached; returns what cancels that."""
    patience, every = Patience(seconds), min(seconds, 2 * REFRESH_SECONDS)

    def look(number: int, frame: Any) -> None:
        if patience.is_over():
            return ring(str(patience))
        signal.setitimer(signal.ITIMER_REAL, every)  # only now: a second alarm must not interrupt the reference step
        return None

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, every)
    return cancel
