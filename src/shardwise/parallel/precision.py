"""Plan → dtypes in flight. One meaning of a precision's word, whatever the strategy.

`bf16`: the optimizer holds fp32 masters. On entering a unit (and the root) its parameters become bf16 copies and its
floating-point inputs bf16; autograd carries the gradients back to fp32, where they accumulate and are reduced.
Buffers are never cast. FSDP2 does this itself (`mixed_precision_policy`), DeepSpeed keeps the copies beside sharded
masters, and `compute_in` does the same under ddp, so that all run the same kernels on the same numbers. Autocast
around the step catches what enters a root-level layer in fp32 (images, say) and keeps losses in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map

from shardwise.plan.plan import Precision


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
    return MixedPrecisionPolicy(
        param_dtype=dtype_of(precision.compute_dtype) if precision.is_low else None,
        reduce_dtype=dtype_of(precision.reduce_dtype) if precision.is_low else None,
        cast_forward_inputs=precision.is_low and not is_root,
    )


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with every tensor in a nest of containers replaced. Every layer's inputs pass here: the usual containers
    are walked by hand, since torch's pytree takes ten times as long."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)([map_tensors(function, item) for item in value])
    if type(value) is dict:
        return {key: map_tensors(function, item) for key, item in value.items()}
    if value is None or isinstance(value, (int, float, str)):
        return value
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Every floating-point tensor in a nest of containers, as `dtype`."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


Places = list[tuple[nn.Module, str]]  # of one parameter: the layers that hold it, and its name there; tied: several


def owners(
    module: nn.Module, but: Iterable[nn.Module] = (), of: Callable[[nn.Parameter], bool] = lambda _: True
) -> list[Places]:
    """Where each floating-point parameter of `module` stands: each that `of` wants, those inside `but` left out."""
    inside = {id(p) for other in but for p in other.parameters()}
    places: dict[int, Places] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or not parameter.is_floating_point() or id(parameter) in inside:
                continue
            if of(parameter):
                places.setdefault(id(parameter), []).append((owner, name))
    return list(places.values())


@contextmanager
def parameters_as(where: list[Places], dtype: torch.dtype) -> Iterator[None]:
    """Inside, layers find copies of their parameters in `dtype`; autograd carries the gradients back.

    A tied parameter is one copy, so that its gradients meet in it. Compiled along: no identity is asked for in here,
    which would be a graph for every layer.
    """
    masters = []
    for places in where:
        owner, name = places[0]
        master = owner._parameters[name]
        masters.append(master)
        copy = master.to(dtype)  # type: ignore[union-attr]
        for owner, name in places:
            owner._parameters[name] = copy  # type: ignore[assignment]
    try:
        yield
    finally:
        for places, master in zip(where, masters, strict=True):
            for owner, name in places:
                owner._parameters[name] = master


def compute_in(module: nn.Module, dtype: torch.dtype, where: list[Places], *, cast_inputs: bool) -> None:
    """Let `module`'s forward see copies in `dtype` of the parameters that stand at `where`, and of its inputs."""
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if cast_inputs:
            args, kwargs = cast_floating(args, dtype), cast_floating(kwargs, dtype)
        with parameters_as(where, dtype):
            return forward(*args, **kwargs)

    module.forward = run


def keep_statistics_in_fp32(root: nn.Module) -> None:
    """BatchNorm and its kin: running statistics are buffers, which are never cast, and need weights of their dtype."""
    for module in root.modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            compute_in(module, module.running_mean.dtype, owners(module), cast_inputs=False)


@contextmanager
def default_dtype(precision: Precision) -> Iterator[None]:
    """What is made inside is fp64 under fp64. Otherwise fp32, buffers for good: see `set_parameter_dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if precision.parameter_dtype == "float64" else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def set_parameter_dtype(module: nn.Module, precision: Precision) -> None:
    """Parameters, and nothing else, in the Plan's dtype."""
    dtype = dtype_of(precision.parameter_dtype)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
