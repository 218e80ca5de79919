"""What a dry run states of tensor, context and pipeline axes before there is a run: idle time, memory, bytes sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.plan import parallel_arithmetic as arithmetic
from shardwise.plan.plan import Plan
from shardwise.plan.schedule_text import schedule_lines

_SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
_BYTES = {"float64": 8, "float32": 4}


def parallel_lines(plan: Plan, schedule: str = "1f1b", chunks: int = 1) -> list[str]:
    """The lines of a Plan; none where every rank sees samples of its own.

    Bytes are stated for a model whose words have the sizes of a decoder with gated layers, such as the recipe's.
    """
    topology, micro_batches = plan.topology, plan.accumulate_grad_batches
    if topology.is_data_parallel_only or plan.stage != "fit":
        return []
    lines = schedule_lines(schedule, topology.pipeline, chunks, micro_batches) if topology.pipeline > 1 else []
    model, tokens = plan.module.get("model"), (plan.data or {}).get("sequence_length")
    if not isinstance(model, Mapping) or not isinstance(tokens, int) or not all(name in model for name in _SIZES):
        return [*lines, f"bytes are not stated: they need data.sequence_length and model.{', '.join(_SIZES)}"]
    compute, reduce = (_BYTES.get(dtype, 2) for dtype in (plan.precision.compute_dtype, plan.precision.reduce_dtype))
    shape = {"samples": plan.micro_batch_size, "tokens": tokens, "width": model["dim"]}
    shape |= {"micro_batches": micro_batches, "context": topology.context, "tensor": topology.tensor}
    heads = {"heads": model["n_heads"], "key_heads": model["n_kv_heads"]}
    layers = model["n_layers"] / topology.pipeline
    weights: dict[str, Any] = {"parameters": count_decoder(model) / (topology.pipeline * topology.tensor),
               "shards": topology.shard * topology.context}  # fmt: skip
    sent = {}
    if topology.pipeline > 1:
        inner = 1 - 1 / (chunks * topology.pipeline)  # the first stage and the last hand over in one direction each
        sent["pipeline"] = compute * inner * arithmetic.pipeline_elements(chunks=chunks, **shape)
    if topology.context > 1:
        method = plan.strategy.context_parallel_method
        by_keys, by_heads = arithmetic.context_elements_by_keys, arithmetic.context_elements_by_heads
        elements = (by_keys if method == "keys" else by_heads)(layers=layers, **shape, **heads)
        sent[f"context by {method}"] = compute * elements
    if topology.tensor > 1:
        sent["tensor"] = compute * arithmetic.tensor_elements(layers=layers, **shape)
    if weights["shards"] > 1:
        gathered = arithmetic.fsdp_gathered_elements(micro_batches=micro_batches, **weights)
        scattered = arithmetic.fsdp_scattered_elements(micro_batches=micro_batches, **weights)
        sent["fsdp"] = compute * gathered + reduce * scattered
    each = ", ".join(f"{axis} {size / 1e9:.3g} GB" for axis, size in sent.items())
    state = arithmetic.state_bytes(**weights) / 1e9
    return [
        *lines,
        f"a rank sends in a step, on average over the stages: {each}",
        f"a rank's weights, gradients and AdamW's state in fp32, on average over the stages: {state:.3g} GB",
    ]


def count_decoder(model: Mapping[str, Any]) -> int:
    """The parameters of a decoder with grouped queries, gated layers and no biases."""
    width, head = model["dim"], model["dim"] // model["n_heads"]
    attention = 2 * width * head * (model["n_heads"] + model["n_kv_heads"])
    tables = model["vocab_size"] * width * (1 if model.get("tie_embeddings") else 2)
    layer = attention + 3 * width * model["ffn_dim"] + 2 * width
    return int(model["n_layers"] * layer + tables + width)
