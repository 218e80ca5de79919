"""What every strategy shares, so that they cannot disagree: initial weights, the loss scale, loaders, buffers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.checkpoint.chunks import slice_of
from shardwise.checkpoint.dcp import TensorWriter
from shardwise.checkpoint.metadata import read_metadata
from shardwise.checkpoint.plain import SHARD, Packed, pack
from shardwise.checkpoint.publish import SaveError, Snapshot, publish
from shardwise.checkpoint.state import (
    Held,
    apply_options,
    describe_optimizers,
    gather,
    kind_of,
    make_like,
    persistent_buffers,
    restore,
    shapes_of,
)
from shardwise.checkpoint.train_state import (
    _DEPTHS,
    _HYPERPARAMETERS,
    _NOT_SAVED,
    _UNLOADABLE,
    _in_words,
    _with_extra_state,
)
from shardwise.checkpoint.verify import load_own, load_rest
from shardwise.data.loaders import EvaluationLoader, TrainLoader
from shardwise.data.transfer import _TRANSFERS, _is_plain, _is_small_and_pinned
from shardwise.distributed.collectives import broadcast_from_rank_zero
from shardwise.distributed.dtensor import _whole, local_part
from shardwise.distributed.process_group import group_timeout
from shardwise.distributed.rng import derived_seed, random_state, seed_streams, set_random_state
from shardwise.errors import ConfigError, RunStopped, where
from shardwise.lightning_internals.counters import _in_micro_batches
from shardwise.lightning_internals.results import _unrecorded, log_on, logged_so_far
from shardwise.parallel.parallelize import parallelize
from shardwise.parallel.precision import Places, compute_in, dtype_of, map_tensors, owners, parameters_as
from shardwise.parallel.units import Units, find_units
from shardwise.plan import Plan
from shardwise.process.signals import asked
from shardwise.step.buffers import _in_a_row
from shardwise.step.precision_plugin import PlannedPrecision
from shardwise.step.record import Readback, Step, Tick
from shardwise.step.spikes import SPIKE_MINIMUM, SPIKE_WINDOW, robust_z
from shardwise.weights.init_from import read_initial


class PlannedStrategy(ParallelStrategy):
    """Mixed into one of Lightning's strategies: everything that is the same whatever is sharded."""

    plan: Plan
    units: Units
    train_loader: TrainLoader | None = None
    average: dict[str, Tensor] | None = None  # of the shards that `master_shards` gives, where `ema_decay` asks for it
    shows_parameters = True  # to the root, in the forward of `model`

    def _use(self, plan: Plan, precision: PlannedPrecision | None = None) -> None:
        self.plan = plan
        self.precision_plugin = precision or PlannedPrecision(plan)
        self._paddings: deque[bool] = deque()
        self._scale: Tensor | None = None
        self._losses: list[Tensor] = []
        self._statistics: list[tuple[list[Tensor], Tensor]] | None = None  # buffers, and what the window found in them
        self._training_step: Callable[..., Any] | None = None  # compiled, under compile=model
        self._copies: torch.cuda.Stream | None = None  # where batches come to the device
        self._transfer_hooks: set[str] | None = None  # that the module or its data has of its own
        self._spikes: list[Tensor] = []  # the losses before, on the device, where a spike is skipped
        self._zero: Tensor | None = None
        self._one: Tensor | None = None
        self._own: tuple[int, int, int] | None = None  # see `Step.own`; and the same on the device
        self._own_there = torch.empty(0)
        self._root_owners: list[Places] = []  # of parameters outside units of which each step makes copies
        self._places: dict[str, tuple[nn.Parameter, int]] | None = None  # parameters, and which optimizer has them
        self._shards: dict[int, nn.Parameter] = {}  # what an optimizer was given in place of a parameter, by its id
        self._files: dist.ProcessGroup | None = None
        self._closing: list[Callable[[], Any]] = []
        self._random: dict[str, Any] | None = None  # this rank's `own_state`, to go on with
        self._metrics: dict[str, Any] = {}  # of the last step before, to go on with
        self._before_validation: dict[str, Any] | None = None
        self._told: set[str] = set()  # keys that are not plain data
        self.missing: dict[str, str] = {}  # of the checkpoint that is resumed, and why
        self.rehearsed = True  # nothing that is put into a checkpoint raises
        self.before_training: Callable[[], None] | None = None  # when everything is in place
        self._begin: Tick | None = None  # of the step that is under way
        self._arrived: Tick | None = None
        self.skipped_steps = 0  # of this process
        self.stepped = False  # in this batch, by a module that optimizes by hand
        self.learning_rate = float("nan")  # of the last step's first parameter group

    # Set-up

    def _find_units(self, module: LightningModule) -> Units:
        plan = self.plan
        words = {"compile=layer": plan.compile == "layer",
                 "activation_checkpointing=full": plan.activation_checkpointing == "full"}  # fmt: skip
        needed_by = [word for word, given in words.items() if given]
        self.units = find_units(module, plan.units, needed_by)
        self.module_name = type(module).__name__  # FSDP2 gives it another
        if not any(p.requires_grad for p in module.parameters()) and self.plan.stage == "fit":
            raise ConfigError(f"{type(module).__name__} has no parameter that needs a gradient: nothing can be trained")
        gathers = plan.strategy.zero_stage == 3 or plan.strategy.name.startswith("fsdp")
        if self.is_global_zero and (gathers or needed_by or plan.units is not None):
            said = f"layers: {self.units}"
            if gathers and plan.units is None and self.units.share < 0.5:
                said += (
                    f"; the other {self.units.rest:,} are gathered as one piece; units=[Name] names layers to gather "
                    f"one by one, by their class"
                )
            print(said, flush=True)
        return self.units

    def _keeps_whole(self, parameter: nn.Parameter) -> bool:
        """Whether every rank holds all of it, and low-precision copies of it are made here."""
        return False

    def _parallelize(self, module: LightningModule, *, casts_inputs: bool) -> None:
        parallelize(module, self.units, self.plan, copied=self._keeps_whole, casts_inputs=casts_inputs)
        if self.plan.precision.is_mixed:
            self._copy_outside_units(module)
        if self.plan.precision.loss_scaling or self.plan.strategy.zero_stage:
            schedule_step = module.lr_scheduler_step

            def unless_skipped(*args: Any, **kwargs: Any) -> None:
                if not self.planned_precision.skipped:
                    schedule_step(*args, **kwargs)

            module.lr_scheduler_step = unless_skipped  # type: ignore[method-assign]

    def _copy_outside_units(self, module: LightningModule) -> None:
        """What lies outside units computes on copies, too: in each step or, where a module optimizes by hand, in each
        of its networks, which must look at its weights anew whenever it runs."""
        inside = [unit for _, unit in self.units.modules]
        if module.automatic_optimization:
            self._root_owners = owners(module, but=inside, of=self._keeps_whole)
            return
        dtype = dtype_of(self.plan.precision.compute_dtype)
        for child in self._roots(module):
            if child not in inside and (where := owners(child, but=inside, of=self._keeps_whole)):
                compute_in(child, dtype, where, cast_inputs=False)

    def _take_initial_weights(self) -> None:
        """`init_from=`: other weights than the seed's, at the end of set-up. A checkpoint brings its own."""
        module = self.lightning_module
        assert module is not None
        if self.plan.init_from is None or self.plan.resume is not None:
            return
        told = read_initial(self, module, self.plan)
        self.masters_changed()
        if self.is_global_zero:
            print(f"weights: {told}", flush=True)

    def _roots(self, module: LightningModule) -> list[nn.Module]:
        """What owns the parameters outside units. A module that optimizes by hand updates weights within its
        training_step: each of its networks must look at its own anew whenever it runs."""
        return [module] if module.automatic_optimization else list(module.children())

    @property
    def planned_precision(self) -> PlannedPrecision:
        assert isinstance(self.precision_plugin, PlannedPrecision)
        return self.precision_plugin

    def process_dataloader(self, dataloader: object) -> object:
        module = self.lightning_module
        assert module is not None
        rank = self.plan.topology.data_parallel_rank(self.global_rank)
        if module.trainer.state.stage != RunningStage.TRAINING:
            validating = module.trainer.state.stage == RunningStage.VALIDATING
            limit = self.plan.max_validation_batches if validating or self.plan.quick_check else None
            return EvaluationLoader(dataloader, self.plan, rank, self._paddings, limit, self._file_group)
        if self.train_loader is not None:
            raise ConfigError("several training loaders: a step is one global batch of one loader; combine the data")
        loss_weight = getattr(module, "loss_weight", None) if module.automatic_optimization else None
        flops = getattr(module, "flops", None)
        self.train_loader = TrainLoader(
            dataloader, self.plan, rank, self.root_device, loss_weight, flops, self._file_group
        )
        return self.train_loader

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._transfer_hooks is None:
            module = self.lightning_module
            assert module is not None
            hosts = [module, *([data] if (data := getattr(module.trainer, "datamodule", None)) else [])]
            self._transfer_hooks = {name for name in _TRANSFERS for host in hosts if is_overridden(name, host)}
        if "transfer_batch_to_device" not in self._transfer_hooks:
            batch = self._copied_beside(batch)
        if self._transfer_hooks or not _is_plain(batch):  # what is on the device already stays as it is
            batch = super().batch_to_device(batch, device, dataloader_idx)
        if self.train_loader is not None and self.train_loader.window_begins:
            self.train_loader.window_begins, self._arrived = False, Tick(self.root_device)
        return batch

    def _copied_beside(self, batch: Any) -> Any:
        """A batch of tensors, copied to the device; a large one while that still works on the step before."""
        if self.root_device.type != "cuda":
            return batch
        tensors: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            copied = tensor if tensor.is_cuda else tensor.to(self.root_device, non_blocking=True)
            tensors.append(copied)
            return copied

        if _is_plain(batch) and _is_small_and_pinned(batch):
            return map_tensors(copy, batch)
        self._copies = self._copies or torch.cuda.Stream(self.root_device)  # type: ignore[no-untyped-call]
        computing = torch.cuda.current_stream(self.root_device)
        with torch.cuda.stream(self._copies):
            batch = map_tensors(copy, batch)
        for tensor in tensors:
            tensor.record_stream(computing)
        computing.wait_stream(self._copies)
        return batch

    def teardown(self) -> None:
        while self._closing:
            self._closing.pop()()
        self._files = None
        module = self.lightning_module
        if module is None or not any(p.is_meta for p in module.parameters()):
            super().teardown()  # moves the module to the CPU: before it is made, that would hide the error that ends it

    hides_weights = False  # outside a forward: they are sharded, or what a hook writes into them may be lost

    @contextmanager
    def whole_parameters(self, hook: str) -> Iterator[None]:
        """Around a hook that looks at weights: they are there as under ddp. Collective."""
        yield

    # Every step goes through the root's forward, where a strategy shows the root its parameters

    def _step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None and self.model is not None
        method = self._method(name)
        if name == "training_step" and self.plan.compile == "model":
            self._training_step = method = self._training_step or torch.compile(method)

        def inside(*args: Any, **kwargs: Any) -> Any:
            with (
                self.planned_precision.forward_context()
            ):  # not around the call: DeepSpeed's engine switches autocast off
                return method(*args, **kwargs)

        if not self.shows_parameters:
            return inside(*args, **kwargs)
        module.__dict__["_planned_step"] = inside
        return self._forward_redirection(self.model, module, "_planned_step", *args, **kwargs)

    def _method(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self.lightning_module, name)
        if not self._root_owners:
            return method
        dtype = dtype_of(self.plan.precision.compute_dtype)

        def run(*args: Any, **kwargs: Any) -> Any:
            with parameters_as(self._root_owners, dtype):
                return method(*args, **kwargs)

        return run

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = self._step("training_step", *args, **kwargs)
        assert self.lightning_module is not None
        if loss is None and self.lightning_module.automatic_optimization:
            raise ConfigError(
                f"{self.module_name}.training_step returned None: every micro-batch needs a loss, "
                f"since the others of its step are weighed with it; return a loss of zero that depends on the weights"
            )
        if not self.lightning_module.automatic_optimization:
            self._end_batch_by_hand(loss)
        elif not is_overridden("backward", self.lightning_module):
            self._check_loss(loss)
        return loss

    def _check_loss(self, output: Any) -> None:
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, Tensor) and not loss.requires_grad:
            raise ConfigError(
                f"{self.module_name}.training_step returned a loss that has no gradient: it does not depend on the "
                f"parameters that are trained; look for detach(), torch.no_grad() or a new tensor made of its value, "
                f"or for parameters that are all frozen"
            )

    def _end_batch_by_hand(self, output: Any) -> None:
        """What a module that optimizes by hand returns is its loss, for the log and the guard."""
        loss = output.get("loss") if isinstance(output, dict) else output
        self._losses = []
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses = [local_part(loss).detach().reshape(()).float()]
        self.skipped_steps += self.planned_precision.end_batch_by_hand()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", *args, **kwargs)

    def _evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if not self._paddings.popleft():
            return self._step(name, *args, **kwargs)
        assert self.lightning_module is not None
        with _unrecorded(self.lightning_module):
            self._step(name, *args, **kwargs)
        return None

    def on_train_start(self) -> None:
        # Building and initialising drew from the same stream on every rank; dropout must not.
        consumed = 0 if self.train_loader is None else self.train_loader.consumed
        seed_streams(derived_seed(self.plan.seed, "training", self.global_rank, *([consumed] if consumed else [])))
        if self._random is not None:
            set_random_state(self._random, self.root_device)
        if self.train_loader is not None:
            self.train_loader.take_up((self._random or {}).get("stream"))
        held = [id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        if len(set(held)) < len(held) and self.plan.checkpoint.saves:
            raise ConfigError(
                f"{self.module_name}: a parameter is in two optimizers, and a checkpoint holds one state of each; give "
                f"it to one of them, or checkpoint=none"
            )
        if not self.lightning_module.automatic_optimization:  # type: ignore[union-attr]
            for optimizer in self.optimizers:
                optimizer.register_step_pre_hook(self.planned_precision.watch_step_by_hand)
                optimizer.register_step_post_hook(self._note_step)
        super().on_train_start()
        if self.plan.checkpoint.saves:
            self.rehearse_saving(last=False)
        if self.before_training is not None:
            self.before_training()

    # The window contract: one scale per micro-batch, before backward

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.plan.accumulate_grad_batches == 0:
            self._losses, self.stepped = [], False
            self._keep_statistics()
        assert self.train_loader is not None
        self._scale = self.train_loader.scales.popleft()
        super().on_train_batch_start(batch, batch_idx)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if closure_loss.numel() != 1:
            raise ConfigError(
                f"training_step returned a loss of shape {tuple(closure_loss.shape)}: it must be a scalar"
            )
        if isinstance(closure_loss, DTensor):
            raise self._weights_are_sharded()
        scaled = closure_loss if self._scale is None else closure_loss * self._scale.to(closure_loss.dtype)
        self._losses.append(scaled.detach().reshape(()))
        module = self.lightning_module
        assert module is not None
        if module.automatic_optimization and len(self._losses) == self.plan.accumulate_grad_batches:
            one = self._one_or_nan().to(scaled.dtype).reshape(scaled.shape)
            if self.plan.strategy.zero_stage or is_overridden("backward", module):
                scaled = scaled * one
            else:  # what backward starts from anyway, for three kernels less
                kwargs["gradient"] = one
        try:
            return super().backward(scaled, optimizer, *args, **kwargs)
        except RuntimeError as error:
            if "does not currently support double backward" not in str(error):
                raise
            raise ConfigError(
                f"{self.module_name} differentiates a gradient (create_graph=True), which torch.compile cannot: use "
                f"compile=none"
            ) from None

    def _one_or_nan(self) -> Tensor:
        """Not a number if the window's loss is none, or if the window is to be passed over: so are its gradients then,
        of every parameter on every rank, and one look at their norm tells all."""
        assert self.train_loader is not None
        loss = self._window_loss()
        if self._one is None:
            self._one = torch.ones_like(loss)
        one = torch.add(self._one, loss, alpha=0)
        precision = self.planned_precision
        precision.unwanted = None
        if self.plan.guard.on_spike == "skip":
            precision.unwanted = self._is_spike(loss)
            one = torch.where(precision.unwanted, torch.nan, one)
        if self.train_loader.window_start in self.plan.guard.pass_over:
            precision.unwanted = torch.ones((), dtype=torch.bool, device=one.device)
            one = one * torch.nan
        return one

    def _is_spike(self, loss: Tensor) -> Tensor:
        """As the guard judges on the host, here before it is too late. Collective."""
        loss = self._mean_of_ranks(loss)
        before, self._spikes = self._spikes, [*self._spikes[1 - SPIKE_WINDOW :], loss]
        if len(before) < SPIKE_MINIMUM:
            return torch.zeros_like(loss, dtype=torch.bool)
        return loss.isfinite() & (robust_z(loss, torch.stack(before)) > self.plan.guard.spike_z)

    def _weights_are_sharded(self) -> ConfigError:
        return ConfigError(
            f"{self.module_name}.training_step computes with weights outside the layers that own them, a penalty on "
            f"them, say: under {self.plan.strategy.name} each rank holds a shard there; use weight_decay, or "
            f"strategy=ddp, zero1 or zero2"
        )

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        self.learning_rate = float(optimizer.param_groups[0]["lr"])  # of this step: the schedule moves on after it
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        module = self.lightning_module
        if module is not None and module.automatic_optimization:
            optimizer.zero_grad(set_to_none=True)  # Lightning would keep them until after the next forward
            precision = self.planned_precision
            # Gradients that are not finite, of a loss that is: the loss scale was too large.
            precision.skipped = (
                precision.passed_over is True
                and self.plan.precision.loss_scaling
                and math.isfinite(self._mean_of_ranks(self._window_loss()).item())
                and not (precision.unwanted is not None and bool(precision.unwanted.item()))
            )
            if precision.skipped:
                precision.passed_over = False
                self._count_skipped(module)
            self._take_statistics_back()
        return result

    def _note_step(self, *_: Any) -> None:
        self.stepped = True

    def _keep_statistics(self) -> None:
        """Buffers that a forward may write to, a BatchNorm's averages say, as they are before a window."""
        module = self.lightning_module
        assert module is not None
        if self._statistics is None:
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            if module.automatic_optimization:
                for _, buffer in persistent_buffers(module):
                    by_dtype.setdefault(buffer.dtype, []).append(buffer)
            self._statistics = [(buffers, torch.empty(0)) for buffers in by_dtype.values()]
        self._statistics = [(buffers, _in_a_row(buffers)) for buffers, _ in self._statistics]

    def _take_statistics_back(self) -> None:
        """A step that is passed over leaves no trace in them either. Does not wait."""
        passed_over = self.planned_precision.passed_over
        if passed_over is False or not self._statistics:
            return
        for buffers, before in self._statistics:
            if isinstance(passed_over, Tensor):
                before = torch.where(passed_over > 0, before, _in_a_row(buffers))
            parts = torch.split(before, [buffer.numel() for buffer in buffers])
            with torch.no_grad():
                torch._foreach_copy_(buffers, [p.view_as(b) for p, b in zip(parts, buffers, strict=True)])

    def _window_loss(self) -> Tensor:
        """What this rank's micro-batches add up to, as they were differentiated."""
        return torch.stack(self._losses).sum() if len(self._losses) > 1 else self._losses[0]

    def _mean_of_ranks(self, loss: Tensor) -> Tensor:
        """Collective; does not wait."""
        loss = loss.to(torch.float64, copy=True)  # the reduction writes into it
        if dist.get_world_size() > 1:
            dist.all_reduce(loss)
        return loss / dist.get_world_size()

    def _count_skipped(self, module: LightningModule) -> None:
        """A step that changed nothing is none: Lightning, which counts it in a moment, is one behind from here."""
        self.skipped_steps += 1
        step = module.trainer.global_step + 1
        counters = module.trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
        counters.total.completed -= 1
        counters.current.completed -= 1
        if self.is_global_zero:
            print(f"step {step} skipped: its gradients are not finite; the loss scale is "
                  f"{self.planned_precision.loss_scale:g} now", flush=True)  # fmt: skip

    # What a step came to: see step/record.py

    def restart_clock(self) -> None:
        """What comes now is the next step's; what came since the last one was not."""
        self._begin = Tick(self.root_device)

    def finish_step(self, number: int) -> Step:
        """The window that has just ended, as step `number`; its numbers are on their way. Collective; does not wait."""
        loader, precision = self.train_loader, self.planned_precision
        module = self.lightning_module
        assert loader is not None and module is not None and self._begin is not None and self._arrived is not None
        if self._zero is None:
            self._zero = torch.zeros((), device=self.root_device)
        norm, passed_over = precision.gradient_norm, precision.passed_over
        loss = self._window_loss() if self._losses else self._zero
        if norm is not None and norm.device != loss.device:  # DeepSpeed's
            norm = torch.full_like(self._zero, norm.item())
        values = [loss, norm, passed_over if isinstance(passed_over, Tensor) else None, precision.unwanted]
        # Of one dtype, as they mostly are, one kernel
        numbers = torch.stack([self._zero if value is None else value for value in values])
        own = (loader.window_weight, loader.window_flops, asked.take())
        if dist.get_world_size() > 1:
            numbers = torch.cat([numbers, self._sums_of_ranks(loss, own)])
        step = Step(
            number=number,
            start=loader.window_start,
            learning_rate=self.learning_rate,
            loss_scale=precision.loss_scale,
            passed_over=None if isinstance(passed_over, Tensor) else passed_over,
            values=Readback(numbers),
            own=own,
            losses=self._losses,
            gradients=precision.gradients,
            begin=self._begin,
            arrived=self._arrived,
            fetching_seconds=loader.fetching_seconds,
        )
        self._begin, precision.unwanted = step.end, None
        return step

    def _sums_of_ranks(self, loss: Tensor, own: tuple[int, int, int]) -> Tensor:
        """Collective; does not wait."""
        if own != self._own:  # seldom: every step of a language model has as many tokens
            self._own = own
            self._own_there = torch.stack([torch.full_like(loss, n, dtype=torch.float64) for n in own])
        sums = torch.cat([loss.double().reshape(1), self._own_there])
        dist.all_reduce(sums)
        return sums

    def rewind(self, steps: int) -> bool:
        """Take the last `steps` back, in which no weight has changed: counters and training clock. Not beyond the
        begin of an epoch: False, and everything stays as it is."""
        assert self.lightning_module is not None and self.train_loader is not None
        loop = self.lightning_module.trainer.fit_loop.epoch_loop
        optimizer = loop.automatic_optimization.optim_progress.optimizer
        batches = steps * self.plan.accumulate_grad_batches
        if batches > loop.batch_progress.current.ready:
            return False
        for progress, count in ((loop.batch_progress, batches), (optimizer.step, steps), (optimizer.zero_grad, steps)):
            for counter in (progress.total, progress.current):
                for name in vars(counter):
                    setattr(counter, name, getattr(counter, name) - count)
        self.train_loader.consumed -= steps * self.plan.global_batch_size
        return True

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        # `self.log(..., sync_dist=True)` averages the ranks' batch sizes, and an integer mean of 7 and 6 would be 6.
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and reduce_op in ("mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]

    # Buffers: rank 0's, everywhere, before they are used or saved

    def on_validation_start(self) -> None:
        self.synchronize_buffers()
        self._before_validation = random_state(self.root_device) if self._is_training else None
        super().on_validation_start()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self._before_validation is not None:  # how often is validated changes nothing in training
            set_random_state(self._before_validation, self.root_device)

    def synchronize_buffers(self) -> None:
        assert self.lightning_module is not None
        with torch.no_grad():
            broadcast_from_rank_zero(list(self.lightning_module.buffers()))

    # Master weights, whatever is sharded: what an average, a test or a checkpoint works on

    def master_shards(self) -> dict[str, Tensor]:
        """This rank's part of every trainable master weight, by name: storage that can be read and written.

        Parts have any shape. Parameters of which this rank holds nothing are left out.
        """
        assert self.lightning_module is not None
        return {n: local_part(p.detach()) for n, p in self.lightning_module.named_parameters() if p.requires_grad}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Lightning's `trainer.save_checkpoint`. Collective; waits until it is written."""
        try:
            publish(Path(filepath), self.snapshot(self.pack(checkpoint)), TensorWriter(self._file_group()))
        except SaveError as error:
            raise OSError(f"{filepath} could not be written: {error}") from None

    def dump(self) -> Packed:
        """What Lightning and the hooks of module, data and callbacks put into a checkpoint, as it is now. Collective
        where a hook is."""
        assert self.lightning_module is not None
        connector = self.lightning_module.trainer._checkpoint_connector
        metrics = dict(self.lightning_module.trainer.callback_metrics)
        return self.pack({**connector.dump_checkpoint(weights_only=False), "metrics": metrics})

    def own_state(self) -> dict[str, Any]:
        """What is this rank's alone: where its random streams stand, and what it has logged."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        own = {"metrics": dict(trainer.callback_metrics), "logged": logged_so_far(trainer)} if self._is_training else {}
        return random_state(self.root_device) | own

    def take_up_logged(self) -> None:
        """Of the run that is resumed: what ReduceLROnPlateau looks at, and means over the epoch that is under way."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        trainer._logger_connector._callback_metrics.update(self._metrics)
        if trainer.fit_loop.restarted_mid_epoch and self._random is not None:
            log_on(trainer, self._random.get("logged", {}))

    def pack(self, checkpoint: dict[str, Any]) -> Packed:
        """Copied, on rank 0, which writes it. Says which keys are not plain data, once."""
        assert self.lightning_module is not None
        if not self.is_global_zero:
            return Packed()
        data = getattr(self.lightning_module.trainer, "datamodule", None)
        packed = pack(
            {key: value for key, value in checkpoint.items() if key not in _NOT_SAVED},
            {**_DEPTHS, type(data).__qualname__: 1},
            quiet=_HYPERPARAMETERS,
        )
        if new := [left for left in packed.left_out if left.name not in self._told]:
            self._told |= {left.name for left in new}
            print(f"checkpoints: {_in_words(new)}", flush=True)
        return packed

    def rehearse_saving(self, *, last: bool) -> None:
        """What the hooks give is looked at before anything depends on it. Not the `last` time, a hook may raise: what
        it needs may be made by the first step."""
        self.rehearsed = True
        try:
            shards = [left for left in self.dump().left_out if not left.pickled and left.kind == SHARD]
        except Exception as error:
            if last:
                raise
            self.rehearsed = False
            if self.is_global_zero:
                print(
                    f"checkpoints: before the first step nothing can be saved: {where(error)}; if the hook raises this "
                    f"after the first step, too, the run ends there",
                    flush=True,
                )
            return
        if shards:
            raise ConfigError(
                f"{', '.join(left.name for left in shards)}: a checkpoint cannot keep a shard that one rank holds, and "
                f"a run that goes on would be without it: make whole tensors in a hook, on_fit_start say, where "
                f"weights are whole, or use ema_decay= or strategy=ddp"
            )

    def snapshot(self, checkpoint: Packed, own: dict[str, Any] | None = None) -> Snapshot:
        """Everything that a checkpoint holds, as it is: what changes later must be copied first. Collective.

        `checkpoint`: from `dump`. `own`: from `own_state`, if not as it is now.
        """
        module, loader = self.lightning_module, self.train_loader
        assert module is not None
        self.synchronize_buffers()
        training = self._is_training
        rest = {
            "accumulate_grad_batches": self.plan.accumulate_grad_batches,
            "optimizers": describe_optimizers(self._own_optimizers(), self._group_names()) if training else [],
            "loss_scale": self._loss_scale_state(),
            "layers": {name: m.get_extra_state() for name, m in _with_extra_state(module)},
            "gradient_order": self._gradient_order(),
        }
        about = {
            "step": module.trainer.global_step,
            "samples": 0 if loader is None else loader.consumed,
            "strategy": self.plan.strategy.name,
            "precision": self.plan.precision.name,
        }
        # What no optimizer steps on may be written to at any time: a buffer, a momentum encoder
        stepped = {name for of_optimizer in self._group_names() for of_group in of_optimizer for name in of_group}
        volatile = frozenset(
            f"model.{name}" for name in shapes_of(module) if name not in stepped or not module.automatic_optimization
        )
        own = self.own_state() if own is None else own
        if loader is not None and (position := loader.position()) is not None:
            own = {**own, "stream": position}
        tensors = gather(self, module, training)
        return Snapshot(tensors, checkpoint | self.pack(rest), pack(own, {}), about, volatile)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Tensors into their places; Lightning's own words are returned for it to take up. Collective."""
        folder, module = Path(checkpoint_path), self.lightning_module
        assert module is not None
        with self._loading():
            rest, missing = load_rest(folder, self.plan.trust)
            self._read_all_but(missing)
            training = self._is_training
            mine = self._own_optimizers() if training else []
            optimizers = training and self._takes_up(rest["optimizers"], mine)
            metadata = read_metadata(folder)  # once: that of many ranks is large
            averages = any(name.startswith("average.") for name in metadata.state_dict_metadata)
            if self.plan.ema_decay is not None and not averages:
                raise ConfigError(
                    f"ema_decay={self.plan.ema_decay}: {folder} holds no average; give ema_decay=null, or a checkpoint "
                    f"that was written with one"
                )
            self._load_tensors(folder, metadata, optimizers)
            for name, layer in _with_extra_state(module):
                if name in rest["layers"]:
                    layer.set_extra_state(rest["layers"][name])
            if optimizers:
                apply_options(mine, self._group_names(), rest["optimizers"])
                self._load_loss_scale(rest["loss_scale"])
            if training:
                _in_micro_batches(rest["loops"], rest["accumulate_grad_batches"], self.plan.accumulate_grad_batches)
                self._random, missing = load_own(folder, self.plan.trust)
                self._read_all_but(missing)
                self._metrics = {**rest.pop("metrics", {}), **(self._random or {}).get("metrics", {})}
        return {**rest, "state_dict": {}, "optimizer_states": []}

    def _read_all_but(self, missing: dict[str, str]) -> None:
        if not missing:
            return
        self.missing |= missing
        if not self.is_global_zero:
            return
        untrusted = {} if self.plan.trust else {key: kind for key, kind in missing.items() if ": " not in kind}
        for why, keys in (
            ("they are pickles, and reading a pickle runs any code that is in it; trust=true reads them", untrusted),
            ("they cannot be read", {key: kind for key, kind in missing.items() if key not in untrusted}),
        ):
            if keys:
                listed = ", ".join(f"{key} ({kind})" for key, kind in keys.items())
                print(f"resume: left out of the checkpoint's content: {listed}: {why}", flush=True)

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Around the hooks that take up a checkpoint: one that misses a key says why the key is not there.

        Raises:
            ConfigError
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
                f"resume={self.plan.resume}: {where(error)}. The checkpoint's content came without "
                f"{', '.join(self.missing)}, which are not plain data{remedy}"
            ) from error

    def _load_tensors(self, folder: Path, metadata: Metadata, optimizers: bool) -> None:
        module = self.lightning_module
        assert module is not None
        if self.plan.ema_decay is not None:
            self.average = {name: torch.empty_like(shard) for name, shard in self.master_shards().items()}
        with torch.no_grad():
            restore(self, module, folder, metadata, self._file_group(), optimizers=optimizers)
        self.masters_changed()

    def _takes_up(self, saved: list[dict[str, Any]], mine: list[Optimizer]) -> bool:
        """Whether the optimizers' state is of use here.

        Raises:
            ConfigError: it is another optimizer's, and nobody has said that it may be left behind.
        """
        there, here = [one["kind"] for one in saved], [kind_of(optimizer) for optimizer in mine]
        told = None
        if there != here:
            told = f"its optimizer state is of {', '.join(there) or 'none'}, and this run has {', '.join(here)}"
        else:
            before = [{name for group in one["groups"] for name in group["names"]} for one in saved]
            now = [{name for group in one for name in group} for one in self._group_names()]
            moved = sorted(set().union(*now) & set().union(*before) - set().union(*map(set.intersection, now, before)))
            if moved:
                told = f"{', '.join(moved[:4])} had another of its optimizers; give them in the same order"
        if told is None:
            return True
        if "optimizer" not in self.plan.resume_allow:
            raise ConfigError(f"resume={self.plan.resume}: {told}; resume_allow=[optimizer] leaves their state behind")
        return False

    # Where what a checkpoint holds is: see checkpoint/state.py

    def held(self) -> Iterator[Held]:
        assert self.lightning_module is not None
        for name, p in self.lightning_module.named_parameters():
            yield Held(name, tuple(p.shape), local_part(p.detach()), partial(slice_of, p), p.requires_grad)

    def state_of(self, held: Held) -> tuple[int, dict[str, Tensor]]:
        parameter, number = self._trained_by(held.name)
        state = self.optimizers[number].state.get(parameter, {})
        numbers = {k: torch.tensor(float(v)) for k, v in state.items() if isinstance(v, (int, float))}  # a step, say
        return number, numbers | {key: local_part(v) for key, v in state.items() if isinstance(v, Tensor)}

    def make_state(self, held: Held, known: dict[str, TensorStorageMetadata]) -> dict[str, Tensor]:
        if not known:  # in no optimizer, say
            return {}
        parameter, number = self._trained_by(held.name)
        optimizer = self.optimizers[number]
        group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
        on_device = bool(group.get("fused") or group.get("capturable"))
        scalars_on = parameter.device if on_device else torch.device("cpu")
        state = optimizer.state[parameter]
        for key, metadata in known.items():
            if key not in state or not isinstance(state[key], Tensor):
                state[key] = make_like(held, parameter.detach(), key, metadata, scalars_on)
        return {key: local_part(state[key]) for key in known}

    def _trained_by(self, name: str) -> tuple[nn.Parameter, int]:
        if self._places is None:
            assert self.lightning_module is not None
            numbers = {id(p): i for i, o in enumerate(self.optimizers) for g in o.param_groups for p in g["params"]}
            parameters = self.lightning_module.named_parameters()
            # What no optimizer has been given keeps nothing in any.
            stepped = {name: self._shards.get(id(p), p) for name, p in parameters}
            self._places = {name: (p, numbers.get(id(p), 0)) for name, p in stepped.items()}
        return self._places[name]

    def _own_optimizers(self) -> list[Optimizer]:
        """As the module made them."""
        return list(self.optimizers)

    def _group_names(self) -> list[list[list[str]]]:
        """Per optimizer and group: its parameters."""
        assert self.lightning_module is not None
        names = {id(self._shards.get(id(p), p)): name for name, p in self.lightning_module.named_parameters()}
        return [[[names[id(p)] for p in g["params"] if id(p) in names] for g in o.param_groups]
                for o in self._own_optimizers()]  # fmt: skip

    def _loss_scale_state(self) -> dict[str, float]:
        scaler = self.planned_precision.scaler
        if scaler is None:
            return {}
        state = scaler.state_dict()
        return {"scale": float(state["scale"]), "good_steps": int(state["_growth_tracker"])}

    def _load_loss_scale(self, saved: dict[str, float]) -> None:
        scaler = self.planned_precision.scaler
        if scaler is not None and saved:
            state = scaler.state_dict() | {"scale": saved["scale"], "_growth_tracker": int(saved["good_steps"])}
            scaler.load_state_dict(state)

    def _gradient_order(self) -> list[int]:
        """In which gradients come, where that decides what is summed with what."""
        return []

    def _file_group(self) -> dist.ProcessGroup | None:
        """For the coordination of files, which is the hosts'."""
        if self.world_size > 1 and self._files is None:
            self._files = dist.new_group(backend="gloo", timeout=group_timeout(self.plan))
            self.at_teardown(partial(dist.destroy_process_group, self._files))
        return self._files

    def at_teardown(self, close: Callable[[], Any]) -> None:
        """When the Trainer is through, also after an error: a thread that outlives the interpreter would abort it."""
        self._closing.append(close)

    @property
    def _is_training(self) -> bool:
        assert self.lightning_module is not None
        return bool(self.lightning_module.trainer.state.fn == TrainerFn.FITTING)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # setup makes the parameters: what was loaded before would be initialised over

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False  # load_checkpoint does

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # `snapshot` knows where everything is

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """load_checkpoint has."""

    @contextmanager
    def _loading(self) -> Iterator[None]:
        try:
            yield
        except CheckpointException as error:
            raise self._unloadable(next(iter(error.failures.values()))[0]) from None
        except _UNLOADABLE as error:
            raise self._unloadable(error) from None

    def _unloadable(self, error: BaseException) -> ConfigError:
        said = " ".join(str(error).split())[:300] or type(error).__name__
        return ConfigError(
            f"resume={self.plan.resume} cannot be loaded: {said}; it is damaged, or of another model or strategy"
        )

    def masters_changed(self) -> None:
        """Tell the strategy that `master_shards` were written to."""

    def full_parameters(self) -> dict[str, Tensor]:
        """Whole master weights on the CPU, on every rank: for tests and small models. Collective."""
        assert self.lightning_module is not None
        return {n: _whole(p.detach()).cpu().clone() for n, p in self.lightning_module.named_parameters()}


def strategy_of(trainer: Trainer) -> PlannedStrategy:
    """Every Trainer made here has one."""
    assert isinstance(trainer.strategy, PlannedStrategy)
    return trainer.strategy
