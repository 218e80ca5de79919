"""What strategies refuse while a run goes on."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy

from shardwise.errors import ConfigError
from shardwise.lightning_internals.loops import evaluates_loaders_together
from shardwise.plan import Plan


class ChecksLoaders(Strategy):
    """Refuses batches of several loaders at once: a rank without samples of one left may have some of another."""

    plan: Plan

    def on_validation_start(self) -> None:
        self._refuse_loaders_together()
        super().on_validation_start()

    def on_test_start(self) -> None:
        self._refuse_loaders_together()
        super().on_test_start()

    def _refuse_loaders_together(self) -> None:
        assert self.lightning_module is not None
        if self.plan.topology.data_parallel_size > 1 and evaluates_loaders_together(self.lightning_module.trainer):
            raise ConfigError(
                "a CombinedLoader gives batches of several loaders at once, and on several ranks an evaluation would "
                "count samples twice: use mode='sequential', or return a list of loaders"
            )


class FrozenForGood:
    """The weights that are frozen when a strategy is set up which could not train them later."""

    def __init__(self, module: LightningModule | None = None, strategy: str = "") -> None:
        """`module`: None: all may be trained later."""
        named = [] if module is None else list(module.named_parameters())
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        self._strategy = strategy

    def check(self) -> None:
        """Raises ConfigError where one of them is to be trained now."""
        if names := [name for name, p in self._frozen if p.requires_grad]:
            raise ConfigError(
                f"{', '.join(names[:4])} had requires_grad=False when {self._strategy} was set up, and has it no "
                f"longer: {self._strategy} would not reduce or update it; use strategy=fsdp, or let it be trained from "
                f"the start"
            )
