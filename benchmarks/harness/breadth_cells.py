"""What breadth_gpu.py compares: models, strategies, and who runs them."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import trainers
from benchmarks.harness.data import NO_CORPUS

OURS, COMPILED, STOCK = "shardwise", "shardwise, compiled", "stock Lightning"

TOKENS = [
    "data._target_=benchmarks.harness.data.RandomTokens", *NO_CORPUS, "+data.vocab_size=${model.vocab_size}",
    "module.sample_tokens=0", "optimizer.lr=1e-4",
]  # fmt: skip
LLAMA = [*TOKENS, "data.sequence_length=8192", "micro_batch_size=1"]
MODELS = {
    "gpt2_124m": ["model=gpt2_124m", *TOKENS, "data.sequence_length=1024", "micro_batch_size=8"],
    "resnet50": [
        "recipe=image_classification", "model=resnet50", "data=synthetic_images", "data.num_workers=0",
        "micro_batch_size=64", "module.channels_last=true", "module.augment=null", "optimizer.lr=1e-4",
    ],
    "llama3_1b": ["model=llama3_1b", "model.tie_embeddings=false", *LLAMA],
    # What eager layers keep of 8,192 tokens does not fit beside the state on two GPUs.
    "llama3_8b": ["model=llama3_8b", *LLAMA, "data.sequence_length=4096"],
}  # fmt: skip
TINY = {
    "gpt2_124m": trainers.TINY_LANGUAGE_MODEL,
    "resnet50": ["model.layers=[3,4,6,3]", "model.width=8", "data.image_size=32", "micro_batch_size=4"],
    "llama3_1b": trainers.TINY_LANGUAGE_MODEL,
    "llama3_8b": trainers.TINY_LANGUAGE_MODEL,
}  # fmt: skip
# Of large models the strategies whose state fits on a few GPUs; the last is the one that needs most memory.
LARGE = {
    "llama3_1b": ("fsdp", "zero3", "zero2", "zero1", "fsdp_hybrid", "ddp"),
    "llama3_8b": ("fsdp", "zero3", "zero2"),
}
FAST = {"cuda": ["compile=layer", "attention=fa4", "loss=fused"], "cpu": ["compile=layer"]}


def fast_words(accelerator: str, strategy: str) -> list[str]:
    """What a user would add to make a large model fast."""
    copies = ["strategy.symmetric_memory=null"] if strategy in ("fsdp", "fsdp_hybrid") else []
    return [*FAST[accelerator], *copies]


STRATEGIES: dict[str, list[str]] = {
    **{name: [f"strategy={name}"] for name in ("ddp", "fsdp", "fsdp_hybrid", "zero1", "zero2", "zero3")},
    "zero1, optimizer offloaded": ["strategy=zero1", "strategy.offload_optimizer=true"],
    "zero2, optimizer offloaded": ["strategy=zero2", "strategy.offload_optimizer=true"],
    "zero3, all offloaded": ["strategy=zero3", "strategy.offload_optimizer=true", "strategy.offload_parameters=true"],
}


KEYS = ("who", "model", "strategy", "precision")  # of a cell


def cells_for(who: str, model: str, accelerator: str) -> list[tuple[str, str, str, str]]:
    cuda = accelerator == "cuda"
    if model in LARGE:
        here = LARGE[model] if cuda else ("ddp",) if who == STOCK else ("fsdp", "ddp")
        return [(who, model, strategy, "bf16") for strategy in here]
    if who == COMPILED:
        return []
    return [
        (who, model, strategy, precision)
        for precision in ("fp32", "bf16", "fp16")
        for strategy in STRATEGIES
        if precision == "bf16" or "offloaded" not in strategy
        if cuda or (precision == "bf16" and (who == OURS or strategy == "ddp"))
    ]


def cell_of(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(row[key] for key in KEYS)


def rows_of(cells: list[tuple[str, str, str, str]], measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was measured, and a row for each cell that did not come to it."""
    done = set(map(cell_of, measured))
    missing = (dict(zip(KEYS, cell, strict=True)) for cell in cells if cell not in done)
    return [*measured, *(row | {"error": "did not end"} for row in missing)]


def with_rows(before: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was recorded, with these rows in the place of earlier ones. A failure takes nothing away."""
    measured = {cell_of(row) for row in before if "error" not in row}
    rows = [row for row in rows if "error" not in row or cell_of(row) not in measured]
    again = set(map(cell_of, rows))
    return [*(row for row in before if cell_of(row) not in again), *rows]


def in_one_process(model: str, cells: list[tuple[str, str, str, str]]) -> list[list[tuple[str, str, str, str]]]:
    """Cells for the same processes. A large model gets new ones: it may not fit beside what an earlier one left."""
    return [[cell] for cell in cells] if model in LARGE else [cells] if cells else []
