"""What `make parity` runs of the axes that divide layers, sequences and depth: layouts × what makes them hard."""

from __future__ import annotations

from typing import Any

import torch

from tests.harness.divided import BATCH, CLIP, STEPS, Divided, deviation
from tests.harness.layouts import AXES, LAYERS, LAYOUTS
from tests.harness.parity import BOUNDS
from tests.harness.reference import WEIGHT_DECAY

RECOMPUTED = {word: (f"activation_checkpointing={word}", "loss=chunked") for word in ("full", "selective")}
# Precision, optimizer, tied embeddings, micro-batches of a step, clipping, activation checkpointing. Any two values of
# the first five occur together, and every value occurs in the first four rows.
MIXTURES: list[tuple[str, str, bool, int, float | None, tuple[str, ...]]] = [
    ("fp64", "adamw", True, 1, CLIP, ()),
    ("fp64", "sgd", True, 4, None, RECOMPUTED["selective"]),
    ("fp64", "sgd", False, 2, CLIP, ()),
    ("fp32", "sgd", True, 8, CLIP, RECOMPUTED["full"]),
    ("fp64", "adamw", False, 8, None, RECOMPUTED["full"]),
    ("fp32", "adamw", True, 2, None, ()),
    ("fp32", "adamw", False, 4, CLIP, RECOMPUTED["selective"]),
    ("fp32", "sgd", False, 1, None, ()),
]
SETTINGS = {"steps": STEPS, "global_batch_size": BATCH, "clip": CLIP, "weight_decay": WEIGHT_DECAY}


def axes_cells(ranks: int) -> dict[Divided, str]:
    """Each layout of `ranks` ranks with its mixtures, all of them on two ranks and the first four on more: a cell →
    the layout's name."""
    cells = {}
    for name in AXES:
        of_layout, data_ranks, words = LAYOUTS[name]
        for precision, optimizer, tied, accumulate, clip, more in MIXTURES[: 8 if ranks == 2 else 4]:
            # An interleaved schedule takes a multiple of its ranks, and a micro-batch one sample at least.
            micro_batches = max(2 if "interleaved" in name else 1, min(accumulate, BATCH // data_ranks))
            cell = Divided(words, data_ranks, precision, optimizer, tied, micro_batches, clip, LAYERS, more)
            if of_layout == ranks:
                cells[cell] = name
    return cells


def row_of(name: str, cell: Divided, ranks: list[dict[str, Any]], accelerator: str = "cpu") -> dict[str, Any]:
    """A row of the matrix: how far rank 0 is from the plain loop, and whether every rank ended as it did."""
    first, *others = ranks
    numbers, bound = deviation(cell, first, accelerator), BOUNDS[cell.precision]
    alike = all(
        other["validation"] == first["validation"]
        and all(torch.equal(other["final"][key], tensor) for key, tensor in first["final"].items())
        for other in others
    )
    return {
        **vars(cell), "layout": name, **numbers, "bound": bound, "ranks_alike": alike,
        "holds": alike and max(numbers.values()) <= bound, "overrides": cell.words(),
    }  # fmt: skip
