"""What DeepSpeed does while an engine is made, and must not; and what ZeRO-3 hides of a parameter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule
from torch import nn


@contextmanager
def shapes_shown(module: LightningModule) -> Iterator[None]:
    """ZeRO-3 leaves parameters of shape (0,); who sorts them into groups by their number of dimensions must see it."""
    hidden = [(p, p.data) for p in module.parameters() if hasattr(p, "ds_shape") and p.shape != p.ds_shape]
    for p, data in hidden:
        p.data = data.new_empty(()).expand(p.ds_shape)
    yield
    for p, data in hidden:
        p.data = data


def count_elements(parameter: nn.Parameter) -> int:
    """Elements of the whole."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


@contextmanager
def with_a_dimension(unit: nn.Module) -> Iterator[None]:
    """ZeRO-3 cannot take a parameter of shape (): inside it has one dimension, and ZeRO-3 gathers it without."""
    scalars = [p for p in unit.parameters() if p.ndim == 0 and not hasattr(p, "ds_shape")]
    for p in scalars:
        p.data = p.data.view(1)
    yield
    for p in scalars:
        p.ds_shape = torch.Size()  # type: ignore[attr-defined]


@contextmanager
def weights_not_sent() -> Iterator[None]:
    """An engine that is made inside takes weights and buffers as they are: all ranks have the same ones already, and
    DeepSpeed cannot send a parameter of shape ()."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    with patch.object(DeepSpeedEngine, "_broadcast_model", lambda engine: None):
        yield


@contextmanager
def reduced_one_by_one() -> Iterator[None]:
    """ZeRO-3 would reduce a leaf's gradients together, when that of its inputs is there: too early if these need none.
    Engines that are made inside reduce each gradient when it is there, as those of other layers."""
    from deepspeed.runtime.zero import stage3

    kept, stage3.z3_leaf_parameter = stage3.z3_leaf_parameter, lambda parameter: False
    try:
        yield
    finally:
        stage3.z3_leaf_parameter = kept
