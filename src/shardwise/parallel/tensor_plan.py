"""Which layers tensor parallelism divides, and how: by the module's words, or by the plan of a Hugging Face model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.distributed.dtensor import local_part
from shardwise.distributed.mesh import largest_over, sum_over
from shardwise.errors import ConfigError, a_or_an
from shardwise.parallel.tensor_layers import BY_SAMPLE, CLASSES, SEES_SOME_HEADS, STYLES, WORDS
from shardwise.protocols import optional, tensor_plan_of

# What a module says of its layers for tensor parallelism, `tensor_parallel_layers` of protocols.py, and mistakes.

# A parameter's id → the layers that own it: name, word, and the parameter's name there
Owners = dict[int, list[tuple[str, str, str]]]


def declared_layers(module: nn.Module) -> dict[str, str]:
    """The names of layers → what they are, as `module` and its parts declare it.

    Raises:
        ConfigError: a declaration means no layer, or one of another class.
    """
    found: dict[str, str] = {}
    names = [name for name, _ in module.named_modules()]
    for prefix, owner in module.named_modules():
        for pattern, word in (optional(owner, "tensor_parallel_layers") or {}).items():
            where = f"{type(owner).__name__}.tensor_parallel_layers"
            if word not in WORDS:
                raise ConfigError(f"{where}: {pattern!r} is {word!r}, which must be one of {', '.join(WORDS)}")
            of = re.compile(re.escape(f"{prefix}.{pattern}".strip(".")).replace(r"\*", r"[^.]+"))
            matches = [name for name in names if of.fullmatch(name)]
            if not matches:
                raise ConfigError(f"{where}: no layer is named {pattern!r}; a * stands for one part of a name")
            for name in matches:
                layer = module.get_submodule(name)
                if not isinstance(layer, CLASSES.get(word, nn.Module)):
                    raise ConfigError(
                        f"{where}: {name} is {word!r}, which an nn.{CLASSES[word].__name__} can be, and it is "
                        f"{a_or_an(type(layer).__name__)}"
                    )
                found[name] = word
    embeddings = [name for name, word in found.items() if word in ("embedding", BY_SAMPLE)]
    if len(embeddings) > 1 and BY_SAMPLE in found.values():
        raise ConfigError(
            f"tensor_parallel_layers: {' and '.join(embeddings)} are embeddings, and a module with {BY_SAMPLE!r} has "
            f"one; call them all 'embedding'"
        )
    return found


def check_said(module: nn.Module, owners: Owners, names: dict[int, str]) -> None:
    """Refuse parameters of which nothing is said: their gradients would differ between the peers in silence.

    `names`: a parameter's id → its name.

    Raises:
        ConfigError
    """
    for of, sites in owners.items():
        for layer, word, _ in sites:
            if word == "gather":
                raise ConfigError(
                    f"{type(module).__name__}.tensor_parallel_layers: {layer} is 'gather' and owns {names[of]}, which "
                    f"sees some of the heads: move it into a layer of its own inside {layer}, and call that 'norm'"
                )
            if not word:
                raise ConfigError(
                    f"{type(module).__name__}.tensor_parallel_layers says nothing of {layer or 'the module'}, which "
                    f"owns {names[of]}: name it, 'norm' for a layer with whole weights that sees a part of the sequence"
                )


def check_packed(module: nn.Module, layers: dict[str, str]) -> None:
    """Refuse several matrices in one, such as query, key and value: a rank would have some of them and not others.

    Raises:
        ConfigError
    """
    for name in (name for name, word in layers.items() if word == "gather"):
        inside = {inner: layers[inner] for inner in layers if inner.startswith(f"{name}.")}
        linear: dict[str, Any] = {inner: module.get_submodule(inner) for inner in inside}
        takes = max((linear[inner].in_features for inner, word in inside.items() if word == "row"), default=None)
        for inner, word in inside.items():
            if takes is not None and word == "column" and linear[inner].out_features > takes:
                raise ConfigError(
                    f"tensor_parallel_layers: {inner} is 'column' and has {linear[inner].out_features} outputs, and "
                    f"the 'row' behind it takes {takes}: if these are several matrices in one (query, key and value), "
                    f"a rank would have all of one and nothing of another. Make each an nn.Linear of its own. If what "
                    f"belongs together lies side by side (query, key and value of one head), call it "
                    f"'column_in_groups'"
                )


# Tensor parallelism by the plan that a Hugging Face model brings (`tp_plan`), which stays as it is.
#
# Each style keeps its meaning: between the divided layers every rank has the whole sequence, and a model gives all
# logits. So whatever a model computes between these layers, its masks and its loss, is computed on every rank alike.
# What the plan does not name has whole weights, whose gradients must be equal on all ranks: the first step checks that.

_HEADS = ("num_attention_heads", "num_key_value_heads")


def planned_layers(module: nn.Module, ranks: int) -> dict[str, str]:
    """The names of layers → their styles, by the plans of the Hugging Face models in `module`. None have one: empty.

    Raises:
        ConfigError: a style that is not known here, or what it cannot be, or heads that `ranks` do not divide.
    """
    found: dict[str, str] = {}
    for prefix, model in _models(module):
        where = f"strategy.tensor_parallel_size={ranks}: the tp_plan of {type(model).__name__}"
        _check_heads(model, ranks)
        for pattern, style in (tensor_plan_of(model) or {}).items():
            of = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
            for name, layer in model.named_modules():
                if of.fullmatch(name):
                    _check_style(where, name, layer, style)
                    found[f"{prefix}.{name}".strip(".")] = style
            for name, _ in model.named_parameters():
                if of.fullmatch(name):
                    raise ConfigError(
                        f"{where} divides the parameter {name} ({style}), which is not supported yet; leave "
                        f"strategy.tensor_parallel_size out"
                    )
    return found


def _models(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost models that bring a plan, with their names."""
    outer: list[str] = []
    for name, part in module.named_modules():
        if tensor_plan_of(part) and not any(name.startswith(prefix) for prefix in outer):
            outer.append(f"{name}." if name else "")
            yield name, part


def _check_style(where: str, name: str, layer: nn.Module, style: str) -> None:
    if style not in STYLES:
        raise ConfigError(f"{where} says {style!r} of {name}, and only {', '.join(STYLES)} are supported; leave it out")
    if not isinstance(layer, CLASSES.get(style, nn.Module)):
        raise ConfigError(
            f"{where} says {style!r} of {name}, which an nn.{CLASSES[style].__name__} can be, and it is "
            f"{a_or_an(type(layer).__name__)}; leave strategy.tensor_parallel_size out"
        )


def _check_heads(model: Any, ranks: int) -> None:
    for word in _HEADS:
        heads = getattr(model.config, word, None)
        if isinstance(heads, int) and heads % ranks:
            raise ConfigError(
                f"strategy.tensor_parallel_size={ranks} does not divide {word}={heads} of {type(model).__name__}; use "
                f"a divisor of {heads}"
            )


class CheckedCopies:
    """Whole weights whose gradients every rank computes by itself: `parameters`, by name."""

    def __init__(self, parameters: dict[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        self._parameters, self._group = parameters, group

    def check(self) -> None:
        """Compare the gradients of the first step among the ranks. Collective.

        Raises:
            ConfigError: some differ. The ranks would part in silence.
        """
        found = {name: local_part(p.grad).flatten() for name, p in self._parameters.items() if p.grad is not None}
        self._parameters = {}
        if not found:
            return
        sizes = [len(own) for own in found.values()]
        mean = sum_over(self._group, torch.cat(list(found.values()))) / self._group.size()
        wholes = torch.split(mean, sizes)
        off = torch.stack([(own - whole).norm() for own, whole in zip(found.values(), wholes, strict=True)])
        largest_over(self._group, off.nan_to_num_())
        for name, one, whole in zip(found, off.tolist(), wholes, strict=True):
            if one > 0.01 * float(whole.norm()):
                raise ConfigError(
                    f"strategy.tensor_parallel_size: ranks that compute {name} alike have found other gradients of it. "
                    f"If it sees some of the heads, the model's tp_plan has to name its layer "
                    f"{SEES_SOME_HEADS!r}; or a layer draws random numbers, and not the same on all of them"
                )
