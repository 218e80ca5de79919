"""Plan → dtypes in flight. One meaning of a precision's word, whatever the strategy.

`bf16`: the optimizer holds fp32 masters. On entering a unit (and the root) its parameters become bf16 copies and its
floating-point inputs bf16; autograd carries the gradients back to fp32, where they accumulate and are reduced.
Buffers are never cast. FSDP2 does this itself (`mixed_precision_policy`); `cast_parameters` does the same for
strategies that keep whole parameters, so that both run the same kernels on the same numbers. Autocast around the step
catches what enters a root-level layer in fp32 (images, say) and keeps losses in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision as LightningPrecision
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from shardwise.plan import Plan, Precision
from shardwise.units import Units


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def set_matmul_mode(precision: Precision) -> None:
    """fp32 means fp32: PyTorch leaves TF32 on for convolutions by default."""
    torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = precision.tf32


def mixed_precision_policy(precision: Precision, *, is_root: bool) -> MixedPrecisionPolicy:
    """FSDP2's form of a precision. The root does not cast its inputs: a batch holds targets too."""
    mixed = precision.compute_dtype != precision.parameter_dtype
    return MixedPrecisionPolicy(
        param_dtype=dtype_of(precision.compute_dtype) if mixed else None,
        reduce_dtype=dtype_of(precision.reduce_dtype) if mixed else None,
        cast_forward_inputs=mixed and not is_root,
    )


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Every floating-point tensor in a nest of containers, as `dtype`."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, value)


def cast_parameters(root: nn.Module, units: Units, dtype: torch.dtype) -> None:
    """Hooks that show each unit, and the root what is left, copies of its parameters in `dtype` during forward."""
    inside = {id(p) for _, unit in units.modules for p in unit.parameters()}
    for _, unit in units.modules:
        _CastWhileRunning(unit, _owners(unit, lambda p: True), dtype, cast_inputs=True)
    _CastWhileRunning(root, _owners(root, lambda p: id(p) not in inside), dtype, cast_inputs=False)


def _owners(module: nn.Module, wanted: Callable[[nn.Parameter], bool]) -> list[tuple[nn.Module, str]]:
    return [
        (owner, name)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if parameter.is_floating_point() and wanted(parameter)
    ]


class _CastWhileRunning:
    def __init__(
        self, module: nn.Module, owners: list[tuple[nn.Module, str]], dtype: torch.dtype, cast_inputs: bool
    ) -> None:
        self.owners, self.dtype, self.cast_inputs = owners, dtype, cast_inputs
        self.masters: list[nn.Parameter] = []
        self.depth = 0  # a module may call itself
        module.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True)
        module.register_forward_hook(self.leave, with_kwargs=True, always_call=True)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.depth += 1
        if self.depth == 1:
            copies: dict[int, Tensor] = {}  # a tied parameter is one copy, so that its gradients meet in it
            self.masters = [owner._parameters[name] for owner, name in self.owners]
            for (owner, name), master in zip(self.owners, self.masters, strict=True):
                copy = copies.setdefault(id(master), master.to(self.dtype))
                owner._parameters[name] = copy  # type: ignore[assignment]
        return (cast_floating(args, self.dtype), cast_floating(kwargs, self.dtype)) if self.cast_inputs else None

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            for (owner, name), master in zip(self.owners, self.masters, strict=True):
                owner._parameters[name] = master


class PlannedPrecision(LightningPrecision):
    """The Plan's precision inside Lightning's loop, and the one owner of the global gradient norm."""

    precision: Literal["32-true"] = "32-true"  # Lightning's word for "does nothing by itself"

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.gradient_norm: Tensor | None = None  # of the last step, before clipping; a scalar on the device

    def forward_context(self) -> AbstractContextManager[Any]:
        precision = self.plan.precision
        if precision.compute_dtype == precision.parameter_dtype:
            return nullcontext()
        # No cache: the parameters are copies in the compute dtype already, made anew in every forward.
        return torch.autocast(self.plan.accelerator, dtype_of(precision.compute_dtype), cache_enabled=False)

    def convert_input(self, data: Any) -> Any:
        if self.plan.precision.parameter_dtype == "float64":
            return cast_floating(data, torch.float64)
        return data

    def _clip_gradients(self, model: LightningModule | nn.Module, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        gradients = [p.grad for p in self.main_params(optimizer) if p.grad is not None]
        norm = get_total_norm(gradients)
        # A DTensor's norm is per shard until it is asked for whole: then it is the norm over every axis.
        self.gradient_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        super()._clip_gradients(model, optimizer, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        assert self.gradient_norm is not None
        clip_grads_with_norm_(list(self.main_params(optimizer)), float(clip_val), self.gradient_norm)


@contextmanager
def default_dtype(precision: Precision) -> Iterator[None]:
    """Parameters made inside are made in the Plan's dtype, not cast to it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype_of(precision.parameter_dtype))
    try:
        yield
    finally:
        torch.set_default_dtype(before)
