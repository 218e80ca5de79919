"""What breadth_gpu.py compares: models, strategies, and who runs them."""

from __future__ import annotations

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


def in_one_process(model: str, cells: list[tuple[str, str, str, str]]) -> list[list[tuple[str, str, str, str]]]:
    """Cells for the same processes. A large model gets new ones: it may not fit beside what an earlier one left."""
    return [[cell] for cell in cells] if model in LARGE else [cells] if cells else []
