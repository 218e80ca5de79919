"""docs/gpu.md: what was measured on GPUs alone: modules over NCCL, every strategy beside stock Lightning, images."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from benchmarks.harness.breadth_cells import LARGE, OURS, STOCK
from benchmarks.harness.results import read
from benchmarks.pages.markdown import commit_of, commits_of, table, versions

BOTH = (OURS, STOCK)
PARTS = {"parity": "parity", "modules": "modules", "beside_ddp": "other strategies beside ddp", "curves": "loss curves",
         "speed": "speed"}  # fmt: skip


def page() -> list[str]:
    images = read("images")
    lines = [
        "# On GPUs",
        "",
        "Made by `python benchmarks/report.py` from `benchmarks/results/`; measured by `make gpu-test`"
        + (", `python benchmarks/breadth_gpu.py` and `python benchmarks/images_gpu.py`." if images else "."),
        "",
    ]
    for kind, results in ((first_runs, read("parity")), (breadth, read("breadth")), (images_of, images)):
        lines += [line for result in results for line in kind(result)]
    return lines


def block(words: str, columns: list[str], rows: Iterable[list[Any]]) -> list[str]:
    """A paragraph, and the table that it explains."""
    return [words, "", *table(columns, rows), ""]


# parity_gpu.py


def first_runs(result: dict[str, Any]) -> list[str]:
    environment = result["environment"]
    nccl = f"NCCL {environment['nccl']}"
    has = [name for part, name in PARTS.items() if result.get(part)]
    return [
        f"## {', '.join(has).capitalize()} on {result['ranks']} × {environment['gpus'][0]}",
        "",
        f"{versions(environment, nccl)}, {commit_of(environment)}. `{result['command']}`",
        "",
        *parity(result.get("parity")),
        *modules(result.get("modules")),
        *beside_ddp(result.get("beside_ddp")),
        *curves(finished(result.get("curves"))),
        *speed(finished(result.get("speed")), result["ranks"]),
    ]


def parity(rows: list[dict[str, Any]] | None) -> list[str]:
    """Of results that were measured before parity_matrix.py was there."""
    if not rows:
        return []
    return block(
        f"**Parity**: {rows[0]['steps']} steps of SGD with momentum, accumulation 4, clipping in every step, masked "
        "targets, against a plain one-process loop over the global batch. Per tensor: norm of the difference of "
        "the update over the norm of the reference's update; the largest over all tensors.",
        ["strategy", "precision", "update", "loss", "gradient norm", "bound"],
        (
            [r["strategy"], r["precision"], f"{r['largest_update_deviation']:.1e}",
             f"{r['largest_loss_deviation']:.1e}", f"{r['largest_norm_deviation']:.1e}", f"{r['bound']:.0e}"]
            for r in rows
        ),
    )  # fmt: skip


def modules(rows: list[dict[str, Any]] | None) -> list[str]:
    if not rows:
        return []
    return block(
        "**Modules like those that users bring** (tests/harness/modules.py): after a few steps, the largest "
        "deviation of an update, and of a buffer, from a plain loop in fp32.",
        ["module", "strategy", "precision", "update", "buffer"],
        ([*module(r), f"{r['update']:.1e}", f"{r['buffer']:.1e}"] for r in rows),
    )


def beside_ddp(rows: list[dict[str, Any]] | None) -> list[str]:
    if not rows:
        return []
    return block(
        "**Compared with ddp on the same GPUs** (tests/distributed/test_backward.py, test_scalars.py): modules with "
        "second derivatives, with views that are written to, with layers that pass tensors on inside an object, and "
        "with parameters without a dimension. *update*: the largest deviation of an update from the one under ddp.",
        ["module", "strategy", "precision", "update", "bound"],
        ([*module(r), f"{r['update']:.1e}", f"{r['bound']:.0e}"] for r in rows if r["strategy"] != "ddp"),
    )


def module(row: dict[str, Any]) -> list[str]:
    return [row["module"], row["strategy"], row["precision"]]


def curves(runs: dict[str, Any]) -> list[str]:
    if not runs:
        return []
    first, second = 100, 200
    validation = {name: dict(map(tuple, run["validation"])) for name, run in runs.items()}
    lines = block(
        "**fp32 and bf16 side by side**: the default recipe (a model too small to measure speed on).",
        ["run", f"validation loss at {first}", f"at {second}"],
        ([name, *(f"{at[step]:.4f}" if step in at else "" for step in (first, second))]
         for name, at in validation.items()),
    )  # fmt: skip
    if sample := runs.get("fsdp-bf16", {}).get("sample"):
        lines += ["Generated under `fsdp` in bf16, all ranks taking part:", "", "```", sample.strip(), "```", ""]
    return lines


def speed(runs: dict[str, Any], ranks: int) -> list[str]:
    if not runs:
        return []
    return block(
        "**A first speed**: eager bf16, sequence 8,192, micro-batch 1, AdamW, no activation checkpointing, random "
        "tokens.",
        ["run", "tokens/s/GPU", "peak reserved GiB, rank 0"],
        ([name, f"{run['tokens_per_second'][-1] / ranks:,.0f}", run["peak_memory_gib"]] for name, run in runs.items()),
    )


def finished(runs: dict[str, Any] | None) -> dict[str, Any]:
    return {name: run for name, run in (runs or {}).items() if run["exit_code"] == 0}


# breadth_gpu.py


def breadth(result: dict[str, Any]) -> list[str]:
    """Every strategy and precision, ours beside stock Lightning's."""
    environment, settings = result["environment"], result["settings"]
    return [
        f"## Every strategy beside stock Lightning, {result['ranks']} × {environment['gpus'][0]}",
        "",
        f"Seconds a step and peak allocated GiB on rank 0, ours / stock Lightning "
        f"{environment['packages']['lightning']}; "
        f"eager, AdamW, accumulation {settings['accumulate_grad_batches']}, clipping, the mean of "
        f"{settings['steps'] - settings['warm_up']} steps after {settings['warm_up']}; one run. Commits "
        f"{commits_of(c for c in result['cells'] if c['model'] not in LARGE)}. `{result['command']}`",
        "",
        "Stock Lightning runs with other settings where it refuses these: its FSDPStrategy does not clip, its DDP in "
        "16 bits does not clip with a fused optimizer and was given an unfused one, and its DeepSpeed reduces in 16 "
        "bits. Several cells ran in the same processes: what was allocated when a cell began is subtracted from its "
        "peak.",
        "",
        *(
            line
            for model in settings["models"]
            if model not in LARGE  # docs/performance.md has these
            for line in strategies_of(model, result["cells"])
        ),
        *overflow(result.get("overflow")),
    ]


def strategies_of(model: str, cells: list[dict[str, Any]]) -> list[str]:
    own = {(c["strategy"], c["precision"], c["who"]): c for c in cells if c["model"] == model}
    keys = {(strategy, precision) for strategy, precision, _ in own}
    precisions = [p for p in ("fp32", "bf16", "fp16") if any(key[1] == p for key in keys)]

    def both(strategy: str, precision: str) -> str:
        if (strategy, precision) not in keys:
            return ""
        return " / ".join(time_and_memory(own.get((strategy, precision, who))) for who in BOTH)

    order = dict.fromkeys(strategy for strategy, _, _ in own)
    rows = [[strategy, *(both(strategy, precision) for precision in precisions)] for strategy in order]
    return block(f"**{model}**", ["strategy", *precisions], rows)


def time_and_memory(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "not run"
    if "error" in cell:
        return "fails" if cell["error"] != "did not end" else "did not end"
    return f"{cell['seconds_per_step']:.3f} s, {cell['peak_allocated_gib']:.2f}"


def overflow(rows: list[dict[str, Any]] | None) -> list[str]:
    if not rows:
        return []

    def first_of(row: dict[str, Any], key: str) -> str:
        return ", ".join(str(int(window[key])) for window in row["windows"][:5]) + ", …"

    return block(
        "**fp16, the gradients of one rank overflow in the third window**",
        ["strategy", "skipped", "step counter after each window", "loss scale after it", "weights finite"],
        (
            [r["strategy"], r["skipped_steps"], first_of(r, "global_step"), first_of(r, "loss_scale"),
             "yes" if r["finite"] else "no"]
            for r in rows
        ),
    )  # fmt: skip


# images_gpu.py


def images_of(result: dict[str, Any]) -> list[str]:
    """Speed on images: what each part reached, what failed, and how much of the time the device waited for JPEGs."""
    environment, size, sections = result["environment"], result["size"], result["sections"]
    parts = [(model, what, row) for model, rows in sections.items() for what, row in rows.items() if what != "skipped"]
    reached = [part for part in parts if part[2]["ok"]]
    failed = [f"- {model}, {what}: {row['error']}" for model, what, row in parts if not row["ok"]]
    pillow = f"Pillow {environment['packages']['pillow'] or 'missing'}"
    return [
        f"## Images on 1 × {(environment['gpus'] or ['CPU'])[0]}",
        "",
        f"{versions(environment, pillow)}, {environment['cpus']} CPU cores, commits "
        f"{commits_of(row for _, _, row in parts)}. `{result['command']}`",
        "",
        *block(
            f"**Speed**: {size['batch']} images of {size['image']}×{size['image']} a step, bf16, {size['timed']} steps "
            "after the warm-up. *plain* is a loop written by hand over one normalised batch on the device: autocast, "
            "fused optimizer, nothing distributed. *trainer* is what `python train.py` runs, from uint8 images in "
            "memory through loader workers or from one batch on the device; the ratio is to *plain, compiled*.",
            ["model", "what", "images/s", "ratio to plain loop", "peak reserved GiB"],
            (images_row(*part) for part in reached if part[1].startswith(("plain", "trainer"))),
        ),
        *(line for model, what, row in reached if what.startswith("in turn") for line in in_turn(model, what, row)),
        *jpegs(sections.get("jpeg", {})),
        *(["Not measured:", "", *failed, ""] if failed else []),
    ]


def images_row(model: str, what: str, row: dict[str, Any]) -> list[Any]:
    ratio = f"{row['ratio_to_plain']:.1%}" if row.get("ratio_to_plain") else ""
    name = "resnet50 from JPEGs" if model == "jpeg" else model
    memory = "" if row["peak_memory_gib"] is None else row["peak_memory_gib"]
    return [name, what, f"{row['images_per_second']:,.0f}", ratio, memory]


def in_turn(model: str, what: str, row: dict[str, Any]) -> list[str]:
    """What was measured in turn, in one process. `what`: the part's name, with the words of the Trainer's run."""
    said = [
        f"{median(ratios):.2%} of *{who}* ({min(ratios):.2%} to {max(ratios):.2%})"
        for who, ratios in row["ratios"].items()
    ]
    micro_batch, words = row["plan"]["micro_batch_size"], what.partition(", ")[2]
    return [
        f"**{model}, in turn**: in one process, every round runs some steps of the Trainer ({words}, micro-batch "
        f"{micro_batch}, images from workers) between steps of the plain loops, because the clock rate of a GPU varies "
        f"more than these differ. The Trainer reaches {', '.join(said)}: median and range of "
        f"{len(row['rounds']['trainer'])} rounds.",
        "",
    ]


def jpegs(parts: dict[str, Any]) -> list[str]:
    if parts.get("skipped"):
        return [f"**JPEGs**: not measured, {parts['skipped']}.", ""]
    made, alone, trained = (parts.get(part, {}) for part in ("shards", "decoding alone", "trainer, compile=model"))
    if not (made.get("ok") and alone.get("ok") and trained.get("ok")):
        return []
    waiting = trained["waiting"]
    return [
        f"**JPEGs**: {made['images']:,} of {made['width_height'][0]}×{made['width_height'][1]}, quality "
        f"{made['quality']}, {made['mean_bytes'] / 1e3:,.0f} kB each, in tar shards from the page cache. "
        f"{alone['workers']} workers decode {alone['images_per_second']:,.0f} images/s alone; training takes "
        f"{trained['images_per_second']:,.0f} images/s, and the device waits for data for {waiting['share']:.1%} "
        f"of the time ({waiting['ms_per_step']:.1f} of {waiting['step_ms']:.1f} ms a step).",
        "",
    ]
