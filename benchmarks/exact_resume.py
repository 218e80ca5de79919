"""Has a run that was stopped and resumed the same bits as one that was not? The table of docs/checkpointing.md.

    python benchmarks/exact_resume.py                                 all GPUs, deterministic=true
    python benchmarks/exact_resume.py --accelerator cpu --ranks 2

Every configuration of tests/harness/exact_resume.py and a language model makes three steps, saves, and makes four more
steps in a new run. Its rows of metrics.csv and the weights and buffers of every rank are compared with those of a run
that made seven steps without a stop. Writes benchmarks/results/exact-<device>-x<ranks>.json.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.limits import on_ranks  # noqa: E402
from shardwise.plan import Plan  # noqa: E402
from tests.harness.cells import cell_plan  # noqa: E402
from tests.harness.exact_resume import CONFIGS, STEPS, STOP, plan_for, stopped_and_not, unlike  # noqa: E402

LANGUAGE_MODEL = [
    "precision=bf16", "model.dim=512", "model.n_heads=8", "model.n_kv_heads=2", "model.ffn_dim=1024",
    "micro_batch_size=2", "gradient_clip_val=1.0", f"checkpoint.save_every_n_steps={STOP}", "checkpoint=async",
]  # fmt: skip
LANGUAGE = {f"language model, bf16, {s}": [*LANGUAGE_MODEL, f"strategy={s}"] for s in ("ddp", "fsdp", "zero3")}


def plan_of(name: str, folder: Path, ranks: int, accelerator: str, *more: str) -> Plan:
    more = ("deterministic=true", *more)
    if name in LANGUAGE:
        words = [*LANGUAGE[name], f"global_batch_size={4 * ranks}", f"max_steps={STEPS}", *more]
        return cell_plan(folder, ranks, *words, accelerator=accelerator)
    return plan_for(folder, ranks, STEPS, *CONFIGS[name], *more, accelerator=accelerator)


def compared(folder: Path, ranks: int, names: list[str], accelerator: str) -> dict[str, list[str]]:
    """In each rank: configuration → what has other bits after the resume."""
    found = {}
    for number, name in enumerate(names):
        runs = stopped_and_not(
            folder / f"{number}",
            lambda run_dir, *more, name=name: plan_of(name, run_dir, ranks, accelerator, *more),
        )
        assert runs["straight"]["losses"] or os.environ["RANK"] != "0"
        found[name] = unlike(**runs)
    return found


def main() -> int:
    parser = results.command_line(__doc__)
    parser.add_argument("--ranks", type=int, help="default: all GPUs")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for all")
    arguments = parser.parse_args()
    ranks = arguments.ranks or torch.cuda.device_count()
    environment, device = results.measured_on(arguments.accelerator, arguments.commit)
    names = [*CONFIGS, *LANGUAGE]
    with tempfile.TemporaryDirectory() as folder:
        what = (Path(folder), ranks, names, arguments.accelerator)
        found = on_ranks(ranks, compared, *what, timeout_seconds=arguments.timeout)
    result: dict[str, Any] = {
        "command": results.command(),
        "ranks": ranks,
        "environment": environment,
        "settings": {"steps": STEPS, "stopped_after": STOP},
        "overrides": {**CONFIGS, **LANGUAGE},
        "unlike": {name: sorted({what for rank in found for what in rank[name]}) for name in names},
    }
    results.write(arguments.out / f"exact-{device}-x{ranks}.json", result)
    print(json.dumps(result["unlike"], indent=1), flush=True)
    return 1 if any(result["unlike"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
