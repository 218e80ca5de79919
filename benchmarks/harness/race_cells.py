"""What race.py compares: the words of our runs and the flags of torchtitan's, by the number of GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness import titan


@dataclass(frozen=True)
class Cell:
    """`ours`: the words of each run. `theirs`: micro-batch, activation checkpointing and flags of each of torchtitan's.

    `best_of`: other cells, whose runs count in this one too.
    """

    name: str
    ours: tuple[str, ...]
    theirs: tuple[tuple[int, str, str], ...]
    best_of: tuple[str, ...] = ()


CELLS = {
    1: (
        Cell("micro-batch 2", ("micro_batch_size=2 loss=fused",), ((2, "none", ""),)),
        Cell("micro-batch 4", ("micro_batch_size=4 loss=full", "micro_batch_size=4 loss=fused"), ((4, "none", ""),)),
        Cell("best micro-batch", ("micro_batch_size=8 loss=fused", "micro_batch_size=10 loss=fused"),
             ((6, "none", ""),), best_of=("micro-batch 2", "micro-batch 4")),
        Cell("fp8, micro-batch 4", ("micro_batch_size=4 precision=fp8 loss=fused",), ((4, "none", titan.FP8),)),
        Cell("fp8, best micro-batch", ("micro_batch_size=8 precision=fp8 loss=fused",
             "micro_batch_size=10 precision=fp8 loss=fused"), ((6, "none", titan.FP8),),
             best_of=("fp8, micro-batch 4",)),
    ),
    2: (
        Cell("no checkpointing, micro-batch 1",
             ("micro_batch_size=1 loss=fused", "micro_batch_size=1 loss=full",
              "micro_batch_size=1 loss=fused compile=layer"), ((1, "none", ""),)),
        Cell("full checkpointing, micro-batch 2",
             ("micro_batch_size=2 loss=fused activation_checkpointing=full",
              "micro_batch_size=2 loss=fused activation_checkpointing=full compile=layer"), ((2, "full", ""),)),
        Cell("best", ("micro_batch_size=3 loss=fused activation_checkpointing=selective",
             "micro_batch_size=3 loss=fused activation_checkpointing=selective compile=layer"),
             ((3, "selective", ""),),
             best_of=("no checkpointing, micro-batch 1", "full checkpointing, micro-batch 2")),
        Cell("fp8, micro-batch 1", ("micro_batch_size=1 precision=fp8 loss=fused",
             "micro_batch_size=1 precision=fp8 loss=fused compile=layer"), ((1, "none", titan.FP8),)),
    ),
}  # fmt: skip
