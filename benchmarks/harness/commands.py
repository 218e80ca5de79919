"""Commands as a user would start them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT

NO_MEMORY = "out of memory"
TOO_LONG = 124  # the exit code of a command that took longer than it may


def environment_of_commands() -> dict[str, str]:
    earlier = os.environ.get("PYTHONPATH", "")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), earlier])}


def train(words: list[str], log: Path, timeout_seconds: float, look: Callable[[], None] | None = None) -> int:
    """`python train.py` with these words. What it prints goes into a file. The exit code; 124: it took too long."""
    return run([sys.executable, str(ROOT / "train.py"), *words], log, timeout_seconds, look)


def run(
    command: list[str], log: Path, timeout_seconds: float, look: Callable[[], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:  # fmt: skip
    """A command, as `train` has it. `look` is called four times a second while it runs."""
    deadline = time.monotonic() + timeout_seconds
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment_of_commands() | dict(environment or {}), stdin=subprocess.DEVNULL,
            stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    try:
        while (code := process.poll()) is None and time.monotonic() < deadline:
            if look is not None:
                look()
            time.sleep(0.25)
        return TOO_LONG if code is None else code
    finally:
        _end(process)


def failure(code: int, limit: float, log: Path) -> dict[str, Any]:
    """What is recorded of a command that failed."""
    text = log.read_text(errors="replace")
    said = re.findall(r"^error: (.*)", text, re.MULTILINE)
    error = f"did not end in {limit:.0f} s" if code == TOO_LONG else ": ".join([f"exit code {code}", *said[-1:]])
    if re.search("out of memory", text, re.IGNORECASE):
        error = NO_MEMORY
    return {"error": error, "exit_code": code, "log": text[-3000:]}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Launchers end their ranks when they are asked to end, and not when they are killed."""
    for how, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, None)):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
