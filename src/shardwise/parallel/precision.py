"""Gives each precision of the Plan one meaning under every strategy.

With `bf16` the optimizer holds fp32 masters. When a unit (or the root) runs, it computes on bf16 copies of its
parameters, and its floating-point inputs are cast to bf16. Autograd carries the gradients back to fp32, where they
accumulate and are reduced. Buffers are not cast. FSDP2 does this itself (`mixed_precision_policy`), DeepSpeed keeps
the copies beside sharded masters, and `cast_forward` does it under ddp, so that all run the same kernels on the same
numbers. Autocast around the step casts what enters a layer of the root in fp32, such as images, and keeps losses in
fp32.
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

from shardwise import accelerator
from shardwise.config.groups import PrecisionConfig


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def set_matmul_mode(precision: PrecisionConfig) -> None:
    """Allow TF32 if the precision says so, and only then: PyTorch allows it for convolutions by default."""
    torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
    accelerator.allow_tf32_convolutions(precision.tf32)


def mixed_precision_policy(precision: PrecisionConfig, *, is_root: bool) -> MixedPrecisionPolicy:
    """FSDP2's form of a precision. The root does not cast its inputs: a batch holds targets too."""
    return MixedPrecisionPolicy(
        param_dtype=dtype_of(precision.compute_dtype) if precision.is_low else None,
        reduce_dtype=dtype_of(precision.reduce_dtype) if precision.is_low else None,
        cast_forward_inputs=precision.is_low and not is_root,
    )


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Replace every tensor in `value`, a nest of containers, by `function` of it.

    The inputs of every layer pass through here. Lists, tuples and dicts are handled without torch's pytree, which takes
    ten times as long.
    """
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
    """Cast every floating-point tensor in a nest of containers to `dtype`."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


# The layers that own one parameter, each with its name for it. A tied parameter has several.
ParameterSites = list[tuple[nn.Module, str]]


def parameter_sites(
    module: nn.Module, but: Iterable[nn.Module] = (), of: Callable[[nn.Parameter], bool] = lambda _: True
) -> list[ParameterSites]:
    """Find the sites of each floating-point parameter that `of` accepts, except for parameters inside `but`."""
    inside = {id(p) for other in but for p in other.parameters()}
    sites: dict[int, ParameterSites] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or not parameter.is_floating_point() or id(parameter) in inside:
                continue
            if of(parameter):
                sites.setdefault(id(parameter), []).append((owner, name))
    return list(sites.values())


@contextmanager
def cast_parameters(where: list[ParameterSites], dtype: torch.dtype) -> Iterator[None]:
    """Give layers copies of their parameters in `dtype` while inside; autograd carries the gradients back.

    A tied parameter has one copy, in which its gradients are added up. This code is compiled with the layer. It must
    not look at the identity of an object, since dynamo would then make a graph for every layer.
    """
    masters = []
    for sites in where:
        owner, name = sites[0]
        master = owner._parameters[name]
        masters.append(master)
        copy = master.to(dtype)  # type: ignore[union-attr]
        for owner, name in sites:
            owner._parameters[name] = copy  # type: ignore[assignment]
    try:
        yield
    finally:
        for sites, master in zip(where, masters, strict=True):
            for owner, name in sites:
                owner._parameters[name] = master


def cast_forward(module: nn.Module, dtype: torch.dtype, where: list[ParameterSites], *, cast_inputs: bool) -> None:
    """Let the forward of `module` compute on copies in `dtype` of the parameters at `where`, and of its inputs."""
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if cast_inputs:
            args, kwargs = cast_floating(args, dtype), cast_floating(kwargs, dtype)
        with cast_parameters(where, dtype):
            return forward(*args, **kwargs)

    module.forward = run


def keep_statistics_in_fp32(root: nn.Module) -> None:
    """Let BatchNorm compute in fp32: its running statistics are never cast, and need weights of the same dtype."""
    for module in root.modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            cast_forward(module, module.running_mean.dtype, parameter_sites(module), cast_inputs=False)


@contextmanager
def default_dtype(precision: PrecisionConfig) -> Iterator[None]:
    """Make new tensors in fp64 under fp64, else in fp32. Buffers keep that dtype (see `set_dtypes`)."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if precision.parameter_dtype == "float64" else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def set_dtypes(module: nn.Module, precision: PrecisionConfig) -> None:
    """Cast parameters to the dtype of the precision, and under fp64 buffers as well, as Lightning does.

    No layer computes with both fp64 and fp32. In 16 bits buffers stay as they are: they add up statistics.
    """
    dtype = dtype_of(precision.parameter_dtype)
    for tensor in (*module.parameters(), *(module.buffers() if dtype == torch.float64 else ())):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)  # what refers to the tensor sees it


def cast_late_layers(module: nn.Module, precision: PrecisionConfig) -> None:
    """Cast what `setup` and `configure_model` have made, too. Where weights are fp32, Lightning leaves it alone."""
    if precision.parameter_dtype != "float32":
        set_dtypes(module, precision)
