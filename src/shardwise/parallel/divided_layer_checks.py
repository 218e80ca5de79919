"""What the layers that ranks divide must be: what torch makes of their class, and watched by nobody who sees a part.

A rank multiplies with its part of a weight and adds up with its peers. A forward of somebody's own would see a part of
the weight or not be called at all, and a hook would see a part of an input or an output: other numbers, without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from shardwise.errors import ConfigError, class_name
from shardwise.parallel.divided_layers import (
    BY_SAMPLE,
    CLASSES,
    COLUMN,
    COLUMNS,
    ROW,
    SEES_SOME_HEADS,
    divided_dim,
)

# As they are before anybody has replaced them
_FORWARDS: dict[type, Any] = {kind: kind.forward for kind in (nn.Linear, nn.Embedding)}
_CALL = nn.Module.__call__
_PART_GOES_IN = ("norm", "gather", "row", "head", ROW, SEES_SOME_HEADS)
_PART_COMES_OUT = ("norm", "gather", *COLUMNS, "row", "embedding", BY_SAMPLE, COLUMN, SEES_SOME_HEADS)
_SPREADS = (*COLUMNS, "row", COLUMN, ROW)  # between the first and the last of them a rank has some of the features
_OURS = ("shardwise.", "torch.distributed.", "torch._dynamo.")


def check_layers(module: nn.Module, layers: dict[str, str], ranks: int, *, are_wrapped: bool = False) -> None:
    """Refuse layers that compute in their own way, and hooks that would see a part of something.

    `layers`: names of layers → what they are. `are_wrapped`: strategies have replaced their forward.

    Raises:
        ConfigError
    """
    rule = f"strategy.tensor_parallel_size={ranks}"
    for name, layer in module.named_modules():
        word = layers.get(name, "")
        kind: Any = CLASSES.get(word)
        if divided_dim(word, "weight") is None or not isinstance(layer, kind):  # it is what a pipeline has put there
            continue
        if (what := _own_way(layer, kind, are_wrapped)) is not None:
            raise ConfigError(
                f"{rule}: {name} ({class_name(layer)}) {what}, and each rank has a part of it ({word!r}), with which "
                f"only the forward of a plain nn.{kind.__name__} is computed; keep what it does besides in a "
                f"layer of its own that is not divided, or use strategy.tensor_parallel_size=1"
            )
    for name, layer, goes_in, comes_out in _places(module, layers):
        if (what := _hook_on_part(layer, goes_in, comes_out)) is not None:
            raise ConfigError(
                f"{rule}: {name} ({class_name(layer)}) has {what}, which would see a rank's part of what one device "
                f"has there; put it on a layer around the divided ones, or use strategy.tensor_parallel_size=1"
            )


def withhold_inputs(layer: nn.Module, name: str, word: str) -> None:
    """Let hooks on `layer` that see its whole output not look at its input, of which a rank has a part."""
    if word in _PART_GOES_IN and word not in _PART_COMES_OUT:
        for key, hook in layer._forward_hooks.items():
            if not _is_ours(hook):
                layer._forward_hooks[key] = _WithoutInput(hook, name)


class _WithoutInput:
    """A forward hook that is given something else in place of the input."""

    def __init__(self, hook: Callable[..., Any], name: str) -> None:
        self.hook, self._withheld = hook, _Withheld(name)

    def __call__(self, layer: nn.Module, inputs: Any, *others: Any) -> Any:
        return self.hook(layer, self._withheld, *others)


class _Withheld:
    """Stands for the input of a layer."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, key: Any) -> Any:
        raise ConfigError(
            f"strategy.tensor_parallel_size: a forward hook on {self._name} looks at its input, of which a rank has a "
            f"part; its output is whole: use that alone, or strategy.tensor_parallel_size=1"
        )

    def __iter__(self) -> Iterator[Any]:
        yield self[0]

    def __len__(self) -> int:
        return len(self[0])


def _own_way(layer: nn.Module, kind: type[Any], is_wrapped: bool) -> str | None:
    """In which way a layer that is divided is not what `kind` is; None: it is."""
    forward = type(layer).forward
    # The embeddings of transformers multiply each row by a number, or normalize it; they are called with a rank's rows.
    known = kind is nn.Embedding and str(getattr(forward, "__module__", "")).startswith("transformers.")
    if is_parametrized(layer):
        return "is parametrized (torch.nn.utils.parametrize)"
    if "forward" in vars(layer) and not (is_wrapped and _is_ours(vars(layer)["forward"])):
        return "has had its forward replaced"
    if (forward is not _FORWARDS[kind] and not known) or type(layer).__call__ is not _CALL:
        return "has a forward of its own"
    owned = dict(layer.named_parameters(recurse=False))
    if "weight" not in owned:
        return "has no weight that is a parameter"
    others = [*(key for key in owned if key not in ("weight", "bias")), *(key for key, _ in layer.named_children())]
    others += [key for key, buffer in layer.named_buffers(recurse=False) if not known or buffer.numel() != 1]
    return f"owns {', '.join(others)} besides a weight and a bias" if others else None


def _places(module: nn.Module, layers: dict[str, str]) -> Iterator[tuple[str, nn.Module, bool, bool]]:
    """Layers that are given a part of something, or give it, with their names."""
    spread = [name for name, word in layers.items() if word in _SPREADS]
    owners = {name.rpartition(".")[0] for name in spread}
    around = {outer for name in spread for outer in _prefixes(name)}
    for name, layer in module.named_modules():
        if (word := layers.get(name)) is not None:
            yield name, layer, word in _PART_GOES_IN, word in _PART_COMES_OUT
        elif name not in around:
            nearest = next((outer for outer in reversed([*_prefixes(name)]) if outer in around), None)
            if nearest in owners:  # such as an activation function beside the divided layers
                yield name, layer, True, True


def _prefixes(name: str) -> Iterator[str]:
    """The names of what `name` is in, from the module on."""
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(len(parts)))


def _hook_on_part(layer: nn.Module, goes_in: bool, comes_out: bool) -> str | None:
    hooks: dict[str, tuple[bool, Iterable[Any]]] = {
        "forward pre-hook": (goes_in, layer._forward_pre_hooks.values()),
        "forward hook": (comes_out, layer._forward_hooks.values()),
        "backward pre-hook": (comes_out, layer._backward_pre_hooks.values()),
        "backward hook": (goes_in or comes_out, layer._backward_hooks.values()),
    }
    for what, (sees_part, registered) in hooks.items():
        if sees_part and (own := [hook for hook in registered if not _is_ours(hook)]):
            return f"a {what} ({getattr(own[0], '__qualname__', type(own[0]).__name__)})"
    return None


def _is_ours(function: Any) -> bool:
    """Whether it is not a user's: it is written in this repository, or in what it shards and compiles with."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    written_in = getattr(function, "__globals__", {"__name__": type(function).__module__})  # not those of what it wraps
    return str(written_in["__name__"]).startswith(_OURS)
