"""What race.py compares: the words of our runs and the flags of torchtitan's, by the number of GPUs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.harness import titan

# What a run has if its words do not say otherwise. 1.5 B: torchtitan ties no embeddings.
MODELS = {
    "1.5B": ["model=llama3_1b", "model.tie_embeddings=false", "strategy=ddp"],
    "8B": ["model=llama3_8b", "strategy=fsdp"],
    "70B": ["model=llama3_70b", "strategy=fsdp"],
}
STEPS = {"1.5B": (8, 24), "8B": (8, 24), "70B": (4, 12)}  # of the warm-up, and all
FAST = "loss=fused compile=layer strategy.symmetric_memory=true"  # of 8 B on GPUs of one node
LESS = "compile.recompute_elementwise=true"  # memory
STAY = "strategy.reshard_after_forward=false"  # gathered
THEIRS_STAY = "--parallelism.fsdp_reshard_after_forward never"
AXES = ("tensor", "context", "pipeline")
DEFAULTS = ("precision=bf16", "compile=model", "attention=fa4")  # of ours, where a run does not say otherwise


@dataclass(frozen=True)
class Cell:
    """`ours`: the words of each run. `theirs`: micro-batch, activation checkpointing and flags of each of torchtitan's.

    `best_of`: other cells, whose runs count in this one too.
    """

    name: str
    size: str
    ours: tuple[str, ...]
    theirs: tuple[tuple[int, str, str], ...] = ()
    best_of: tuple[str, ...] = ()
    goal: float | None = None  # our speed over torchtitan's


def axes_in(words: str) -> int:
    """The number of GPUs that a sample is divided over, from our words or torchtitan's flags."""
    sizes = re.findall(rf"\b(?:{'|'.join(AXES)})_parallel_(?:size=|degree )(\d+)", words)
    return math.prod(map(int, sizes))


def with_defaults(words: str) -> str:
    given = {word.split("=")[0] for word in words.split()}
    return " ".join([words, *(word for word in DEFAULTS if word.split("=")[0] not in given)])


def flags_of(micro_batch: int, checkpointing: str, more: str) -> str:
    """torchtitan's."""
    return f"--training.local_batch_size {micro_batch} --activation_checkpoint.mode {checkpointing} {more}".strip()


def runs_in(names: Iterable[str], ranks: int, *, is_ours: bool) -> set[tuple[str, str]]:
    """Cell, and words or flags, of the runs that the cells with these names ask for."""
    cells = [cell for cell in cells_on(ranks) if cell.name in names]
    if is_ours:
        return {(cell.name, with_defaults(words)) for cell in cells for words in cell.ours}
    return {(cell.name, flags_of(*run)) for cell in cells for run in cell.theirs}


def cells_on(ranks: int) -> tuple[Cell, ...]:
    if ranks == 1:
        return _one_gpu()
    return (*(_two_gpus() if ranks == 2 else _node(ranks)), *_scaling(), *_axes(ranks))


def _one_gpu() -> tuple[Cell, ...]:
    full, fused = "loss=full", "loss=fused"
    return (
        Cell("micro-batch 2", "1.5B", (f"micro_batch_size=2 {fused}",), ((2, "none", ""),), goal=1.08),
        Cell("micro-batch 4", "1.5B", (f"micro_batch_size=4 {full}", f"micro_batch_size=4 {fused}"),
             ((4, "none", ""),)),
        Cell("best micro-batch", "1.5B", (f"micro_batch_size=10 {fused}", f"micro_batch_size=14 {fused} {LESS}"),
             ((6, "none", ""), (8, "none", "")), best_of=("micro-batch 2", "micro-batch 4"), goal=1.12),
        Cell("fp8, micro-batch 4", "1.5B", (f"micro_batch_size=4 precision=fp8 {fused}",), ((4, "none", titan.FP8),),
             goal=1.10),
        Cell("fp8, best micro-batch", "1.5B", tuple(f"micro_batch_size={n} precision=fp8 {fused}" for n in (8, 10)),
             ((6, "none", titan.FP8), (8, "none", titan.FP8)), best_of=("fp8, micro-batch 4",), goal=1.10),
    )  # fmt: skip


def _two_gpus() -> tuple[Cell, ...]:
    def both(words: str, more: str = FAST) -> tuple[str, str]:
        return f"{words} {more}", f"{words} {more} {STAY}"

    def theirs(micro_batch: int, checkpointing: str, more: str = "") -> tuple[tuple[int, str, str], ...]:
        return tuple((micro_batch, checkpointing, f"{more} {stay}".strip()) for stay in ("", THEIRS_STAY))

    one = "no checkpointing, micro-batch 1"
    full = "full checkpointing, micro-batch 2"
    return (
        Cell(one, "8B", both("micro_batch_size=1", f"{FAST} {LESS}"), theirs(1, "none"), goal=1.10),
        Cell(full, "8B", both("micro_batch_size=2 activation_checkpointing=full"), theirs(2, "full"), goal=1.08),
        Cell("best", "8B", both("micro_batch_size=2", f"{FAST} {LESS}"),
             ((3, "selective", ""), (2, "none", "")), best_of=(one, full), goal=1.10),
        Cell("fp8, micro-batch 1", "8B", both("micro_batch_size=1 precision=fp8"), theirs(1, "none", titan.FP8),
             goal=1.10),
        Cell("fp8, best", "8B", both("micro_batch_size=2 precision=fp8"),
             ((2, "selective", titan.FP8), (2, "none", titan.FP8)), best_of=("fp8, micro-batch 1",), goal=1.10),
    )  # fmt: skip


def _node(ranks: int) -> tuple[Cell, ...]:
    """Four or eight GPUs. Copies: two, each of which is divided over half of the GPUs."""
    half, fast = ranks // 2, f"{FAST} {STAY}"
    copies = f"--parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree {half}"
    micro = 1 if ranks == 4 else 2  # torchtitan's two sequences do not fit beside half of the state
    # Weights in 16 bits where fp32 masters do not fit: 70 B of them and their gradients take 280 GB a copy more.
    large = f"micro_batch_size=1 optimizer=adamw_8bit activation_checkpointing=full {FAST}"
    return (
        Cell("micro-batch 2", "8B", (f"micro_batch_size=2 {fast}",), ((2, "none", ""), (2, "none", THEIRS_STAY)),
             goal=1.10),
        Cell("best micro-batch", "8B", tuple(f"micro_batch_size={n} {FAST} {LESS}" for n in (3, 4)), ((3, "none", ""),),
             best_of=("micro-batch 2",), goal=1.10),
        Cell("fp8, micro-batch 2", "8B", (f"micro_batch_size=2 precision=fp8 {fast}",),
             ((2, "none", titan.FP8), *(((2, "selective", titan.FP8),) if ranks == 4 else ())), goal=1.10),
        Cell(f"hybrid 2 × {half}, micro-batch {micro}", "8B",
             tuple(f"micro_batch_size={micro} strategy=fsdp_hybrid strategy.shard_size={half} {words}"
                   for words in (FAST, fast)),
             ((micro, "none", copies), (micro, "none", f"{copies} {THEIRS_STAY}")), goal=1.10),
        Cell("70 B", "70B", (large if ranks == 8 else f"{large} precision=bf16_true",)),
    )  # fmt: skip


def _scaling() -> tuple[Cell, ...]:
    """One GPU has its part of this in "micro-batch 4"."""
    return (Cell("scaling, 1.5 B", "1.5B", ("micro_batch_size=4 loss=fused",)),)


def _axes(ranks: int) -> tuple[Cell, ...]:
    """Each axis over two GPUs, and shards over the others; as many tokens a GPU in all but the pipeline.

    torchtitan computes in 16 bits what FSDP divides. Where that is nothing its weights, and so its optimizer, are in
    16 bits: less work than ours, which is better than a race against products in fp32.
    """
    found, half = [], " --training.dtype bfloat16" if ranks == 2 else ""
    schedules = ("", " --parallelism.pipeline_parallel_schedule Interleaved1F1B")  # torchtitan's own is 1F1B
    for size, micro in (("1.5B", 2), ("8B", 1)):  # torchtitan's do not fit into 80 GB with more
        words, layer = f"strategy=fsdp micro_batch_size={2 * micro}", "compile=layer"
        tensor, context = (f"{words} strategy.{axis}_parallel_size=2" for axis in ("tensor", "context"))
        if ranks == 2:  # a rank has all of its part, and would only cast it again
            tensor += f" {STAY}"
        fastest = f"{tensor} {layer} strategy.symmetric_memory=true"  # at 1.5 B, where the others were tried
        pipeline = (
            f"strategy=fsdp micro_batch_size=1 global_batch_size={2 * ranks} strategy.pipeline_parallel_size=2 {layer} "
            f"{STAY}"
        )
        flag, beside = "--parallelism.{}_parallel_degree 2", " --parallelism.enable_async_tensor_parallel"
        if ranks == 2 and size == "1.5B":
            found.append(Cell("shards alone, 1.5B", size, ("strategy=fsdp micro_batch_size=4 loss=fused",),
                              ((4, "none", ""),)))  # fmt: skip
        found += [
            Cell(f"tensor axis of 2, {size}", size,
                 (tensor, f"{tensor} {layer}", fastest) if size == "1.5B" else (fastest,),
                 tuple((2 * micro, "none", flag.format("tensor") + half + more) for more in ("", beside)), goal=1.10),
            Cell(f"pipeline of 2, {size}", size,
                 (pipeline, f"{pipeline} strategy.pipeline_schedule=interleaved strategy.pipeline_chunks=2"),
                 tuple((4, "none", f"{flag.format('pipeline')}{half}{schedule}") for schedule in schedules), goal=1.10),
            Cell(f"context axis of 2, {size}", size, (f"{context} {layer}",),
                 ((2 * micro, "none", flag.format("context")),)),
        ]  # fmt: skip
    return tuple(found)
