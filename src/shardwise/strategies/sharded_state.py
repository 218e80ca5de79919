"""A rank's parts of parameters and optimizer state that are DTensors or plain tensors."""

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

from shardwise.checkpoint.chunks import Chunk, slice_of
from shardwise.checkpoint.state import ParameterShard, make_like, restore, shapes_of
from shardwise.distributed.dtensor import local_part, whole_tensor
from shardwise.parallel.tensor_parallel import Cut, TensorParallel
from shardwise.protocols import state_maker_of


class DTensorState:
    """The `ShardedState` (see checkpoint/state.py) of `ddp` and `fsdp`.

    `optimizers`: gives the run's optimizers, which are made later. `reshard`: called before parameters are read.
    """

    def __init__(
        self,
        module: LightningModule,
        optimizers: Callable[[], list[Optimizer]],
        reshard: Callable[[], None] = lambda: None,
    ) -> None:
        self.module, self.optimizers, self.reshard = module, optimizers, reshard
        self.average: dict[str, Tensor] | None = None
        self.tensor_parallel: TensorParallel | None = None  # knows which parameters are divided before they are sharded
        self._stepped: dict[int, nn.Parameter] = {}  # a parameter's id → what its optimizer steps on
        # A parameter's name → what its optimizer steps on, and that optimizer's number.
        self._sites: dict[str, tuple[nn.Parameter, int]] | None = None

    def divide(self, layers: TensorParallel) -> TensorParallel:
        """Note that parameters are parts of whole ones before they are sharded."""
        self.tensor_parallel = layers
        return layers

    def step_on(self, stand_ins: dict[int, nn.Parameter]) -> None:
        """Note that optimizers step on `stand_ins` in place of the parameters with these ids."""
        self._stepped |= stand_ins

    # Master weights, for averages, tests and checkpoints

    def master_shards(self) -> dict[str, Tensor]:
        """This rank's part of every trainable master weight, by name. The parts can be read and written.

        A part can have any shape. A parameter of which this rank has no part is left out.
        """
        self.reshard()
        return {n: local_part(p.detach()) for n, p in self.module.named_parameters() if p.requires_grad}

    def refresh_low_precision_copies(self) -> None:
        """Update copies after a write to `master_shards`. There are none here, since every step makes new ones."""

    def full_parameters(self) -> dict[str, Tensor]:
        """Gather the master weights on the CPU of every rank, for tests and small models. Collective."""
        self.reshard()
        return {name: self.whole(name, p.detach()).cpu().clone() for name, p in self.module.named_parameters()}

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Gather a parameter of which `part` is this rank's. Collective."""
        of_shards = whole_tensor(part)
        return of_shards if self.tensor_parallel is None else self.tensor_parallel.whole(name, of_shards)

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the whole parameters and persistent buffers, by name."""
        return shapes_of(self.module) | {name: cut.shape for name, cut in self.cuts.items()}

    def begin_average(self) -> None:
        """Start the average of the weights with their present values, unless a checkpoint had an average."""
        if self.average is None:
            self.average = {name: shard.clone() for name, shard in self.master_shards().items()}

    def held_memory(self) -> dict[str, list[Tensor]]:
        """Tensors beside the module's and the optimizer's that live from step to step: the category of a memory
        profile → tensors."""
        return {}

    # The contents of a checkpoint

    def parameter_shards(self) -> Iterator[ParameterShard]:
        self.reshard()
        for name, p in self.module.named_parameters():
            cut = self.cuts.get(name)
            shape = tuple(p.shape) if cut is None else cut.shape
            yield ParameterShard(name, shape, local_part(p.detach()), self.chunks_of(name, p), p.requires_grad)

    def chunks_of(self, name: str, p: Tensor) -> Callable[[Tensor], list[Chunk]]:
        """What finds where the elements of this rank's part of a parameter are in the whole one."""
        cut = self.cuts.get(name)
        return partial(slice_of, p) if cut is None else partial(slice_of, p, first=(cut.dim, cut.start))

    @property
    def cuts(self) -> dict[str, Cut]:
        """The names of parameters of which each peer of a tensor axis has a part → this rank's part."""
        return {} if self.tensor_parallel is None else self.tensor_parallel.cuts

    def optimizer_state(self, shard: ParameterShard) -> tuple[int, dict[str, Tensor]]:
        parameter, number = self._site(shard.name)
        state = self.optimizers()[number].state.get(parameter, {})
        # Some optimizers keep their step counter as a number.
        numbers = {k: torch.tensor(float(v)) for k, v in state.items() if isinstance(v, (int, float))}
        return number, numbers | {key: local_part(v) for key, v in state.items() if isinstance(v, Tensor)}

    def allocate_optimizer_state(
        self, shard: ParameterShard, known: dict[str, TensorStorageMetadata]
    ) -> dict[str, Tensor]:
        if not known:  # such as a parameter that is in no optimizer
            return {}
        parameter, number = self._site(shard.name)
        optimizer = self.optimizers()[number]
        group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
        on_device = bool(group.get("fused") or group.get("capturable"))
        scalars_on = parameter.device if on_device else torch.device("cpu")
        state = optimizer.state[parameter]
        if not state and (make := state_maker_of(optimizer)) is not None:
            state.update(make(parameter))
        for key, metadata in known.items():
            if key not in state or not isinstance(state[key], Tensor):
                state[key] = make_like(shard, parameter.detach(), key, metadata, scalars_on)
        return {key: local_part(state[key]) for key in known}

    def _site(self, name: str) -> tuple[nn.Parameter, int]:
        if self._sites is None:
            numbers = {id(p): i for i, o in enumerate(self.optimizers()) for g in o.param_groups for p in g["params"]}
            # A parameter that is in no optimizer has no state, so any number will do.
            stepped = {name: self._stepped.get(id(p), p) for name, p in self.module.named_parameters()}
            self._sites = {name: (p, numbers.get(id(p), 0)) for name, p in stepped.items()}
        return self._sites[name]

    def module_optimizers(self) -> list[Optimizer]:
        """The optimizers as the module made them."""
        return list(self.optimizers())

    def group_names(self) -> list[list[list[str]]]:
        """The names of the parameters, for each optimizer and each of its groups."""
        names = {id(self._stepped.get(id(p), p)): name for name, p in self.module.named_parameters()}
        return [[[names[id(p)] for p in g["params"] if id(p) in names] for g in o.param_groups]
                for o in self.module_optimizers()]  # fmt: skip

    def load_tensors(
        self, folder: Path, metadata: Metadata, group: dist.ProcessGroup | None, *, optimizers: bool, average: bool
    ) -> None:
        """Read weights and optimizer state from a checkpoint. Collective.

        `group`: the group for work on files. `average`: whether the run keeps an average of the weights.
        """
        if average:
            self.average = {name: torch.empty_like(shard) for name, shard in self.master_shards().items()}
        with torch.no_grad():
            restore(self, self.module, folder, metadata, group, optimizers=optimizers)
        self.refresh_low_precision_copies()
