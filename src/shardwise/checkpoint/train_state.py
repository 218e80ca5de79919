"""Takes a run's state for a checkpoint, and restores it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from shardwise.checkpoint.dcp import read_metadata
from shardwise.checkpoint.encoding import SHARD
from shardwise.checkpoint.files import load_own, load_rest
from shardwise.checkpoint.optimizers import (
    HookGroups,
    describe_state,
    moved_on,
    restore_own,
    restore_state,
    takes_optimizers,
    tell_kept,
    tell_left_callbacks,
)
from shardwise.checkpoint.plain import Packed, describe_left_out, pack
from shardwise.checkpoint.publish import Snapshot
from shardwise.checkpoint.state import ShardedState, gather, layers_with_extra_state, persistent_buffers, shapes_of
from shardwise.distributed.rng import random_state
from shardwise.errors import ConfigError, RunStopped, describe_error
from shardwise.lightning_internals.loops import count_in_other_micro_batches, training_modes
from shardwise.lightning_internals.patches import dump_checkpoint
from shardwise.lightning_internals.results import logged_so_far, restore_callback_metrics, restore_logged
from shardwise.plan import Plan

# torch raises these for a checkpoint that is cut short, holds code, or has other weights
_UNLOADABLE = (EOFError, OSError, RuntimeError, ValueError, LookupError, AssertionError, UnpicklingError,
               CheckpointException)  # fmt: skip

# Keys of Lightning's checkpoint that are not saved: tensors have files of their own, and a class is no data
_NOT_SAVED = ("state_dict", "optimizer_states", "hparams_type", "datamodule_hparams_type")
# These repeat the config, and no run needs them in order to go on: values that are not plain data are dropped silently
_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
# Down to this level of dicts, a key that is not plain data is left out by itself
_DEPTHS = {"loops": 9, "optimizers": 9, "callbacks": 2, "lr_schedulers": 2, "layers": 1,
           **dict.fromkeys(_HYPERPARAMETERS, 1)}  # fmt: skip


class Loader(Protocol):
    """What a checkpoint needs of the training data's loader."""

    consumed: int  # the samples that all ranks together have consumed

    def position(self) -> dict[str, Any] | None:
        """Where a stream stands; None: the count of samples is enough to go on."""


class LossScale(Protocol):
    """What a checkpoint needs of the precision plugin."""

    def loss_scale_state(self) -> dict[str, float]:
        """What loss scaling needs in order to go on; empty where there is no scaling."""

    def load_loss_scale(self, saved: dict[str, float]) -> None: ...


class TrainState:
    """Takes everything that a run needs in order to go on, and restores it.

    `loader` returns the training data's loader, once it is made. `file_group` returns the process group that
    coordinates files. `synchronize_buffers` makes the buffers the same on every rank. `gradient_order` returns the
    order in which gradients become ready, where that decides which gradients are summed together.
    """

    def __init__(
        self,
        plan: Plan,
        module: LightningModule,
        device: torch.device,
        sharded: ShardedState,
        precision: LossScale,
        *,
        loader: Callable[[], Loader | None],
        file_group: Callable[[], dist.ProcessGroup | None],
        synchronize_buffers: Callable[[], None],
        gradient_order: Callable[[], list[int]],
    ) -> None:
        self.plan, self.module, self.device = plan, module, device
        self.sharded, self.precision = sharded, precision
        self.loader, self.file_group = loader, file_group
        self.synchronize_buffers, self.gradient_order = synchronize_buffers, gradient_order
        self.changes, self.groups = ModuleChanges(module, sharded.of_all_stages), HookGroups(sharded)
        self.rehearsed = True  # whether every hook that adds to a checkpoint has run without an error
        self._windows = 0  # those that have ended in this process
        self.missing: dict[str, str] = {}  # the keys that the resumed checkpoint came without, and why
        self.of_rank: dict[str, Any] | None = None  # this rank's `own_state` from the resumed checkpoint
        self._metrics: dict[str, Any] = {}  # the metrics of the last step before the resumed checkpoint
        self._reported: set[str] = set()  # keys that are not plain data and that the user was told of

    @property
    def is_training(self) -> bool:
        return bool(self.module.trainer.state.fn == TrainerFn.FITTING)

    def dump(self) -> Packed:
        """Copy what Lightning and the hooks put into a checkpoint now. It is collective if one of the hooks is."""
        trainer = self.module.trainer
        return self.pack(dump_checkpoint(trainer) | {"metrics": dict(trainer.callback_metrics)} | self.changes.found())

    def own_state(self) -> dict[str, Any]:
        """The state that this rank does not share: where its random streams stand, and what it has logged."""
        trainer = self.module.trainer
        own = {"metrics": dict(trainer.callback_metrics), "logged": logged_so_far(trainer)} if self.is_training else {}
        return random_state(self.device) | own

    def pack(self, checkpoint: dict[str, Any]) -> Packed:
        """Copy `checkpoint` on rank 0, which writes it. Print once which keys are not plain data."""
        if dist.get_rank() != 0:
            return Packed()
        data = getattr(self.module.trainer, "datamodule", None)
        packed = pack(
            {key: value for key, value in checkpoint.items() if key not in _NOT_SAVED},
            {**_DEPTHS, type(data).__qualname__: 1},
            quiet=_HYPERPARAMETERS,
        )
        if new := [left for left in packed.left_out if left.name not in self._reported]:
            self._reported |= {left.name for left in new}
            print(f"checkpoints: {describe_left_out(new)}", flush=True)
        return packed

    def rehearse(self, *, last: bool) -> None:
        """Try the hooks that add to a checkpoint before a save depends on them.

        A hook may need something that the first step makes, so its error counts only the `last` time.

        Raises:
            ConfigError: a hook returns a shard of a tensor.
        """
        self.rehearsed = True
        try:
            shards = [left for left in self.dump().left_out if not left.pickled and left.kind == SHARD]
        except Exception as error:
            if last:
                raise
            self.rehearsed = False
            if dist.get_rank() == 0:
                print(
                    f"checkpoints: before the first step nothing can be saved: {describe_error(error)}; if the hook "
                    f"raises this after the first step, too, the run ends there",
                    flush=True,
                )
            return
        if shards:
            raise ConfigError(
                f"{', '.join(left.name for left in shards)}: a checkpoint cannot keep a shard that one rank holds, and "
                f"a run that goes on would be without it: make whole tensors in a hook, on_fit_start say, where "
                f"weights are whole, or use ema_decay= or strategy=ddp"
            )

    def rehearse_after_step(self) -> None:
        """At the end of a window, see that the optimizers' state can be saved, and what failed in `rehearse`.

        An optimizer may begin to keep something after some steps: the first windows are looked at, ever fewer of them.

        Raises:
            ConfigError: a checkpoint cannot have all that an optimizer keeps.
        """
        if not self.rehearsed:
            self.rehearse(last=True)
        self._windows += 1
        if self.plan.checkpoint.saves and self._windows in (1, 2, 4, 8, 16, 32, 64):
            gather(self.sharded, self.module, self.is_training)
            describe_state(self.sharded)

    def snapshot(self, checkpoint: Packed, own: dict[str, Any] | None = None) -> Snapshot:
        """Everything that a checkpoint holds. Its tensors are not copied: copy them before they change. Collective.

        `checkpoint`: from `dump`. `own`: from an earlier `own_state`; None takes the state as it is now.
        """
        module, loader, names = self.module, self.loader(), self.sharded.group_names()
        self.synchronize_buffers()
        rest = {
            "accumulate_grad_batches": self.plan.accumulate_grad_batches,
            "optimizers": describe_state(self.sharded) if self.is_training else [],
            "loss_scale": self.precision.loss_scale_state(),
            "layers": {name: layer.get_extra_state() for name, layer in layers_with_extra_state(module)},
            "gradient_order": self.gradient_order(),
        }
        about = {
            "step": module.trainer.global_step,
            "samples": 0 if loader is None else loader.consumed,
            "strategy": self.plan.strategy.name,
            "precision": self.plan.precision.name,
        }
        # A tensor that no optimizer trains, such as a buffer or a momentum encoder, may be written to at any time
        stepped = {name for optimizer_names in names for group_names in optimizer_names for name in group_names}
        volatile = frozenset(
            f"model.{name}" for name in shapes_of(module) if name not in stepped or not module.automatic_optimization
        )
        own = self.own_state() if own is None else own
        if loader is not None and (position := loader.position()) is not None:
            own = {**own, "stream": position}
        tensors = gather(self.sharded, module, self.is_training)
        return Snapshot(tensors, checkpoint | self.pack(rest), pack(own, {}), about, volatile)

    def load(self, folder: Path) -> dict[str, Any]:
        """Read the tensors into the module and its optimizers, and return the rest for Lightning. Collective.

        Raises:
            ConfigError: the checkpoint is damaged, or of another model or optimizer.
        """
        self.loaded_from = folder
        with self.loading():
            rest, missing = load_rest(folder, self.plan.trust)
            self._note_missing(missing)
            optimizers = self.is_training and takes_optimizers(self.plan, self.sharded, rest["optimizers"])
            metadata = read_metadata(folder)  # it is read once and handed on: that of many ranks is large
            averages = any(name.startswith("average.") for name in metadata.state_dict_metadata)
            if (average := self.plan.ema_decay is not None) and not averages:
                raise ConfigError(
                    f"ema_decay={self.plan.ema_decay}: {folder} holds no average; give ema_decay=null, or a checkpoint "
                    f"that was written with one"
                )
            self.changes.take(rest.get("module_changes", {}), metadata, self.device)
            if optimizers:
                self.groups.make(rest["optimizers"])
                restore_own(self.sharded, rest["optimizers"])
            self.sharded.load_tensors(folder, metadata, self.file_group(), optimizers=optimizers, average=average)
            for name, layer in layers_with_extra_state(self.module):
                if name in rest["layers"]:
                    layer.set_extra_state(rest["layers"][name])
            if optimizers:
                restore_state(self.sharded, rest["optimizers"])
                self.precision.load_loss_scale(rest["loss_scale"])
                tell_kept(self.plan, self.sharded.module_optimizers())
                self.groups.put_aside()
            if self.is_training:
                tell_left_callbacks(rest.get("callbacks", {}), self.module.trainer)
                if not optimizers:
                    rest["lr_schedulers"] = moved_on(self.module.trainer.lr_scheduler_configs, rest["lr_schedulers"])
                before, now = rest["accumulate_grad_batches"], self.plan.accumulate_grad_batches
                count_in_other_micro_batches(rest["loops"], before, now)
                self.of_rank, missing = load_own(folder, dist.get_rank(), self.plan.trust)
                self._note_missing(missing)
                self._metrics = {**rest.pop("metrics", {}), **(self.of_rank or {}).get("metrics", {})}
        return {**rest, "state_dict": {}, "optimizer_states": []}

    def take_up_logged(self) -> None:
        """Restore what the resumed run had logged: for ReduceLROnPlateau, and for means over the epoch under way."""
        trainer = self.module.trainer
        restore_callback_metrics(trainer, self._metrics)
        if trainer.fit_loop.restarted_mid_epoch and self.of_rank is not None:
            restore_logged(trainer, self.of_rank.get("logged", {}))

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Wrap the hooks that restore a checkpoint: if one fails, the message says which keys are missing and why.

        Raises:
            ConfigError: a hook has failed, and the checkpoint's content came without some keys.
        """
        try:
            yield
        except RunStopped:
            raise
        except Exception as error:
            if not self.missing:
                raise
            remedy = "" if self.plan.trust else "; trust=true reads them: do so where you trust whoever wrote them"
            raise ConfigError(
                f"resume={self.plan.resume}: {describe_error(error)}. The checkpoint's content came without "
                f"{', '.join(self.missing)}, which are not plain data{remedy}"
            ) from error

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Turn what torch raises for a damaged file into a ConfigError."""
        try:
            yield
        except CheckpointException as error:
            raise self._unloadable(next(iter(error.failures.values()))[0]) from None
        except _UNLOADABLE as error:
            raise self._unloadable(error) from None

    def _unloadable(self, error: BaseException) -> ConfigError:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        return ConfigError(
            f"resume={self.plan.resume} cannot be loaded: {reason}; it is damaged, or of another model or strategy"
        )

    def _note_missing(self, missing: dict[str, str]) -> None:
        if not missing:
            return
        self.missing |= missing
        if dist.get_rank() != 0:
            return
        untrusted = {} if self.plan.trust else {key: kind for key, kind in missing.items() if ": " not in kind}
        for why, keys in (
            ("they are pickles, and reading a pickle runs any code that is in it; trust=true reads them", untrusted),
            ("they cannot be read", {key: kind for key, kind in missing.items() if key not in untrusted}),
        ):
            if keys:
                listed = ", ".join(f"{key} ({kind})" for key, kind in keys.items())
                print(f"resume: left out of the checkpoint's content: {listed}: {why}", flush=True)


# What hooks change of a module in the course of a run besides its numbers: which weights are trained, the modes of
# layers, the shapes of buffers.
#
# A checkpoint has what differs from the beginning of the run. A run that goes on begins as its own code says, and is
# then changed in the same way: so it equals the run that was saved, and what its code does otherwise by now holds.

_OF_BATCH_NORM = "track_running_stats"  # whoever freezes a BatchNorm sets it


class ModuleChanges:
    """Compares a module with itself at the beginning of the run, and makes the changes of a checkpoint again."""

    def __init__(self, module: LightningModule, gather: Callable[[Any], list[Any]]) -> None:
        """Call it before a hook of the run has changed a buffer.

        `gather`: gives the parts of all ranks that have different layers.
        """
        self.module, self.gather = module, gather
        self._shapes = _shapes(module)
        self._flags: dict[str, dict[str, bool]] = {}
        self._saved: Mapping[str, Any] = {}  # those of the checkpoint that the run goes on from

    def begin_training(self) -> None:
        """Note what holds before the first step, and set what a checkpoint has otherwise."""
        self._flags = self._flags_now()
        parameters, layers = dict(self.module.named_parameters()), dict(self.module.named_modules())
        for name, needs in self._saved.get("requires_grad", {}).items():
            if name in parameters:
                parameters[name].requires_grad_(needs)
        for flag in ("training", _OF_BATCH_NORM):
            for name, value in self._saved.get(flag, {}).items():
                if name in layers:
                    setattr(layers[name], flag, value)

    def found(self) -> dict[str, Any]:
        """What differs now, for a checkpoint: kind → name → value; of buffers, the shape that each began with.

        Collective in a pipeline.
        """
        now, shapes = self._flags_now() if self._flags else {}, _shapes(self.module)
        changed: dict[str, dict[str, Any]] = {
            kind: {name: value for name, value in flags.items() if self._flags[kind].get(name, value) != value}
            for kind, flags in now.items()
        }
        # A stage of a pipeline has not all of the buffers any more that the module began with
        changed["buffers"] = {n: self._shapes.get(n) for n, shape in shapes.items() if self._shapes.get(n) != shape}
        parts = self.gather(changed)
        merged = {kind: {k: v for part in parts for k, v in part[kind].items()} for kind in changed}
        return {"module_changes": merged}

    def _flags_now(self) -> dict[str, dict[str, bool]]:
        layers = self.module.named_modules()
        return {
            "requires_grad": {name: p.requires_grad for name, p in self.module.named_parameters()},
            "training": training_modes(self.module.trainer),
            _OF_BATCH_NORM: {name: getattr(layer, _OF_BATCH_NORM) for name, layer in layers
                             if hasattr(layer, _OF_BATCH_NORM)},
        }  # fmt: skip

    def take(self, saved: Mapping[str, Any], metadata: Metadata, device: torch.device) -> None:
        """Take the changes of a checkpoint: give buffers that begin as they did there the shapes that they have there.

        `metadata`: the checkpoint's.
        """
        self._saved = saved
        layers = dict(self.module.named_modules())
        for name, began in saved.get("buffers", {}).items():
            known: Any = metadata.state_dict_metadata.get(f"model.{name}")
            layer, _, key = name.rpartition(".")
            if (
                known is None
                or layer not in layers
                or self._shapes.get(name) != (None if began is None else tuple(began))
            ):
                continue  # the code is another by now, and names and shapes are compared as ever
            before = layers[layer]._buffers.get(key)
            dtype = known.properties.dtype if before is None else before.dtype
            layers[layer]._buffers[key] = torch.empty(known.size, dtype=dtype, device=device)


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(buffer.shape) for name, buffer in persistent_buffers(module)}
