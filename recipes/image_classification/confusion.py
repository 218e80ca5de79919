"""What an evaluation leaves of its classes: a file for the report of the run, and a picture."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

MOST_CLASSES_DRAWN = 100  # beyond them a confusion matrix is neither kept nor drawn
MOST_CLASSES_NUMBERED = 20
_LONGEST_NAME = 24


def write_classes(path: Path, names: Sequence[str], images: Tensor, right: Tensor, predicted: Tensor) -> None:
    """Of each class: how many images it has, how many of these were recognised, and for how many it was predicted."""
    rows = {"classes": names, "images": images.tolist(), "right": right.tolist(), "predicted": predicted.tolist()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows) + "\n")


def draw_confusion(counts: Tensor, path: Path, title: str, names: Sequence[str]) -> None:
    """Rows are true classes and columns predicted ones; shades are shares of the row, numbers are images."""
    classes = len(counts)
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    size = 3 + 0.3 * min(classes, 30)
    figure = Figure(figsize=(size + 1, size), layout="constrained")  # not pyplot, whose figures are global
    axes = figure.add_subplot()
    figure.colorbar(axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1), label="share of the true class")
    axes.set(xlabel="predicted class", ylabel="true class", title=title)
    small = 8 if classes <= MOST_CLASSES_NUMBERED else 240 / classes
    # A name with a dollar would be read as a formula.
    labels = [name[:_LONGEST_NAME].replace("$", r"\$") for name in names]
    axes.set_xticks(range(classes), labels, rotation=90, fontsize=small)
    axes.set_yticks(range(classes), labels, fontsize=small)
    if classes <= MOST_CLASSES_NUMBERED:
        for row, column in torch.nonzero(counts).tolist():
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(int(counts[row, column])), ha="center", va="center", fontsize=8, color=colour)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
