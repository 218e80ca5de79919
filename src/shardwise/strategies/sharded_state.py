"""A rank's parts of parameters and optimizer state that are DTensors or plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.checkpoint.dcp import Chunk, TensorWriter, slice_of
from shardwise.checkpoint.optimizers import as_tensor
from shardwise.checkpoint.publish import SaveError, publish
from shardwise.checkpoint.state import ParameterShard, make_like, names_left_out, restore, shapes_of
from shardwise.checkpoint.train_state import TrainState
from shardwise.distributed.dtensor import local_part, whole_tensor
from shardwise.errors import first_of
from shardwise.plan import Plan
from shardwise.protocols import state_maker_of
from shardwise.step.precision_plugin import PlannedPrecision
from shardwise.weights.loading import read_initial

if TYPE_CHECKING:
    from shardwise.parallel.tensor_parallel import Cut, TensorParallel


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
        self.left_out = names_left_out(module)
        self.exchanged = False  # whether the weights are in `average` now, and the average is in the module
        self.with_shards: Callable[[], AbstractContextManager[None]] = nullcontext  # see `found_by`
        self.tensor_parallel: TensorParallel | None = None  # knows which parameters are divided before they are sharded
        self._stepped: dict[int, nn.Parameter] = {}  # a parameter's id → what its optimizer steps on
        # A parameter's name → what its optimizer steps on, and that optimizer's number.
        self._sites: dict[str, tuple[nn.Parameter, int | None]] | None = None
        self._sizes: list[list[int]] = []  # of each optimizer's groups then
        self.made_groups: list[list[list[str]]] = []  # `group_names` before hooks of the run changed them

    def divide(self, layers: TensorParallel) -> TensorParallel:
        """Note that parameters are parts of whole ones before they are sharded."""
        self.tensor_parallel = layers
        return layers

    def step_on(self, stand_ins: dict[int, nn.Parameter]) -> None:
        """Note that optimizers step on `stand_ins` in place of the parameters with these ids."""
        self._stepped |= stand_ins

    @contextmanager
    def found_by(self, shards_in_place: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Inside, whole weights are in the places of shards, and `with_shards()` has the shards there for a while."""
        before, self.with_shards = self.with_shards, shards_in_place
        try:
            yield
        finally:
            self.with_shards = before

    # Master weights, for averages, tests and checkpoints

    def master_shards(self) -> dict[str, Tensor]:
        """This rank's part of every trainable master weight, by name. The parts can be read and written.

        A part can have any shape. A parameter of which this rank has no part is left out. What an optimizer has is
        trainable also while it is frozen.
        """
        return self._parts({n for n, p in self.module.named_parameters() if p.requires_grad or self._is_trained(n)})

    def averaged_shards(self) -> dict[str, Tensor]:
        """This rank's part of every master weight that has an average."""
        return self._parts(set() if self.average is None else set(self.average))

    def _parts(self, names: set[str]) -> dict[str, Tensor]:
        self.reshard()
        return {name: local_part(p.detach()) for name, p in self.module.named_parameters() if name in names}

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
        had = self.average or {}
        self.average = {name: had[name] if name in had else part.clone() for name, part in self.master_shards().items()}

    def exchange_average(self) -> None:
        """Exchange the weights and the average in place."""
        assert self.average is not None
        for name, shard in self.averaged_shards().items():
            weights = shard.clone()
            shard.copy_(self.average[name])
            self.average[name].copy_(weights)
        self.refresh_low_precision_copies()
        self.exchanged = not self.exchanged

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
            yield ParameterShard(name, shape, local_part(p.detach()), self.chunks_of(name, p), self._is_trained(name))

    def chunks_of(self, name: str, p: Tensor) -> Callable[[Tensor], list[Chunk]]:
        """What finds where the elements of this rank's part of a parameter are in the whole one."""
        cut = self.cuts.get(name)
        return partial(slice_of, p) if cut is None else partial(slice_of, p, first=(cut.dim, cut.start))

    @property
    def cuts(self) -> dict[str, Cut]:
        """The names of parameters of which each peer of a tensor axis has a part → this rank's part."""
        return {} if self.tensor_parallel is None else self.tensor_parallel.cuts

    def _is_trained(self, name: str) -> bool:
        return self._site(name)[1] is not None

    def optimizer_state(self, shard: ParameterShard) -> tuple[int, dict[str, Tensor]]:
        parameter, number = self._site(shard.name)
        assert number is not None
        state = self.optimizers()[number].state.get(parameter, {})
        # Some optimizers keep their step counter as a number.
        numbers = {k: as_tensor(v) for k, v in state.items() if isinstance(v, (int, float))}
        return number, numbers | {key: local_part(v) for key, v in state.items() if isinstance(v, Tensor)}

    def allocate_optimizer_state(
        self, shard: ParameterShard, known: dict[str, TensorStorageMetadata], *, same_dtype: bool
    ) -> dict[str, Tensor]:
        if not known:
            return {}
        parameter, number = self._site(shard.name)
        assert number is not None
        optimizer = self.optimizers()[number]
        group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
        on_device = bool(group.get("fused") or group.get("capturable"))
        scalars_on = parameter.device if on_device else torch.device("cpu")
        state = optimizer.state[parameter]
        if not state and (make := state_maker_of(optimizer)) is not None:
            state.update(make(parameter))
        for key, metadata in known.items():
            if key not in state or not isinstance(state[key], Tensor):
                state[key] = make_like(shard, parameter.detach(), key, metadata, scalars_on, same_dtype=same_dtype)
        return {key: local_part(state[key]) for key in known}

    def _site(self, name: str) -> tuple[nn.Parameter, int | None]:
        """What the optimizer of this parameter steps on, and its number; None: it is in no optimizer."""
        sizes = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in self.optimizers()]
        if self._sites is None or self._sizes != sizes:  # a hook may change the groups
            self.reshard()
            numbers = {id(p): i for i, o in enumerate(self.optimizers()) for g in o.param_groups for p in g["params"]}
            stepped = {name: self._stepped.get(id(p), p) for name, p in self.module.named_parameters()}
            self._sites = {name: (p, numbers.get(id(p))) for name, p in stepped.items()}
            self._sizes = sizes
        return self._sites[name]

    def module_optimizers(self) -> list[Optimizer]:
        """The optimizers as the module made them."""
        return list(self.optimizers())

    def stepped_names(self) -> dict[int, str]:
        """The id of what an optimizer steps on → the name of the parameter."""
        return self._names_of_sites()

    def _names_of_sites(self) -> dict[int, str]:
        self.reshard()  # a validation leaves whole weights in the module, which are in no group
        return {id(self._stepped.get(id(p), p)): name for name, p in self.module.named_parameters()}

    def group_names(self) -> list[list[list[str]]]:
        """The names of the parameters, for each optimizer and each of its groups."""
        names = self._names_of_sites()
        return [[[names[id(p)] for p in g["params"] if id(p) in names] for g in o.param_groups]
                for o in self.module_optimizers()]  # fmt: skip

    def of_all_stages(self, value: Any) -> list[Any]:
        return [value]

    def note_groups(self) -> None:
        """Note the groups that `configure_optimizers` has made."""
        self.made_groups = self.group_names()

    def group_members(self, names: list[str]) -> list[nn.Parameter]:
        """What an optimizer has of these parameters, for a group that a hook had made."""
        return [self._site(name)[0] for name in names]

    @property
    def keeps_whole_weights(self) -> bool:
        """Whether every rank has all weights, and what optimizers keep for them."""
        return self.tensor_parallel is None and not any(isinstance(p, DTensor) for p in self.module.parameters())

    def load_tensors(
        self, folder: Path, metadata: Metadata, group: dist.ProcessGroup | None, *, optimizers: bool, average: bool
    ) -> None:
        """Read weights and optimizer state from a checkpoint. Collective.

        `group`: the group for work on files. `average`: whether the run keeps an average of the weights.
        """
        if average:
            names = [name.partition(".") for name in metadata.state_dict_metadata]
            saved = self._parts({name for kind, _, name in names if kind == "average"})
            self.average = {name: torch.empty_like(part) for name, part in saved.items()}
        with torch.no_grad():
            restore(self, self.module, folder, metadata, group, optimizers=optimizers)
        self.refresh_low_precision_copies()


# Lightning's hooks about checkpoints. `TrainState` does the work.


class CheckpointHooks(Strategy):
    """Implements the checkpoint hooks of every strategy."""

    plan: Plan
    sharded: DTensorState
    state: TrainState  # collects and restores what is in a checkpoint

    def file_group(self) -> dist.ProcessGroup | None:
        """The group of all hosts for work on files."""
        raise NotImplementedError

    @property
    def planned_precision(self) -> PlannedPrecision:
        raise NotImplementedError

    def _end_setup(self) -> None:
        """Note what the run begins with, and read the weights of `init_from=` unless a checkpoint is resumed."""
        lines = []
        if self.state.is_training:
            self.sharded.note_groups()
            if self.sharded.left_out and self.plan.checkpoint.saves:
                left_out = first_of(sorted(self.sharded.left_out))
                lines = [f"checkpoints leave out {left_out}, as the module's state_dict does (strict_loading=False)"]
        if self.plan.init_from is not None and self.plan.resume is None:
            lines.append(f"weights: {read_initial(self.sharded, self.state.module, self.plan)}")
            self.sharded.refresh_low_precision_copies()
        if self.is_global_zero:
            print("".join(f"{line}\n" for line in lines), end="", flush=True)

    def on_train_start(self) -> None:
        self.state.changes.begin_training()
        super().on_train_start()

    def exchange_average(self) -> None:
        """Exchange the weights and their average in place, when no checkpoint is copied from them any more."""
        self.planned_precision.wait_for_checkpoint_copy()
        self.sharded.exchange_average()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint for `trainer.save_checkpoint`. Collective; waits until it is written."""
        with self.sharded.with_shards():  # a hook that saves may have whole weights
            self._save(checkpoint, Path(filepath))

    def _save(self, checkpoint: dict[str, Any], path: Path) -> None:
        content = self.state.pack(checkpoint | self.state.changes.found())
        exchanged = self.sharded.exchanged  # within an evaluation the module has the average
        if exchanged:
            self.exchange_average()
        try:
            publish(path, self.state.snapshot(content), TensorWriter(self.file_group()))
        except SaveError as error:
            raise OSError(f"{path} could not be written: {error}") from None
        finally:
            if exchanged:
                self.exchange_average()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self.state.load(Path(checkpoint_path))

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # set-up initialises the parameters, and would overwrite values loaded before

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Restore what hooks made of the optimizers' groups: `load_checkpoint` has restored the rest."""
        self.state.groups.restore()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # `state` saves the parameters

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Do nothing, since `load_checkpoint` has restored the weights."""
