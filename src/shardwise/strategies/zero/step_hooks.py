"""Hooks that others have registered on the steps of the module's optimizer (`register_step_post_hook`).

DeepSpeed calls that step for each of its flat pieces, before the weights have what it has computed. So here the hooks
are called around DeepSpeed's own step: once, with whole weights where they look at some.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
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
    """Calls them. `looks`: the name by which one may look at weights, if it does; `agree`: collective, of any rank."""

    def __init__(
        self, optimizer: Optimizer, strategy: str, looks: Callable[[Any], str | None], agree: Callable[[bool], bool],
        whole: Callable[[str], AbstractContextManager[None]], tell: Callable[[str, str | None], None],
        out_of_reach: Callable[[str], AbstractContextManager[Any]],
    ) -> None:  # fmt: skip
        """`whole`: makes weights whole. `tell`: of what that costs. `out_of_reach`: refuses to read gradients."""
        self.optimizer, self.strategy, self.looks, self.agree = optimizer, strategy, looks, agree
        self.whole, self.tell, self.out_of_reach = whole, tell, out_of_reach
        self._known: dict[int, tuple[Any, str | None]] | None = None  # id of a hook → it, the name that it looks at
        self._whole: dict[str, bool] = {}  # whether weights are whole before a step, and after it

    @contextmanager
    def around(self, counts: Callable[[], bool]) -> Iterator[None]:
        """Put around DeepSpeed's step. `counts`: whether it was made. The first call is collective."""
        places = [(self.optimizer if name in (_BEFORE, _AFTER) else of_torch, name) for name in _PLACES]
        hooks = [getattr(owner, name) for owner, name in places]
        theirs = [[hook for hook in kept.values() if not _is_ours(hook)] for kept in hooks]
        before, after = [*theirs[0], *theirs[1]], [*theirs[2], *theirs[3]]
        self._look(before, after)
        if not before and not after and not any(self._whole.values()):
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

    def _look(self, before: list[Any], after: list[Any]) -> None:
        if self._known is None:
            self._known = {id(hook): (hook, self.looks(hook)) for hook in chain(before, after)}
            for when, hooks in ((_BEFORE, before), (_AFTER, after)):
                names = [name for hook in hooks if (name := self._known[id(hook)][1])]
                self._whole[when] = self.agree(bool(names))
                if self._whole[when]:
                    self.tell(_WHERE, next(iter(names), None))
        for when, hooks in ((_BEFORE, before), (_AFTER, after)):
            for hook in hooks:
                if id(hook) not in self._known:
                    self._known[id(hook)] = hook, self.looks(hook)
                if self._known[id(hook)][1] is not None and not self._whole[when]:
                    raise ConfigError(
                        f"{_WHERE} that may look at weights (it uses {self._known[id(hook)][1]}) is registered while "
                        f"the run goes on, and under {self.strategy} all ranks have to know it from the first step on: "
                        f"register it in configure_optimizers or on_fit_start"
                    )

    def _call(self, when: str, hooks: list[Any]) -> None:
        with (
            patch.object(self.optimizer, "state", StateOutOfReach(self.strategy)),
            self.whole(_WHERE) if self._whole[when] else nullcontext(),
            self.out_of_reach(_WHERE),
        ):
            for hook in hooks:
                if hook(self.optimizer, (), {}) is not None and when == _BEFORE:
                    raise ConfigError(
                        f"{_WHERE} returns other arguments for the step, and under {self.strategy} DeepSpeed "
                        f"calls it: let it return None, or use strategy=ddp or fsdp"
                    )


def _is_ours(hook: Any) -> bool:
    """Whether it belongs to the optimizer as we have built it, and so to what DeepSpeed steps on."""
    return str(getattr(hook, "__module__", "")).startswith("shardwise.")
