"""The parameter groups of the module's optimizer, in which DeepSpeed has put its own flat pieces of masters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardwise.errors import ConfigError
from shardwise.strategies.zero.state import ZeroState


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
