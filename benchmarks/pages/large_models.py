"""docs/large-models.md: what each word gains and costs on GPUs, and the losses of number formats and optimizers."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.harness import ROOT
from benchmarks.harness.results import read
from benchmarks.pages.markdown import table

PICTURE = ROOT / "docs" / "large-models-loss.png"
SEEDS = "bf16, seed"


def one_gpu() -> list[str]:
    return _rows("x1")


def two_gpus() -> list[str]:
    return _rows("x2")


def small() -> list[str]:
    return _rows("small")


def images() -> list[str]:
    return _rows("images", "images/s/GPU")


def _rows(name: str, unit: str = "tokens/s/GPU") -> list[str]:
    """results/large-models-*-<name>.json: speed and peak memory of each row."""
    rows = []
    for measured in read("large-models"):
        if measured.get("table", f"x{measured['ranks']}") == name:
            rows += [_row(row) for row in measured["rows"]]
    return table(["micro-batch", "other than the defaults", unit, "peak reserved GiB", "first step"], rows)


def _row(row: dict[str, Any]) -> list[Any]:
    micro, *others = row["row"].split()
    words = " ".join(f"`{word}`" for word in others) or None
    if "error" in row:
        out_of_memory = "out of memory" in (row["error"] + row.get("traceback", "")).lower()
        return [micro.split("=")[1], words, "out of memory" if out_of_memory else "failed", None, None]
    speed = row["tokens_per_second_per_gpu"] or row["samples_per_second_per_gpu"]
    return [micro.split("=")[1], words, f"{speed:,.0f}", f"{row['peak_reserved_gib']:.1f}",
            f"{row['first_step_seconds']:.0f} s"]  # fmt: skip


def largest() -> list[str]:
    """results/largest-model-*.json: for each row the largest model that made its steps, and the next that did not."""
    rows = []
    for measured in read("largest-model"):
        for name, row in measured["rows"].items():
            fits = max((t for t in row["tries"] if t["fits"]), key=lambda t: t["layers"], default=None)
            fails = min((t["layers"] for t in row["tries"] if not t["fits"]), default=None)
            if fits is not None:
                rows.append([measured["ranks"], name, f"{fits['parameters'] / 1e9:.1f} B", fits["layers"], fails,
                             f"{fits['peak_reserved_gib']:.1f}", f"{fits['seconds_per_step']:.2f} s"])  # fmt: skip
    return table(["GPUs", "", "the largest that fits", "layers", "do not fit", "peak reserved GiB", "a step"], rows)


def loss_curves() -> list[str]:
    """results/loss-curves-*.json: the last validation loss of each curve, beside those of bf16 with several seeds."""
    lines = []
    for measured in read("loss-curves"):
        rows, words = [], dict(word.split("=") for word in measured["words"])
        tokens = int(words["max_steps"]) * int(words["global_batch_size"]) * int(words["data.sequence_length"])
        ends = {name: curve["validation"][-1][1] for name, curve in measured["curves"].items() if "validation" in curve}
        yardstick = mean(end for name, end in ends.items() if name.startswith(SEEDS))
        for name, end in ends.items():
            rows.append([name, f"{end:.4f}", f"{end - yardstick:+.4f}"])
        lines += [
            f"`{measured['command']}`, `model={words['model']}`, {tokens:,} tokens:", "",
            *table(["", "validation loss at the end", "beside the mean of bf16's seeds"], rows),
        ]  # fmt: skip
    return lines


def draw(path: Path = PICTURE) -> None:
    """The curves of the validation loss; nothing where none were measured."""
    measured = read("loss-curves")
    if not measured:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    for name, curve in measured[0]["curves"].items():
        if "validation" in curve:
            steps, losses = zip(*curve["validation"], strict=True)
            grey = {"color": "0.6"} if name.startswith(SEEDS) else {}
            axes.plot(steps, losses, label=name, marker=".", **grey)
    axes.set(xlabel="step", ylabel="validation loss (nats a token)")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)


TABLES = {"large_models_1": one_gpu, "large_models_2": two_gpus, "large_models_small": small,
          "large_models_images": images, "loss_curves": loss_curves, "largest_model": largest}  # fmt: skip
