"""What stands in for numbers that a stage of a pipeline does not have: those of layers of other stages, and losses that
are computed later.

Whatever is computed from them is `Absent`, too, and is refused where somebody looks at it: as a loss, in the log, as a
number of Python's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import ConfigError
from shardwise.parallel.precision import map_tensors

NOT_HERE = (
    "and this stage of the pipeline does not have these numbers; compute it in that layer or in the data, leave it "
    "out, or use strategy.pipeline_parallel_size=1"
)
# They make a number of Python's out of a tensor.
_READS = {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__index__", "__complex__",
          "is_nonzero", "equal", "allclose"}  # fmt: skip
_CHANGE_NO_NUMBER = {"requires_grad_", "detach_"}


class Absent(Tensor):
    """A tensor of NaN that knows it: what is computed from it is `Absent`, too.

    Comparing, counting or finding a place would make an ordinary number of NaN, so these are refused, as is writing
    it into a tensor that has numbers. Writing into it does nothing. A tensor that is made in its likeness has numbers
    of its own.

    Raises:
        ConfigError: something other than floating-point numbers is computed from it.
    """

    source: ClassVar[str] = "what a layer of another stage gives or has"
    reason: ClassVar[str] = NOT_HERE

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, more = getattr(func, "__name__", ""), dict(kwargs or {})
        if name in _READS:
            raise cls.refusal(f"{name} looks at")
        if _writes(name):
            if isinstance(args[0], Absent):
                return args[0]
            if isinstance(args[0], (list, tuple)):  # gradients of several layers, say, some of which are here
                if _has_absent(args[1:]):
                    raise cls.refusal(f"{name} writes into other tensors")
                args = ([tensor for tensor in args[0] if not isinstance(tensor, Absent)], *args[1:])
            else:
                raise cls.refusal(f"{name} writes into another tensor")
        if more.get("inplace") is True:
            more["inplace"] = False
        try:
            result = super().__torch_function__(func, types, args, more)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "DTensor" not in str(error):  # a sharded weight or gradient, beside which a plain tensor cannot stand
                raise
            raise cls.refusal(f"{name} is given") from error
        if {"new", "like"} & set(name.split("_")):  # new_zeros, ones_like
            return map_tensors(lambda tensor: tensor.as_subclass(Tensor), result)

        def check(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                raise cls.refusal(f"{name} looks at")
            return tensor

        return map_tensors(check, result) if isinstance(result, (Tensor, tuple, list)) else result

    @classmethod
    def refusal(cls, whoever: str) -> ConfigError:
        """The message: `whoever`, such as "argmax looks at", does what is refused."""
        return ConfigError(f"{whoever} {cls.source}, {cls.reason}")


class Pending(Absent):
    """The loss of a micro-batch before it is computed."""

    source = "what training_step returns"
    reason = (
        "and in a pipeline the micro-batches of a step run together, when the last of them has come; log it in "
        "training_step, or use strategy.pipeline_parallel_size=1"
    )


def absent(like: Tensor, device: torch.device) -> Tensor:
    """A tensor of that shape which holds no memory, and needs gradients."""
    single = torch.full((), torch.nan, dtype=like.dtype, device=device, requires_grad=torch.is_grad_enabled())
    return single.expand(like.shape).as_subclass(Absent)


def absent_weight(like: Tensor, device: torch.device) -> Tensor:
    """What stands in for a weight and its gradient."""
    with torch.no_grad():
        weight, gradient = absent(like, device), absent(like, device)
    if like.requires_grad:
        weight.requires_grad_()
        weight.grad = gradient
    return weight


def pending(device: torch.device) -> Tensor:
    """What stands in for the loss of a micro-batch that is computed later, for Lightning to differentiate."""
    return torch.full((), torch.nan, device=device).as_subclass(Pending).requires_grad_()


def is_absent(value: Any) -> bool:
    """Whether `value` was computed from numbers that are not there. Weights of other stages are on the meta device."""
    return isinstance(value, Absent) or _is_meta(value)


class NothingFromMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, a tensor of the meta device is not written into one that has numbers: torch would do nothing then, and
    say nothing.

    Raises:
        RuntimeError: it is written.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.is_mutable and args:
            written = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            for arg in args[1:]:
                others = arg if isinstance(arg, (list, tuple)) else [arg] * len(written)
                if any(_is_meta(other) and not _is_meta(one) for one, other in zip(written, others, strict=False)):
                    raise RuntimeError(f"{function} writes a tensor of the meta device into another")
        return function(*args, **(kwargs or {}))


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def refusal_of(value: Any, whoever: str) -> ConfigError:
    """The message about an absent `value`."""
    return (type(value) if isinstance(value, Absent) else Absent).refusal(whoever)


def check_present(name: str, tensor: Any, what: str) -> None:
    """Refuse `what` of the module `name` if it comes from numbers that are not there.

    Raises:
        ConfigError
    """
    if is_absent(tensor):
        raise ConfigError(
            f"{name}: {what} is computed from what a layer gives or has that is on another stage of the pipeline: from "
            f"layer to layer a pipeline hands over one tensor; let each layer hand on what later ones need, or use "
            f"strategy.pipeline_parallel_size=1"
        )


def _writes(name: str) -> bool:
    """Whether the function of this name writes into its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__iter__", "__invert__"))
    return name.endswith("_") and name not in _CHANGE_NO_NUMBER


def _has_absent(values: Any) -> bool:
    if isinstance(values, (list, tuple)):
        return any(map(_has_absent, values))
    return isinstance(values, Absent)
