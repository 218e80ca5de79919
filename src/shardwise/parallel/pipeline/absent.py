"""What stands in for the numbers of a layer on another stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.parallel.precision import map_tensors

NOT_HERE = (
    "and this stage of the pipeline does not have these numbers; compute it in the data, or use "
    "strategy.pipeline_parallel_size=1"
)


class Absent(Tensor):
    """A tensor of NaN that knows it: what is computed from it is `Absent`, too.

    Comparing, counting or finding a place would make an ordinary number of NaN, so these are refused. A tensor that is
    made in its likeness has numbers of its own.

    Raises:
        ConfigError: something other than floating-point numbers is computed from it.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        result = super().__torch_function__(func, types, args, dict(kwargs or {}))  # type: ignore[no-untyped-call]
        if {"new", "like"} & set(name.split("_")):  # new_zeros, ones_like
            return map_tensors(lambda tensor: tensor.as_subclass(Tensor), result)

        def check(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                raise ConfigError(f"{name} looks at what a layer of another stage gives, {NOT_HERE}")
            return tensor

        return map_tensors(check, result) if isinstance(result, (Tensor, tuple, list)) else result


def absent(like: Tensor, device: torch.device) -> Tensor:
    """A tensor of that shape which holds no memory, and needs gradients."""
    single = torch.full((), torch.nan, dtype=like.dtype, device=device, requires_grad=torch.is_grad_enabled())
    return single.expand(like.shape).as_subclass(Absent)


def check_present(name: str, tensor: Any, what: str) -> None:
    """Refuse `what` of the module `name` if it comes from numbers that are not there.

    Raises:
        ConfigError
    """
    if isinstance(tensor, Absent):
        raise ConfigError(
            f"{name}: {what} is computed from what a layer gives that is on another stage of the pipeline: from layer "
            f"to layer a pipeline hands over one tensor; let each layer hand on what later ones need, or use "
            f"strategy.pipeline_parallel_size=1"
        )
