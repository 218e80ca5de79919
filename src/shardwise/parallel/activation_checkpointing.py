"""Activation checkpointing: the backward pass computes a layer's activations again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recomputed(unit: nn.Module) -> Callable[..., Any]:
    """Wrap `unit.forward` so that its activations are computed again in the backward pass instead of being kept.

    Buffers that the forward updates (running statistics) are updated only once, because the recomputation works on
    copies. All buffers are copied, since BatchNorm's kernel does not show (by `_version`) to which ones it has written.
    """
    forward = unit.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # a compiled graph has no side effects that could happen twice
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(
            forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _CopiedBuffers(unit)), **kwargs
        )

    return run


class _CopiedBuffers:
    """Lets `unit` work on copies of its buffers. Entered again for every backward pass through one forward pass."""

    def __init__(self, unit: nn.Module) -> None:
        self.unit = unit

    def __enter__(self) -> None:
        modules = self.unit.modules()
        self.originals = [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]
        for module, name, buffer in self.originals:
            module._buffers[name] = buffer.clone()

    def __exit__(self, *_: object) -> None:
        for module, name, buffer in self.originals:
            module._buffers[name] = buffer
