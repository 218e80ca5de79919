"""The user's callbacks, from `callbacks.NAME._target_=…` or from the module's `configure_callbacks`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

from shardwise.config.lightning_callbacks import LIGHTNING, WORKS
from shardwise.config.targets import build, check, locate
from shardwise.errors import ConfigError, class_name
from shardwise.plan import Plan


def check_callbacks(plan: Plan) -> None:
    """Locate every callback and check its arguments, without building it.

    Raises:
        ConfigError: a target is no Callback class, cannot work here, or does not take one of its arguments.
    """
    for name, node in plan.callbacks.items():
        key = f"callbacks.{name}"
        target = locate(node["_target_"], key)
        if not (isinstance(target, type) and issubclass(target, Callback)):
            raise ConfigError(
                f"{key}._target_={node['_target_']} is no callback class: give a subclass of lightning.pytorch.Callback"
            )
        _refuse(target, f"{key}._target_={node['_target_']}")
        check(node, key)


def build_callbacks(plan: Plan) -> list[Callback]:
    """The callbacks of `plan`, in its order."""
    callbacks: list[Callback] = []
    keys: dict[str, str] = {}  # the key under which Lightning keeps a callback's state → its name in the config
    for name, node in plan.callbacks.items():
        callback = build(node, f"callbacks.{name}")
        has_state = is_overridden("state_dict", callback, Callback)
        if has_state and (other := keys.setdefault(callback.state_key, name)) != name:
            raise ConfigError(
                f"callbacks.{other} and callbacks.{name} would keep their states under one name, "
                f"{callback.state_key}: give them other arguments, or leave one out"
            )
        callbacks.append(callback)
    return callbacks


def leave_out_model_checkpoints(module: LightningModule) -> None:
    """Leave out every ModelCheckpoint of the module's `configure_callbacks`: the run saves by itself. Rank 0 says so.

    `check_callbacks` refuses one from the config: there the user can leave it out.
    """
    if not is_overridden("configure_callbacks", module):
        return
    own = module.configure_callbacks

    def configure() -> list[Callback]:
        made = own()
        callbacks = [made] if isinstance(made, Callback) else list(made)
        for left_out in (callback for callback in callbacks if isinstance(callback, ModelCheckpoint)):
            best = f"; checkpoint.monitor={left_out.monitor} checkpoint.mode={left_out.mode} keeps the best"
            if os.environ["RANK"] == "0":
                print(
                    f"{type(left_out).__name__} of {class_name(module)}.configure_callbacks is left out: the run "
                    f"saves its checkpoints by itself{best if left_out.monitor else ''}",
                    flush=True,
                )
        return [callback for callback in callbacks if not isinstance(callback, ModelCheckpoint)]

    module.configure_callbacks = configure  # type: ignore[method-assign]


def refuse_callbacks(callbacks: Iterable[Callback]) -> None:
    """Refuse callbacks that cannot work here.

    Those of the module's `configure_callbacks` are known only once the module is built.

    Raises:
        ConfigError: a callback cannot work here; the message says why.
    """
    for callback in callbacks:
        _refuse(type(callback), f"callback {type(callback).__name__}")


def _refuse(kind: type[Any], label: str) -> None:
    for parent in kind.__mro__:
        if parent.__module__.startswith("lightning.pytorch.callbacks") and parent.__name__ in LIGHTNING:
            reason = LIGHTNING[parent.__name__]
            if reason != WORKS:
                raise ConfigError(f"{label} is refused: {reason}")
            return
