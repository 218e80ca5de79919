"""Freezes parts of a module: `freeze=` for the whole run, or for its first epochs (`freeze_epochs=`).

A frozen part has no gradients and is in evaluation mode: batch norm normalises by its running statistics and keeps
them, and dropout is off.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from lightning.pytorch import LightningModule
from torch import nn

from shardwise.checkpoint.state import COMPILED
from shardwise.errors import ConfigError, class_name, count, did_you_mean
from shardwise.plan import Plan
from shardwise.protocols import optional

BACKBONE = "backbone"  # everything but the head, if no part has this name


def freeze_for_good(plan: Plan, module: nn.Module) -> None:
    """Freeze the parameters that are not trained in this run, before a strategy prepares them. Rank 0 says how many.

    Raises:
        ConfigError: the module has no part of this name, or nothing is left to train.
    """
    if not plan.freeze or plan.stage != "fit" or not isinstance(module, LightningModule):
        return
    is_frozen = frozen_names(plan, module)
    named = dict(module.named_parameters())
    frozen = [parameter for name, parameter in named.items() if is_frozen(name)]
    if plan.freeze_epochs is None:
        for parameter in frozen:
            parameter.requires_grad_(False)
        if not any(parameter.requires_grad for parameter in named.values()):
            raise ConfigError(f"freeze={_as_given(plan)} leaves no parameter to train: freeze less")
    if os.environ["RANK"] == "0":
        weights, total = (sum(p.numel() for p in of) for of in (frozen, named.values()))
        until = "" if plan.freeze_epochs is None else f" for the first {count(plan.freeze_epochs, 'epoch')}"
        print(
            f"frozen{until}: {weights:,} of {total:,} parameters (freeze={_as_given(plan)}); there batch norm keeps "
            f"its statistics and normalises by them, and dropout is off",
            flush=True,
        )


def frozen_names(plan: Plan, module: LightningModule) -> Callable[[str], bool]:
    """Whether a parameter or a layer of this name belongs to what `freeze=` names.

    Raises:
        ConfigError: the module has no part of this name.
    """
    names = {_plain(name) for name, _ in [*module.named_modules(), *module.named_parameters()]} - {""}
    head = optional(module, "head_name")
    parts = []
    for part in plan.freeze:
        if part in names:
            parts.append(part)
        elif part == BACKBONE and head is not None:
            over_head = {head[:i] for i, letter in enumerate(head) if letter == "."}
            parts += [name for name in names - over_head if name != head and not name.startswith(f"{head}.")]
        else:
            has = sorted({name.partition(".")[0] for name in names})
            why = (
                "; `backbone` would be all but its head, which it does not name by head_name"
                if part == BACKBONE
                else ""
            )
            near = did_you_mean(part, [*has, BACKBONE])
            raise ConfigError(
                f"freeze={part}: {class_name(module)} has no part of this name{near}{why}; give the name of a layer or "
                f"a parameter, as named_modules() has it, below {', '.join(has[:8])}"
            )
    chosen = set(parts)

    def is_frozen(name: str) -> bool:
        name = _plain(name)
        return name in chosen or any(name[:i] in chosen for i, letter in enumerate(name) if letter == ".")

    return is_frozen


def _plain(name: str) -> str:
    return name.replace(COMPILED, "")


def _as_given(plan: Plan) -> str:
    return plan.freeze[0] if len(plan.freeze) == 1 else f"[{','.join(plan.freeze)}]"
