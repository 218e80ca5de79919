"""Weights that a hook freezes under ZeRO, whose optimizer goes on with a gradient of zero for them."""

from __future__ import annotations

from typing import Any

from torch import optim

from shardwise.errors import ConfigError
from shardwise.strategies.refusals import FrozenForGood
from shardwise.strategies.zero.state import ZeroState

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
