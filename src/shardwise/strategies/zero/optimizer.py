"""The module's optimizer under DeepSpeed: its groups, hooks on its steps, and weights that are frozen while it runs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from torch import optim
from torch.optim import Optimizer
from torch.optim import optimizer as of_torch

from shardwise.errors import ConfigError
from shardwise.strategies.refusals import FrozenForGood
from shardwise.strategies.zero.state import ZeroState

# The parameter groups of the module's optimizer, in which DeepSpeed has put its own flat pieces of masters.


class ParameterGroups:
    """Shows hooks the module's weights in the groups, and refuses groups that come or go while a run goes on."""

    def __init__(self, state: ZeroState, owner: str, strategy: str) -> None:
        """`owner`: the name of the module's class."""
        self.state, self.owner, self.strategy = state, owner, strategy
        (self.optimizer,) = state.module_optimizers()
        self._sizes = self._count()
        self._hidden: list[tuple[dict[str, Any], list[Any], list[Any]]] = []  # group, DeepSpeed's pieces, the weights
        self.optimizer.register_state_dict_pre_hook(lambda *_: self._hide())  # their state belongs to the pieces
        for host in (self.optimizer, state.engine_optimizer):
            host.add_param_group = self._refuse_group  # type: ignore[method-assign]
        # Lightning gives DeepSpeed's optimizer to who asks for the module's.
        for name in ("register_step_pre_hook", "register_step_post_hook"):
            setattr(state.engine_optimizer, name, getattr(self.optimizer, name))

    def check(self) -> None:
        """Raises ConfigError if the groups are not those that DeepSpeed has sharded."""
        if self._count() != self._sizes:
            raise self._changed("added to, or taken out of,")

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, the groups have the module's weights. It is put around hooks, one of which may run within another."""
        groups = self.optimizer.param_groups
        named = zip(groups, self.state.group_names()[0], strict=False)  # `check` finds a group that has gone
        own = [(group, group["params"], [self.state.module.get_parameter(n) for n in names]) for group, names in named]
        outer, self._hidden = self._hidden, own
        for group, _, weights in own:
            group["params"] = weights
        counts = [len(weights) for _, _, weights in own]
        yield
        changed = any(g["params"] is w and len(w) != n for (g, _, w), n in zip(own, counts, strict=True))
        self._hide()
        self._hidden = outer
        if changed:
            raise self._changed("added to, or taken out of,")

    def _hide(self) -> None:
        for group, pieces, _ in self._hidden:
            group["params"] = pieces

    def _count(self) -> list[int]:
        return [len(group["params"]) for group in self.optimizer.param_groups]

    def _refuse_group(self, *_: Any, **__: Any) -> None:
        raise self._changed("added to")

    def _changed(self, how: str) -> ConfigError:
        return ConfigError(
            f"weights are {how} the groups of {self.owner}'s {type(self.optimizer).__name__} while the run goes on: "
            f"under {self.strategy} DeepSpeed has sharded the groups that configure_optimizers gave, and knows no "
            f"others; give all groups there (one may begin with lr=0), or use strategy=fsdp or ddp"
        )


class StateOutOfReach(dict[Any, Any]):
    """In place of `optimizer.state` while a hook of steps runs: DeepSpeed's optimizer keeps it for flat pieces."""

    def __init__(self, strategy: str) -> None:
        super().__init__()
        self.strategy = strategy

    def _refuse(self, *_: Any) -> Any:
        raise ConfigError(
            f"a hook on the steps of the optimizer looks at optimizer.state, and under {self.strategy} that is in "
            f"DeepSpeed's hands, out of reach: leave that out, or use strategy=ddp or fsdp"
        )

    __getitem__ = __contains__ = __iter__ = __len__ = get = items = keys = values = setdefault = _refuse


# Hooks that others have registered on the steps of the module's optimizer (`register_step_post_hook`).
#
# DeepSpeed calls that step for each of its flat pieces, before the weights have what it has computed. So here the hooks
# are called around DeepSpeed's own step, once.

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


# Weights that a hook freezes under ZeRO, whose optimizer goes on with a gradient of zero for them.

# With a gradient of zero these change neither a weight nor their state, but for momentum and weight decay. Others count
# steps, or let averages decay, so that a weight that is trained again later is trained in another way.
_WITHOUT_DECAY = (optim.SGD, optim.Adagrad)


class FrozenUnderZero(FrozenForGood):
    """Also the weights that are frozen later. DeepSpeed's optimizer goes on with a gradient of zero for these."""

    def __init__(self, state: ZeroState, strategy: str) -> None:
        super().__init__(state.module, strategy)
        groups = {name: group for group, names in enumerate(state.group_names()[0]) for name in names}
        named = [(name, p) for name, p in state.module.named_parameters() if name in state.trained_names()]
        self._trained = [(name, p, groups[name]) for name, p in named]
        self._state = state
        self._untouched: set[str] | None = None  # frozen since the first step, with nothing of earlier gradients kept

    def check(self) -> None:
        """Raises ConfigError where the next step would change a weight that is frozen now."""
        super().check()
        frozen = {name: group for name, p, group in self._trained if not p.requires_grad}
        if self._untouched is None:
            self._untouched = frozen.keys() - self._remembered() if frozen else set()
        self._untouched &= frozen.keys()
        if names := [name for name, group in frozen.items() if self._changes(name, group)]:
            raise ConfigError(
                f"{', '.join(names[:4])} had requires_grad=True when {self._strategy} was set up, and has been frozen: "
                f"DeepSpeed's optimizer goes on with a gradient of zero for it, so that weight decay and momentum, or "
                f"what the optimizer keeps of it, would go on changing; freeze it before training starts (in __init__ "
                f"or setup), or use strategy=fsdp, which can go on from a checkpoint of this run, or strategy=ddp"
            )

    def _remembered(self) -> set[str]:
        """The names of the weights of whose earlier gradients the optimizer keeps something on this rank."""
        kept = ((shard.name, self._state.optimizer_state(shard)[1]) for shard in self._state.parameter_shards()
                if shard.trained)  # fmt: skip
        return {name for name, state in kept if any(value.ndim and value.any() for value in state.values())}

    def _changes(self, name: str, group: int) -> bool:
        (optimizer,) = self._state.module_optimizers()
        options: dict[str, Any] = optimizer.param_groups[group]
        if options.get("weight_decay") or type(optimizer) not in _WITHOUT_DECAY:
            return True
        return bool(options.get("momentum")) and name not in (self._untouched or ())
