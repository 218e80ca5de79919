"""Hooks that others have registered on the steps of the module's optimizer (`register_step_post_hook`).

DeepSpeed calls that step for each of its flat pieces, before the weights have what it has computed. So here the hooks
are called around DeepSpeed's own step, once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from torch.optim import Optimizer
from torch.optim import optimizer as of_torch

from shardwise.errors import ConfigError
from shardwise.strategies.zero.groups import StateOutOfReach

_BEFORE, _AFTER = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
_PLACES = ("_global_optimizer_pre_hooks", _BEFORE, _AFTER, "_global_optimizer_post_hooks")  # in the order of torch
_WHERE = "a hook on the steps of the optimizer"


class StepHooks:
    """Calls them. `out_of_reach`: refuses to read gradients."""

    def __init__(
        self, optimizer: Optimizer, strategy: str, out_of_reach: Callable[[str], AbstractContextManager[Any]]
    ) -> None:
        self.optimizer, self.strategy, self.out_of_reach = optimizer, strategy, out_of_reach

    @contextmanager
    def around(self, counts: Callable[[], bool]) -> Iterator[None]:
        """Put around DeepSpeed's step. `counts`: whether it was made."""
        places = [(self.optimizer if name in (_BEFORE, _AFTER) else of_torch, name) for name in _PLACES]
        hooks = [getattr(owner, name) for owner, name in places]
        theirs = [[hook for hook in kept.values() if not _is_ours(hook)] for kept in hooks]
        before, after = [*theirs[0], *theirs[1]], [*theirs[2], *theirs[3]]
        if not before and not after:
            yield
            return
        for (owner, name), kept in zip(places, hooks, strict=True):
            setattr(owner, name, OrderedDict((n, hook) for n, hook in kept.items() if _is_ours(hook)))
        try:
            self._call(_BEFORE, before)
            yield
        finally:
            for (owner, name), kept in zip(places, hooks, strict=True):
                setattr(owner, name, kept)
        if counts():
            self._call(_AFTER, after)

    def _call(self, when: str, hooks: list[Any]) -> None:
        with patch.object(self.optimizer, "state", StateOutOfReach(self.strategy)), self.out_of_reach(_WHERE):
            for hook in hooks:
                if hook(self.optimizer, (), {}) is not None and when == _BEFORE:
                    raise ConfigError(
                        f"{_WHERE} returns other arguments for the step, and under {self.strategy} DeepSpeed "
                        f"calls it: let it return None, or use strategy=ddp or fsdp"
                    )


def _is_ours(hook: Any) -> bool:
    """Whether it belongs to the optimizer as we have built it, and so to what DeepSpeed steps on."""
    return str(getattr(hook, "__module__", "")).startswith("shardwise.")
