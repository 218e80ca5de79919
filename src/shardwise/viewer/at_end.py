"""Writes a run's report when it ends, in a process of its own: whatever happens to that, the run is as it was."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from shardwise.config.paths import environment_with_source
from shardwise.errors import ConfigError
from shardwise.run_dir.files import REPORT

_SECONDS = 60  # a report of 100,000 rows takes a tenth of it


def leave_report(run_dir: str | Path) -> str:
    """Write `<run>/report.html`. Returns one line for the user, also if that failed or took too long."""
    path = Path(run_dir) / REPORT
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "shardwise.viewer.at_end", str(run_dir)], env=environment_with_source(),
            text=True, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            timeout=_SECONDS,
        )  # fmt: skip
        why = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        why = f"it took more than {_SECONDS} s"
    except OSError as error:
        why = str(error.strerror)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return (
        f"no report could be written ({why}); shardwise report {shown.parent} tries again"
        if why
        else f"report: {shown}"
    )


def main(run_dir: str) -> None:
    """In a process of its own, which ends by itself if the one that waits for it is gone."""
    from shardwise.viewer.report import write_report

    signal.alarm(2 * _SECONDS)
    try:
        write_report(run_dir)
    except (ConfigError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1])
