"""docs/parity.md: how far each strategy, and each layout of more axes, is from the plain loop, beside stock Lightning,
and what that takes."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.results import read
from benchmarks.pages.markdown import commit_of, device_of, table, versions


def page() -> list[str]:
    """No lines where the matrix has not been measured."""
    if not (results := read("matrix")):
        return []
    settings = results[0]["settings"]
    lines = [
        "# Parity",
        "",
        "Made by `python benchmarks/report.py`; measured by `make parity` and `make parity-gpu`. "
        f"{settings['steps']} steps of a small model (tests/harness/everything.py) with a tied weight, a frozen "
        "part, sizes that no number of ranks divides, padded sequences with different numbers of valid tokens, and, in "
        "most cells, weights that no rank or only one rank needs in a step (`ddp` and `zero*` run with "
        "`strategy.find_unused_parameters=true`); SGD with momentum and AdamW, accumulation "
        f"1 and 4, without clipping and clipped to {settings['clip']}, which takes effect in every step. The reference "
        "is one process, the whole global batch, no Lightning (tests/harness/reference.py). *update*: per tensor, norm "
        "of the difference of the update over the norm of the reference's; each number is the largest over tensors, "
        "steps and cells.",
        "",
    ]
    for result in results:
        lines += matrix(result)
        alike = [r for r in results if r["ranks"] == result["ranks"]]
        every = dict.fromkeys(cell["strategy"] for r in alike for cell in r["cells"])
        if missing := [name for name in every if name not in {cell["strategy"] for cell in result["cells"]}]:
            lines += [f"Not measured here: {'; '.join(missing)}.", ""]
    return lines + axes() + first_steps()


def first_steps() -> list[str]:
    """Losses and gradient norms of wide models, beside ddp."""
    lines = []
    for result in read("first-steps"):
        rows = []
        for row in result["rows"]:
            missing = "not run" if "left_out" in row else row.get("error", "did not end").partition(":")[0]
            off = [f"{row[key]:.1e}" if key in row else missing for key in ("first", "later")]
            rows.append([f"`{row['words']}`", *off])
        lines += [
            f"**On {result['ranks']} × {device_of(result, 'CPU', default='cuda')}**, "
            f"{commit_of(result['environment'])}, `{result['command']}`:",
            "",
            *table(["", "first step", "the next three"], rows),
            "",
        ]
    said = (
        "The first steps of a model as wide as those that people train: four layers of Llama 3 1 B, an embedding and a "
        "head of 134 million parameters each, in bf16. Each number is the largest relative deviation of a loss or a "
        "gradient norm from that under `strategy=ddp`."
    )
    return ["## At real width", "", said, "", *lines] if lines else []


def axes() -> list[str]:
    """The layouts of tensor, context and pipeline axes: a row for each layout and precision."""
    if not (measured := read("axes")):
        return []
    settings = measured[0]["settings"]
    lines = [
        "## Tensor, context and pipeline axes",
        "",
        f"{settings['steps']} steps of the language model with four layers (tests/harness/axes.py). No number of ranks "
        "divides its vocabulary, sequences have different numbers of valid tokens, and the last batch of the "
        "validation is smaller. *shard*: FSDP2 over as many ranks. *copies*: ranks that hold the same. The reference "
        "is again one process and the whole global batch. A cell also fails if a rank ends with other weights, in any "
        "bit, or with other metrics.",
        "",
        "**Not the full product.** There are two precisions, SGD with momentum and AdamW, tied and untied embeddings, "
        f"clipping to {settings['clip']} and none, 1, 2, 4 and 8 micro-batches a step, and activation checkpointing: "
        "none, selective and full. On two ranks each layout has eight cells, in which any two values of the first five "
        "occur together. On more ranks each layout has four cells, in which every value occurs. So every value occurs "
        "with every axis. A micro-batch has at least one sample: layouts with two data ranks have at most four "
        "micro-batches a step, and those with four have at most two. An interleaved pipeline has at least two.",
        "",
    ]
    for result in measured:
        cells = result["cells"]
        kinds = dict.fromkeys((c["layout"], c["precision"]) for c in cells)
        rows = [
            [*kind, *worst([c for c in cells if (c["layout"], c["precision"]) == kind], "validation")] for kind in kinds
        ]
        lines += [
            *heading(result, "###"),
            *table(["layout", "precision", "cells", "update", "loss", "gradient norm", "validation", "bound"], rows),
            "",
        ]
    return lines


def heading(result: dict[str, Any], level: str) -> list[str]:
    environment = result["environment"]
    return [
        f"{level} {result['ranks']} × {device_of(result, 'CPU processes, gloo', default='cpu')}",
        "",
        f"{versions(environment)}, {commit_of(environment)}. `{result['command']}`",
        "",
    ]


def matrix(result: dict[str, Any]) -> list[str]:
    """One run of the matrix: a row for each strategy and precision."""
    cells = result["cells"]
    kinds = dict.fromkeys((c["strategy"], c["precision"]) for c in cells)
    rows = [[*kind, *worst([c for c in cells if (c["strategy"], c["precision"]) == kind])] for kind in kinds]
    return [
        *heading(result, "##"),
        *table(["strategy", "precision", "cells", "update", "loss", "gradient norm", "bound"], rows),
        "",
        *stock(result),
        *traffic(result),
    ]


def worst(cells: list[dict[str, Any]], *more: str) -> list[str]:
    """How many cells ended, their largest deviations, and the bound."""
    ran = [c for c in cells if "error" not in c]
    ended = f"{len(ran)}" + ("" if len(ran) == len(cells) else f" of {len(cells)} ended")
    largest = [f"{max(c[key] for c in ran):.1e}" if ran else "" for key in ("update", "loss", "gradient_norm", *more)]
    broken = "" if all(c["holds"] for c in ran) else " **exceeded**"
    return [ended, *largest, (f"{ran[0]['bound']:.0e}" if ran else "") + broken]


def stock(result: dict[str, Any]) -> list[str]:
    """Stock Lightning's update, beside the largest of ours with the same optimizer, accumulation and clipping."""
    if not (measured := result["stock"]):
        return []
    kinds = list(dict.fromkeys(map(kind_of, measured)))
    rows = []
    for strategy in dict.fromkeys(r["strategy"] for r in measured):
        own = {kind_of(r): r for r in measured if r["strategy"] == strategy}
        rows.append([strategy, *(update_of(own[kind]) for kind in kinds if kind in own)])
    rows.append(["ours, the largest of any strategy", *(largest_of(result["cells"], kind) for kind in kinds)])
    return [
        "**Stock Lightning**: the same network and rows under a plain Trainer, mean loss of each micro-batch, fp32; "
        "update. Its DeepSpeedStrategy refuses CPUs; there a subclass that does not is used.",
        "",
        *table(["strategy", *(f"{o}, accumulation {a}{', clipped' if c else ''}" for o, a, c in kinds)], rows),
        "",
    ]


def update_of(row: dict[str, Any]) -> str:
    return f"{row['update']:.1e}" if "update" in row else str(row["error"])


def kind_of(row: dict[str, Any]) -> tuple[str, int, float | None]:
    return row["optimizer"], row["accumulate"], row["clip"]


def largest_of(cells: list[dict[str, Any]], kind: tuple[str, int, float | None]) -> str:
    updates = [c["update"] for c in cells if kind_of(c) == kind and c["precision"] == "fp32" and "update" in c]
    return f"{max(updates):.1e}" if updates else "not run"


def traffic(result: dict[str, Any]) -> list[str]:
    """Collectives of a step, shares held and dtypes, one row a strategy."""
    measured = [c for c in result["cells"] if c.get("collectives") and c["accumulate"] == 4
                and c["precision"] == "fp32" and c["optimizer"] == "adamw"]  # fmt: skip
    if not measured:
        return []
    memory = memory_of(result["ranks"]) if "--accelerator cuda" in result["command"] else {}
    rows = []
    for cell in measured:
        counts = ", ".join(f"{count} {kind.replace('_', '-')}" for kind, count in cell["collectives"].items())
        shares = [f"{cell['held'][key]:.2f}" for key in ("parameters", "optimizer_state")]
        gib = [f"{memory[cell['strategy']]:.2f}" if cell["strategy"] in memory else None] if memory else []
        rows.append([cell["strategy"], counts, *shares, ", ".join(cell["dtypes"]), *gib])
    return [
        "**What a step does**, accumulation 4, AdamW: collectives of rank 0 by kind (*scalars*: sums of at "
        "most four elements: losses, weights, norms; where a strategy has reduce-scatters, "
        "its all-reduce is over the norms of the tensors), the share that rank 0 holds between steps (padding "
        "included), dtypes of parameters, computing and reduction in fp32"
        + (", and peak allocated GiB of gpt2_124m in bf16 (docs/gpu.md)." if memory else "."),
        "",
        *table(["strategy", "collectives", "parameters", "optimizer state", "dtypes", *["GiB"] * bool(memory)], rows),
        "",
    ]


def memory_of(ranks: int) -> dict[str, float]:
    """Strategy → the peak of gpt2_124m in bf16 on as many GPUs, from the results of breadth_gpu.py."""
    return {
        cell["strategy"]: cell["peak_allocated_gib"]
        for run in read("breadth")
        if run["ranks"] == ranks
        for cell in run["cells"]
        if (cell["who"], cell["model"], cell["precision"]) == ("shardwise", "gpt2_124m", "bf16")
        and "peak_allocated_gib" in cell
    }
