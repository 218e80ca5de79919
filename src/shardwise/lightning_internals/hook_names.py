"""Which hooks see whole weights under strategies that shard them: those of a run, an epoch, a validation, a checkpoint.

Hooks of a batch or of a step see what the strategy has there.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from shardwise.protocols import optional

# These hooks look at gradients, which belong to the shards. In on_before_zero_grad there are none any more.
_OF_GRADIENTS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")
# In these they have been computed, and may be changed.
LOOK_AT_GRADIENTS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
# In these, weights and gradients are in the strategy's hands. The last ones are called where Lightning's do all, too.
NOT_GATHERED = (*LOOK_AT_GRADIENTS, "on_before_backward", "optimizer_step", "lr_scheduler_step")
_OF_LIGHTNING = ("configure_gradient_clipping", "optimizer_step", "lr_scheduler_step")
_OF_BATCH_TRANSFER = ("on_before_batch_transfer", "on_after_batch_transfer")
# Hooks of a batch in which `whole_weights_in` may ask for whole weights.
OF_BATCHES = ("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", *(
    f"on_{stage}_batch_{when}" for stage in ("validation", "test", "predict") for when in ("start", "end")
))  # fmt: skip
_OURS = ("lightning", "shardwise")  # whose hooks do without whole weights


def has_weights(hook: str) -> bool:
    """Whether a hook of this name comes where weights may be whole. Every rank calls it (unlike `prepare_data`)."""
    return hook.startswith("on_") and hook not in (*_OF_GRADIENTS, *_OF_BATCH_TRANSFER, "on_exception")


def of_longer_than_batches(hook: str) -> bool:
    """Whether it is a hook of a run, of an epoch, of a validation or of a checkpoint."""
    return has_weights(hook) and hook not in OF_BATCHES


def sees_whole_weights(host: LightningModule | Callback, hook: str, chosen: Sequence[str] | None) -> bool:
    """Whether weights are made whole for `hook` of `host`. `chosen`: the run's `whole_weights_in`; None: the host's."""
    chosen = optional(host, "whole_weights_in") if chosen is None else chosen
    return (of_longer_than_batches(hook) if chosen is None else hook in chosen) and is_users(host, hook)


def is_users(host: Any, hook: str) -> bool:
    """Whether the code of this hook is the user's."""
    function = inspect.unwrap(getattr(host, hook))
    module = str(getattr(function, "__module__", None) or type(host).__module__)
    return module.partition(".")[0] not in _OURS


def runs_own_code(hook: str, module: LightningModule) -> bool:
    """Whether `hook`, one of `NOT_GATHERED`, runs code that is not Lightning's, if it is called."""
    return hook not in _OF_LIGHTNING or has_own(hook, module)


def has_own(hook: str, module: LightningModule) -> bool:
    """Whether the module has overridden the hook, in its class or by an attribute."""
    return is_overridden(hook, module) or hook in vars(module)


def may_run_layers(hook: str, automatic: bool) -> bool:
    """Whether a hook of this name can run layers outside of a step, and runs no step itself (as `optimizer_step` does).

    `automatic`: whether Lightning optimizes. A module that does so by hand calls the hooks of gradients in its step.
    """
    return has_weights(hook) or (automatic and hook in (*_OF_GRADIENTS, "lr_scheduler_step"))
