"""How large a run's report is, and how long it takes: 100,000 logged steps of 64 ranks with 36 numbers of each GPU.

    python benchmarks/report_size.py
    python benchmarks/report_size.py --steps 1000 --ranks 4

The run's folder is made up (tests/harness/run_folder.py), with a row for every step. It is read twice: the two pages
have to be the same. Writes benchmarks/results/report-cpu.json.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.harness import results  # noqa: E402
from shardwise.run_dir.files import METRICS, RANKS  # noqa: E402
from shardwise_tools.viewer.record import read_run  # noqa: E402
from shardwise_tools.viewer.report import make_report  # noqa: E402
from shardwise_tools.viewer.watch import Watch  # noqa: E402
from tests.harness.run_folder import make_run  # noqa: E402

NUMBERS = tuple(f"gpu/number_{number}" for number in range(36))
LIMIT_BYTES = 1_000_000
_RANK_STEPS = 800  # in ranks.csv: about the 16 MiB that a run keeps of 64 ranks


def measure(steps: int, ranks: int) -> dict[str, Any]:
    """One run's report: its bytes, and the CPU seconds to write it and to look at the run as `shardwise watch` does."""
    with tempfile.TemporaryDirectory() as name:
        folder = make_run(Path(name) / "run", steps=steps, ranks=ranks, telemetry=NUMBERS, rank_rows=_RANK_STEPS)
        began = time.process_time()
        page = make_report(read_run(folder))
        seconds = time.process_time() - began
        began = time.process_time()
        watch = Watch(folder)
        watch.lines()
        first_look = time.process_time() - began
        began = time.process_time()
        watch.poll()
        watch.lines()
        next_look = time.process_time() - began
        return {
            "steps": steps, "ranks": ranks, "numbers": len(NUMBERS), "report_bytes": len(page.encode()),
            "seconds": round(seconds, 2), "is_repeated": page == make_report(read_run(folder)),
            "first_look_seconds": round(first_look, 2), "next_look_seconds": round(next_look, 3),
            "metrics_bytes": (folder / METRICS).stat().st_size, "ranks_bytes": (folder / RANKS).stat().st_size,
        }  # fmt: skip


def main() -> None:
    parser = results.command_line(__doc__, accelerator=None)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=64)
    arguments = parser.parse_args()
    environment, device = results.measured_on("cpu", arguments.commit)
    row = measure(arguments.steps, arguments.ranks)
    print(row)
    head = {"command": results.command(), "environment": environment, "limit_bytes": LIMIT_BYTES}
    results.write(arguments.out / f"report-{device}.json", head | row)
    if row["report_bytes"] > LIMIT_BYTES or not row["is_repeated"]:
        sys.exit(f"the report has to be the same twice, and at most {LIMIT_BYTES} bytes")


if __name__ == "__main__":
    main()
