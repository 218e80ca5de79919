"""The one door from the core to shardwise_tools, which read what a run has left. Without them a run ends as well.

Reports and profiles are read in processes of their own: whatever happens to those, the run is as it was.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from shardwise.config.paths import environment_with_source
from shardwise.run_dir.files import REPORT

_REPORT_SECONDS = 60  # a report of 100,000 rows takes a tenth of it


def has_tools() -> bool:
    """Whether shardwise_tools is there."""
    try:
        import shardwise_tools  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def leave_report(run_dir: str | Path) -> str:
    """Write `<run>/report.html`. Returns one line for the user, also if that failed or took too long.

    The line is empty without the tools.
    """
    if not has_tools():
        return ""
    path = Path(run_dir) / REPORT
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "shardwise_tools.viewer.report", str(run_dir)], env=environment_with_source(),
            text=True, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            timeout=_REPORT_SECONDS,
        )  # fmt: skip
        why = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        why = f"it took more than {_REPORT_SECONDS} s"
    except OSError as error:
        why = str(error.strerror)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return (
        f"no report could be written ({why}); shardwise report {shown.parent} tries again"
        if why
        else f"report: {shown}"
    )


class ProfileReading:
    """A process that reads the traces in `folder` as soon as all `ranks` have one. Only with the tools."""

    def __init__(self, folder: Path, ranks: list[int]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardwise_tools.profile", str(folder), *map(str, ranks)],
            env=environment_with_source() | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def wait(self) -> str:
        """The table. Raises RuntimeError: the traces could not be read."""
        out, errors = self.process.communicate()
        if self.process.returncode:
            raise RuntimeError(errors.strip().splitlines()[-1] if errors.strip() else "the reader was killed")
        return out

    def stop(self) -> None:
        self.process.kill()


def draw_memory(summary: Any, path: Path) -> bool:
    """Draw a MemorySummary, of metrics/memory_profile.py; whether that was done.

    Raises OSError: the picture could not be written.
    """
    if not has_tools():
        return False
    from shardwise_tools.traces.picture import draw_memory

    draw_memory(summary, path)
    return True
