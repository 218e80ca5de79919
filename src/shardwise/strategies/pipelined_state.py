"""A stage's part of the run's state: its own layers, under the names of the whole module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint.state import shapes_of
from shardwise.distributed.collectives import gather_objects
from shardwise.errors import ConfigError, first_of
from shardwise.strategies.sharded_state import DTensorState


class PipelinedState(DTensorState):
    """The `ShardedState` of one stage. It is made before other stages' layers are cut out of `module`.

    `group`: the ranks of this pipeline.
    """

    def __init__(
        self,
        module: LightningModule,
        optimizers: Callable[[], list[Optimizer]],
        reshard: Callable[[], None],
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(module, optimizers, reshard)
        self._group, self._shapes = group, shapes_of(module)
        self._names: list[list[list[str]]] | None = None  # of all stages, see `group_names`

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def keep_own_groups(self) -> None:
        """Take the weights of other stages out of the optimizers, which the module has made for all of its weights."""
        self._names = super().group_names()
        for optimizer in self.optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.is_meta:
                        optimizer.state.pop(parameter, None)
                group["params"] = [p for p in group["params"] if not p.is_meta]

    def group_names(self) -> list[list[list[str]]]:
        """Those of all stages: a checkpoint describes every group whole."""
        return super().group_names() if self._names is None else self._names

    def of_all_stages(self, value: Any) -> list[Any]:
        return gather_objects(self._group, value)

    def group_members(self, names: list[str]) -> list[nn.Parameter]:
        raise ConfigError(
            f"the checkpoint has a group of the optimizer that a hook had made ({first_of(names)}), and a pipeline "
            f"knows only the groups of configure_optimizers; use strategy.pipeline_parallel_size=1"
        )

    def stepped_names(self) -> dict[int, str]:
        return {}  # rank 0 writes what is no tensor, and has not that of other stages

    @property
    def keeps_whole_weights(self) -> bool:
        return False

    def full_parameters(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for part in reversed(gather_objects(self._group, super().full_parameters())):  # the first stage is last there
            found |= part
        return found
