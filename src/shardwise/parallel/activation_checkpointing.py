"""Activation checkpointing: a layer's activations are computed again in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recomputed(unit: nn.Module) -> Callable[..., Any]:
    """`unit.forward`, whose activations are computed again in the backward pass instead of being kept.

    Buffers that it updates (running statistics) are updated once: recomputing works on copies of all of them, since
    BatchNorm's kernel leaves no trace (`_version`) of what it has written to.
    """
    forward = unit.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # a graph has no side effects to repeat
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(
            forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _CopiedBuffers(unit)), **kwargs
        )

    return run


class _CopiedBuffers:
    """Entered again for every backward pass through one forward pass."""

    def __init__(self, unit: nn.Module) -> None:
        self.unit = unit

    def __enter__(self) -> None:
        modules = self.unit.modules()
        self.kept = [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]
        for module, name, buffer in self.kept:
            module._buffers[name] = buffer.clone()

    def __exit__(self, *_: object) -> None:
        for module, name, buffer in self.kept:
            module._buffers[name] = buffer
