"""Whether every strategy, axis and option takes the same first steps of a model as wide as those that people train.

    python benchmarks/gpu_checks/first_steps.py                    all GPUs, at most four: five minutes
    python benchmarks/gpu_checks/first_steps.py --only 'zero|tensor'         some of them
    python benchmarks/gpu_checks/first_steps.py --accelerator cpu --ranks 2 --tiny         tries it out

Four layers of Llama 3 1 B, with an embedding and a head of 134 million parameters each, in bf16, the same micro-batch
for all ranks. What goes wrong at such sizes alone is seen here, and not in the parity matrix: gradients larger than a
bucket, memory that one stream gives back while another uses it. The logged losses and gradient norms are compared with
those of ddp, step by step. Writes benchmarks/results/first-steps-<gpu>-x<ranks>.json, prints a line for each run, and
exits with 1 if one differs by more than bf16 rounds. A run whose package or GPU is not there is left out.
"""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.data import NO_CORPUS, Held, batch_of_tokens  # noqa: E402
from benchmarks.harness.device import device_of  # noqa: E402
from benchmarks.harness.limits import note, rows_of_ranks  # noqa: E402
from benchmarks.harness.observed import start_afresh  # noqa: E402
from benchmarks.harness.trainers import TINY_LANGUAGE_MODEL, on_all, our_trainer, resolve  # noqa: E402
from shardwise.distributed.mesh import init_process_group  # noqa: E402
from shardwise.errors import ConfigError  # noqa: E402
from shardwise.rank import quiet_lightning  # noqa: E402
from shardwise.run_dir.files import METRICS, read_rows  # noqa: E402
from shardwise.trainer import build_module  # noqa: E402

STEPS, ACCUMULATE = 4, 2
ALWAYS = [
    "data._target_=benchmarks.harness.data.Held", *NO_CORPUS, "module.sample_tokens=0", "schedule=none",
    "checkpoint=none", "validate_every_n_steps=1000000", "log_every_n_steps=1", "optimizer.lr=1e-4",
    f"max_steps={STEPS}", "precision=bf16", "micro_batch_size=2",
]  # fmt: skip
MODEL = ["model=llama3_1b", "model.n_layers=4", "model.vocab_size=65536", "model.tie_embeddings=false",
         "data.sequence_length=2048"]  # fmt: skip
REFERENCE = "strategy=ddp"
TENSOR, CONTEXT, PIPELINE = (f"strategy=fsdp strategy.{axis}_parallel_size=2" for axis in
                             ("tensor", "context", "pipeline"))  # fmt: skip
RUNS = (
    REFERENCE,
    "strategy=ddp compile=model",
    "strategy=fsdp",
    "strategy=fsdp strategy.reshard_after_forward=false",
    "strategy=fsdp strategy.symmetric_memory=true",
    "strategy=fsdp strategy.symmetric_memory=true strategy.reshard_after_forward=false compile=layer",
    "strategy=fsdp strategy.defer_gradient_sync=false",
    "strategy=fsdp compile=layer compile.recompute_elementwise=true",
    "strategy=fsdp activation_checkpointing=full",
    "strategy=fsdp activation_checkpointing=selective compile=layer",
    "strategy=fsdp loss=chunked",
    "strategy=fsdp loss=fused",
    "strategy=fsdp attention=cudnn",
    "strategy=fsdp attention=fa4",
    "strategy=fsdp_hybrid",
    "strategy=zero1",
    "strategy=zero2",
    "strategy=zero2 strategy.reduce_bucket_elements=1000000",
    "strategy=zero2 strategy.offload_optimizer=true",
    "strategy=zero3",
    "strategy=zero3 strategy.offload_optimizer=true strategy.offload_parameters=true",
    TENSOR,
    f"{TENSOR} strategy.symmetric_memory=true compile=layer",
    f"{TENSOR} loss=fused",
    CONTEXT,
    f"{CONTEXT} strategy.context_parallel_method=heads",
    PIPELINE,
    f"{PIPELINE} strategy.pipeline_schedule=interleaved strategy.pipeline_chunks=2 compile=layer",
)
MAY_BE_MISSING = ("symmetric_memory", "loss=fused", "attention=", "strategy=zero")  # GPUs, their links, or packages
FIRST, LATER = 5e-3, 3e-2  # relative: of the first step, whose weights are the same, and of those behind it


def chosen_runs(only: str, ranks: int) -> list[str]:
    """One rank has nothing to divide."""
    there = [run for run in RUNS if ranks > 1 or not ("parallel_size" in run or "hybrid" in run)]
    wanted = results.chosen(only, there)
    return [run for run in there if run == REFERENCE or run in wanted]


def words_of(run: str, ranks: int, tiny: bool) -> list[str]:
    more = [f"strategy.shard_size={max(1, ranks // 2)}"] if "hybrid" in run else []
    small = [word for word in TINY_LANGUAGE_MODEL if tiny and not word.startswith(("micro", "model.n_layers"))]
    return on_all([*run.split(), *more, *ALWAYS, *MODEL, *small], ranks, ACCUMULATE)


def take_steps(folder: Path, ranks: int, accelerator: str, tiny: bool, only: str) -> None:
    """In each rank, run after run. Rank 0 writes a row for each."""
    device = device_of(accelerator)
    quiet_lightning()
    for number, run in enumerate(chosen_runs(only, ranks)):
        start_afresh(device)
        row: dict[str, Any] = {"words": run}
        try:
            plan = resolve(words_of(run, ranks, tiny), accelerator, folder, f"run{number}")
            if not torch.distributed.is_initialized():
                init_process_group(plan)
            with contextlib.redirect_stdout(io.StringIO()):
                module = build_module(plan)
                our_trainer(plan, module).fit(module, datamodule=Held(batch_of_tokens(plan), plan.micro_batch_size))
            row["plan"] = {
                "attention": plan.chosen_attention.name, "loss": plan.chosen_loss.name, "compile": plan.compile.name
            }  # fmt: skip
            if torch.distributed.get_rank() == 0:
                rows = read_rows(Path(plan.run_dir) / METRICS)
                row |= {name: [float(one[f"train/{name}"]) for one in rows] for name in ("loss", "gradient_norm")}
        except ConfigError as error:
            row["left_out" if any(word in run for word in MAY_BE_MISSING) else "error"] = str(error)
        except Exception as error:  # the others are compared all the same
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"[:500]
        note(folder, row)


def compare(row: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """The largest relative deviation in the first step and in those behind it, and whether they hold."""
    if "loss" not in row:
        return row | {"holds": "left_out" in row}
    off = [[abs(own / other - 1) for own, other in zip(row[name], reference[name], strict=True)]
           for name in ("loss", "gradient_norm")]  # fmt: skip
    first, later = [steps[0] for steps in off], [one for steps in off for one in steps[1:]]
    # One by one, as `max` may pass over NaN
    holds = all(one <= FIRST for one in first) and all(one <= LATER for one in later)
    return row | {"first": max(first), "later": max(later), "holds": holds}


def said(row: dict[str, Any]) -> str:
    if "loss" not in row:
        return row.get("left_out") or row["error"]
    norms = ", ".join(f"{norm:.4g}" for norm in row["gradient_norm"])
    return f"off by {row['first']:.1e}, later {row['later']:.1e}; gradient norms {norms}"


def main() -> None:
    parser = results.command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=max(1, min(4, torch.cuda.device_count())))
    parser.add_argument("--tiny", action="store_true", help="a small model, for trying it out")
    parser.add_argument("--only", default="", help="a regular expression: runs besides the reference")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for all runs together")
    options = parser.parse_args()
    environment, device = results.measured_on(options.accelerator, options.commit)
    given = (options.ranks, options.accelerator, options.tiny, options.only)
    rows, error = rows_of_ranks(options.ranks, take_steps, *given, timeout_seconds=options.timeout)
    reference = next((row for row in rows if row["words"] == REFERENCE and "loss" in row), None)
    if reference is None:
        sys.exit(f"error: {REFERENCE} itself did not end\n{error}{rows}")
    missing = [run for run in chosen_runs(options.only, options.ranks) if run not in {row["words"] for row in rows}]
    rows = [compare(row, reference) for row in [*rows, *({"words": run, "error": "did not end"} for run in missing)]]
    for row in rows:
        print(f"{'left' if 'left_out' in row else 'ok  ' if row['holds'] else 'FAIL'} {row['words']}: {said(row)}")
    result = {"command": results.command(), "ranks": options.ranks, "environment": environment, "model": MODEL,
              "bounds": {"first": FIRST, "later": LATER}, "rows": rows, "error": error}  # fmt: skip
    results.write(options.out / f"first-steps-{device}-x{options.ranks}.json", result)
    if error:
        print(error)
    sys.exit(0 if all(row["holds"] for row in rows) else 1)


if __name__ == "__main__":
    main()
