"""What only a GPU shows of the verdicts: faults that are made on purpose are found by its events and its memory.

    python benchmarks/gpu_checks/verdicts.py                     all GPUs, at most two: about a minute
    python benchmarks/gpu_checks/verdicts.py --ranks 1
    python benchmarks/gpu_checks/verdicts.py --accelerator cpu --ranks 2        tries it out: what a CPU can show

Each run has one fault, and must have its verdict and no other; healthy runs must have none. Prints a line for each run,
writes benchmarks/results/verdicts-gpu-checks.json, and exits with 1 if a verdict is missing or wrong.
"""

from __future__ import annotations

import contextlib
import io
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.device import device_of, free_memory  # noqa: E402
from benchmarks.harness.limits import note, rows_of_ranks  # noqa: E402
from benchmarks.harness.trainers import on_all, our_trainer, resolve  # noqa: E402
from shardwise.distributed.mesh import init_process_group  # noqa: E402
from shardwise.rank import quiet_lightning  # noqa: E402
from shardwise.run_dir.events import read_events  # noqa: E402
from shardwise.trainer import build_data, build_module  # noqa: E402

LARGE = {"cuda": ["+module.width=4096", "+module.rows=4096"], "cpu": []}
SMALL = ["+module.width=32", "+module.rows=8", "+module.layers=300"]
NOTES = {"compute-bound"}  # these are no faults
# Run → the ranks that it needs, its fault, overrides, and the verdict with its cause
CELLS: dict[str, tuple[int, str, list[str], tuple[str, str] | None]] = {
    "healthy": (1, "", [], None),
    "healthy, sharded": (2, "", ["strategy=fsdp", "strategy.defer_gradient_sync=true"], None),
    "slow loader": (1, "data", [], ("data-bound", "")),
    "slow loader of one rank": (2, "data_of_one", [], ("straggler", "data")),
    "slow host": (2, "host", [], ("straggler", "host")),
    "more work on one rank": (2, "compute", [], ("straggler", "compute")),
    "garbage": (1, "garbage", [], ("garbage collection", "")),
}
ON_GPU: dict[str, tuple[int, str, list[str], tuple[str, str] | None]] = {
    "tiny kernels": (1, "", SMALL, ("host-bound", "")),
    "growing memory": (1, "device leak", [], ("leaking memory", "")),
    "allocator at its limit": (1, "retries", [], ("allocator at its limit", "")),
}


def cells_for(ranks: int, accelerator: str) -> dict[str, tuple[int, str, list[str], tuple[str, str] | None]]:
    cells = CELLS | (ON_GPU if accelerator == "cuda" else {})
    return {name: cell for name, cell in cells.items() if cell[0] <= ranks}


def run_all(folder: Path, ranks: int, accelerator: str) -> None:
    """In each rank. Rank 0 writes a row for each run."""
    quiet_lightning()
    device = device_of(accelerator)
    for number, (name, (_, fault, words, _)) in enumerate(cells_for(ranks, accelerator).items()):
        size = [] if words is SMALL else LARGE[accelerator]
        given = [
            "recipe=custom", "module._target_=tests.harness.faults.Faulty", f"+module.fault={fault}",
            "data._target_=tests.harness.faults.FaultyData", f"+data.fault={fault}", "micro_batch_size=1",
            "checkpoint=none", "validate_every_n_steps=1000000", "log_every_n_steps=1", "units=[Linear]",
            "max_steps=60", *size, *words,
        ]  # fmt: skip
        plan = resolve(on_all(given, ranks), accelerator, folder, f"cell{number}")
        if not torch.distributed.is_initialized():
            init_process_group(plan)
        free_memory(device)
        began = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            module = build_module(plan)
            our_trainer(plan, module).fit(module, datamodule=build_data(plan))
        told = [event for event in read_events(plan.run_dir) if event.kind == "verdict"]
        note(folder, {"name": name, "told": [event.data | {"text": event.text} for event in told],
                      "seconds": time.perf_counter() - began})  # fmt: skip
        del module


def is_right(row: dict[str, Any], wanted: tuple[str, str] | None) -> bool:
    found = {(one["name"], one.get("cause") or "") for one in row["told"] if one["name"] not in NOTES}
    return found == (set() if wanted is None else {wanted})


def main() -> None:
    parser = results.command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=max(1, min(2, torch.cuda.device_count())))
    parser.add_argument("--timeout", type=float, default=240, help="seconds for all runs together")
    arguments = parser.parse_args()
    environment, _ = results.measured_on(arguments.accelerator, arguments.commit)
    cells, options = cells_for(arguments.ranks, arguments.accelerator), (arguments.ranks, arguments.accelerator)
    found, error = rows_of_ranks(arguments.ranks, run_all, *options, timeout_seconds=arguments.timeout)
    rows = {row["name"]: row for row in found}
    for name, (_, _, _, wanted) in cells.items():
        row = rows.get(name)
        if row is None:
            print(f"FAIL {name}: did not end\n{error}")
            continue
        row["ok"] = is_right(row, wanted)
        said = "; ".join(one["text"] for one in row["told"]) or "no verdict"
        print(f"{'ok  ' if row['ok'] else 'FAIL'} {name}: {said}  ({row['seconds']:.0f} s)")
    result = {"command": results.command(), "ranks": arguments.ranks, "environment": environment,
              "rows": list(rows.values()), "error": error}  # fmt: skip
    results.write(arguments.out / "verdicts-gpu-checks.json", result)
    sys.exit(0 if all(rows.get(name, {}).get("ok") for name in cells) else 1)


if __name__ == "__main__":
    main()
