"""Tensor parallelism by the plan that a Hugging Face model brings (`tp_plan`), which stays as it is.

Each style keeps its meaning: between the divided layers every rank has the whole sequence, and a model gives all
logits. So whatever a model computes between these layers, its masks and its loss, is computed on every rank alike. What
the plan does not name has whole weights, whose gradients must be equal on all ranks: the first step checks that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.distributed.collectives import largest_over, sum_over
from shardwise.distributed.dtensor import local_part
from shardwise.errors import ConfigError, a_or_an
from shardwise.parallel.divided_layers import CLASSES, SEES_SOME_HEADS, STYLES
from shardwise.protocols import tensor_plan_of

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
