"""Finds sizes of a module, and of its batches, that miss the full speed of tensor cores. Looks at shapes alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shardwise.metrics.verdicts import Size
from shardwise.plan import Plan

_SHARE, _WEIGHTS = 0.05, 1_000_000  # fewer weights than both cost little time
_LARGE, _ROUND = 1024, 64  # sizes from here on are better a multiple of this, at a few percent more weights
_WIDTHS = ("dim", "hidden_size", "d_model", "n_embd")
_HEADS = ("n_heads", "num_heads", "num_attention_heads", "n_head", "nhead")


def multiple_of(plan: Plan) -> int | None:
    """What sizes should be multiples of in the run's precision; None: it does not use tensor cores."""
    if plan.accelerator != "cuda":
        return None
    if plan.precision.fp8 is not None:
        return 16
    if plan.precision.is_low:
        return 8
    return 4 if plan.precision.tf32 and plan.precision.compute_dtype == "float32" else None


def sizes_that_miss(module: nn.Module, plan: Plan) -> tuple[Size, ...]:
    """The sizes to change. Call this before a strategy shards the module."""
    if (multiple := multiple_of(plan)) is None:
        return ()
    return (*_of_layers(module, plan, multiple), *_of_heads(plan), *_of_batches(plan, multiple))


def _of_layers(module: nn.Module, plan: Plan, multiple: int) -> Iterator[Size]:
    found: dict[int, tuple[str, int]] = {}  # size → a layer's attribute that has it, and the weights of all such layers
    total = 0
    for layer_name, layer in module.named_modules():
        sizes = _sizes_of(layer)
        weights = layer.weight.numel() if sizes else 0
        total += weights
        for attribute, size in sizes.items():
            name, before = found.get(size, (f"{layer_name}.{attribute}", 0))
            found[size] = name, before + weights
    for size, (name, weights) in found.items():
        if size % multiple and weights > max(_WEIGHTS, _SHARE * total):
            detail = f"layers with {weights / total:.0%} of the weights have this size"
            yield Size(_word_of(plan.module, size) or name, size, _next(size, multiple), multiple, detail)


def _sizes_of(layer: nn.Module) -> dict[str, int]:
    """Attribute → size, of the matrix that a layer multiplies by. Other layers have none."""
    if isinstance(layer, nn.Linear):
        return {"in_features": layer.in_features, "out_features": layer.out_features}
    if isinstance(layer, nn.Embedding):  # often the matrix of the head, too
        return {"num_embeddings": layer.num_embeddings, "embedding_dim": layer.embedding_dim}
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and layer.groups == 1:
        return {"in_channels": layer.in_channels, "out_channels": layer.out_channels}
    return {}


def _of_heads(plan: Plan) -> Iterator[Size]:
    """Heads of attention are multiples of 8 in every kernel, whatever the precision."""
    for path, node in _nodes(plan.module):
        width = next((node[key] for key in _WIDTHS if isinstance(node.get(key), int)), None)
        key = next((key for key in _HEADS if isinstance(node.get(key), int)), None)
        if width is None or key is None or node[key] < 1 or width % node[key] or not (width // node[key]) % 8:
            continue
        good = [n for n in range(1, width + 1) if width % n == 0 and (width // n) % 8 == 0]
        if good:
            better = min(good, key=lambda n: abs(n - node[key]))
            detail = f"a head has {width} / {node[key]} = {width // node[key]} features"
            yield Size(_override((*path, key)), node[key], better, 8, detail)


def _of_batches(plan: Plan, multiple: int) -> Iterator[Size]:
    length = (plan.data or {}).get("sequence_length")
    if isinstance(length, int) and (tokens := length * plan.micro_batch_size) % multiple:
        detail = f"a micro-batch has {plan.micro_batch_size} × {length} = {tokens} tokens"
        yield Size("data.sequence_length", length, _next(length, multiple), multiple, detail)


def _next(size: int, multiple: int) -> int:
    multiple = _ROUND if size >= _LARGE else multiple
    return -(-size // multiple) * multiple


def _word_of(node: Mapping[str, Any], size: int) -> str | None:
    """The override of an argument of the module that has this value."""
    for path, inner in _nodes(node):
        for key, value in inner.items():
            if value == size and isinstance(value, int):
                return _override((*path, key))
    return None


def _nodes(node: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    yield path, node
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _nodes(value, (*path, key))


def _override(path: tuple[str, ...]) -> str:
    """The word of the command line for an argument of the module: `model` is a node of its own."""
    return ".".join(path if path[0] == "model" else ("module", *path))
