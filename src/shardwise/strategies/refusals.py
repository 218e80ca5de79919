"""What strategies refuse: parameters that none or some of them cannot train, and what comes while a run goes on."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import nn

from shardwise.checkpoint.state import COMPILED
from shardwise.errors import ConfigError
from shardwise.lightning_internals.loops import evaluates_loaders_together
from shardwise.plan import Plan


def refuse_parameters(module: LightningModule, plan: Plan) -> None:
    """Raises ConfigError where the plan's strategy cannot train a parameter, or not a layer as it is."""
    strategy = plan.strategy.name
    sparse = [name for name, layer in module.named_modules() if getattr(layer, "sparse", False) and _embeds(layer)]
    if sparse and plan.stage == "fit":
        raise ConfigError(
            f"{', '.join(sparse[:4])} has sparse=True, and its gradients are sparse tensors, which are not reduced, "
            f"measured or clipped here; leave sparse=True out"
        )
    complex_ones = [name for name, p in module.named_parameters() if p.is_complex() and p.requires_grad]
    if complex_ones and strategy != "ddp" and plan.stage == "fit":
        raise ConfigError(
            f"{', '.join(complex_ones[:4])} holds complex numbers, and {strategy} keeps real ones alone: let the "
            f"parameter be torch.view_as_real of it, or use strategy=ddp"
        )
    wrapped = [name.partition(f".{COMPILED}")[0] for name, _ in module.named_parameters() if COMPILED in name]
    if wrapped and plan.strategy.zero_stage == 3:
        raise ConfigError(
            f"{wrapped[0]} is what torch.compile(layer) gives, and {strategy} cannot put its hooks into that; call "
            f"layer.compile(), use compile=layer, or another strategy"
        )


def _embeds(layer: nn.Module) -> bool:
    return isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.weight.requires_grad


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
