"""What a rank holds of parameters and of the optimizers' state, where they are DTensors or plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from shardwise.checkpoint.chunks import slice_of
from shardwise.checkpoint.state import ParameterShard, make_like, restore
from shardwise.distributed.dtensor import local_part, whole_tensor


class DTensorState:
    """A `ShardedState` (see checkpoint/state.py) of `ddp` and `fsdp`.

    `optimizers`: those of the run, which are made later than this. `reshard`: called before parameters are looked at.
    """

    def __init__(
        self,
        module: LightningModule,
        optimizers: Callable[[], list[Optimizer]],
        reshard: Callable[[], None] = lambda: None,
    ) -> None:
        self.module, self.optimizers, self.reshard = module, optimizers, reshard
        self.average: dict[str, Tensor] | None = None
        self._stepped: dict[int, nn.Parameter] = {}  # what an optimizer has in place of a parameter, by its id
        self._sites: dict[str, tuple[nn.Parameter, int]] | None = None  # parameters, and which optimizer has them

    def step_on(self, stand_ins: dict[int, nn.Parameter]) -> None:
        """The optimizers are given these in place of the parameters with these ids."""
        self._stepped |= stand_ins

    # Master weights: what an average, a test or a checkpoint works on

    def master_shards(self) -> dict[str, Tensor]:
        """This rank's part of every trainable master weight, by name: storage that can be read and written.

        Parts have any shape. Parameters of which this rank holds nothing are left out.
        """
        self.reshard()
        return {n: local_part(p.detach()) for n, p in self.module.named_parameters() if p.requires_grad}

    def refresh_low_precision_copies(self) -> None:
        """`master_shards` were written to. Here copies are made anew in every step."""

    def full_parameters(self) -> dict[str, Tensor]:
        """Whole master weights on the CPU, on every rank: for tests and small models. Collective."""
        self.reshard()
        return {n: whole_tensor(p.detach()).cpu().clone() for n, p in self.module.named_parameters()}

    def begin_average(self) -> None:
        """The average of the weights starts as they are, unless a checkpoint has brought one."""
        if self.average is None:
            self.average = {name: shard.clone() for name, shard in self.master_shards().items()}

    # What a checkpoint holds

    def parameter_shards(self) -> Iterator[ParameterShard]:
        self.reshard()
        for name, p in self.module.named_parameters():
            yield ParameterShard(name, tuple(p.shape), local_part(p.detach()), partial(slice_of, p), p.requires_grad)

    def optimizer_state(self, shard: ParameterShard) -> tuple[int, dict[str, Tensor]]:
        parameter, number = self._site(shard.name)
        state = self.optimizers()[number].state.get(parameter, {})
        numbers = {k: torch.tensor(float(v)) for k, v in state.items() if isinstance(v, (int, float))}  # a step, say
        return number, numbers | {key: local_part(v) for key, v in state.items() if isinstance(v, Tensor)}

    def allocate_optimizer_state(
        self, shard: ParameterShard, known: dict[str, TensorStorageMetadata]
    ) -> dict[str, Tensor]:
        if not known:  # in no optimizer, say
            return {}
        parameter, number = self._site(shard.name)
        optimizer = self.optimizers()[number]
        group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
        on_device = bool(group.get("fused") or group.get("capturable"))
        scalars_on = parameter.device if on_device else torch.device("cpu")
        state = optimizer.state[parameter]
        for key, metadata in known.items():
            if key not in state or not isinstance(state[key], Tensor):
                state[key] = make_like(shard, parameter.detach(), key, metadata, scalars_on)
        return {key: local_part(state[key]) for key in known}

    def _site(self, name: str) -> tuple[nn.Parameter, int]:
        if self._sites is None:
            numbers = {id(p): i for i, o in enumerate(self.optimizers()) for g in o.param_groups for p in g["params"]}
            # What no optimizer has been given keeps nothing in any.
            stepped = {name: self._stepped.get(id(p), p) for name, p in self.module.named_parameters()}
            self._sites = {name: (p, numbers.get(id(p), 0)) for name, p in stepped.items()}
        return self._sites[name]

    def own_optimizers(self) -> list[Optimizer]:
        """As the module made them."""
        return list(self.optimizers())

    def group_names(self) -> list[list[list[str]]]:
        """Per optimizer and group: its parameters."""
        names = {id(self._stepped.get(id(p), p)): name for name, p in self.module.named_parameters()}
        return [[[names[id(p)] for p in g["params"] if id(p) in names] for g in o.param_groups]
                for o in self.own_optimizers()]  # fmt: skip

    def load_tensors(
        self, folder: Path, metadata: Metadata, group: dist.ProcessGroup | None, *, optimizers: bool, average: bool
    ) -> None:
        """From a checkpoint into their places. Collective.

        `group`: for the coordination of files. `average`: the run keeps an average of the weights.
        """
        if average:
            self.average = {name: torch.empty_like(shard) for name, shard in self.master_shards().items()}
        with torch.no_grad():
            restore(self, self.module, folder, metadata, group, optimizers=optimizers)
        self.refresh_low_precision_copies()
