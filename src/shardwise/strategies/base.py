"""Lightning's hooks, the same under every strategy.

Each hook calls the room that does the work: `step/` makes one optimizer step, `checkpoint/` saves and restores a run's
state, `data/` gives batches, `parallel/` prepares layers. A strategy says how parameters are sharded, and overrides the
hooks that it implements differently.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint.files import load_own
from shardwise.checkpoint.train_state import TrainState
from shardwise.data.evaluation import EvaluationLoader
from shardwise.data.loaders import BatchTransfer, TrainLoader, weigher_of
from shardwise.distributed.mesh import Closing, Mesh, gather_metrics_among, sum_over
from shardwise.distributed.rng import derived_seed, seed_streams, set_random_state
from shardwise.errors import ConfigError
from shardwise.lightning_internals.padding import Evaluation
from shardwise.lightning_internals.results import step_logging
from shardwise.optim.optimizers import check_one_owner, order_alike, step_schedules_unless
from shardwise.parallel.activation_checkpointing import explain, without_caches
from shardwise.parallel.parallelize import copy_outside_units, parallelize, prepare_float8
from shardwise.parallel.precision import cast_late_layers
from shardwise.parallel.units import Units, units_for
from shardwise.plan import Plan
from shardwise.protocols import flops_of
from shardwise.step.precision_plugin import PlannedPrecision
from shardwise.step.verdict import StepVerdict
from shardwise.step.window import StepForward, check_output
from shardwise.strategies.refusals import CollectiveOrder, refuse_loaders_together, refuse_parameters
from shardwise.strategies.sharded_state import CheckpointHooks, DTensorState
from shardwise.strategies.step_state import StepState
from shardwise.strategies.weights_in_hooks import WeightsInHooks
from shardwise.strategies.whole_weights import check_loss
from shardwise.weights.initialize import refuse_unfilled

if TYPE_CHECKING:  # not every run has these
    from shardwise.parallel.float8 import Float8Layers
    from shardwise.parallel.tensor_parallel import TensorParallel
    from shardwise.strategies.shared_batches import SharedBatches


class PlannedStrategy(CheckpointHooks, ParallelStrategy):
    """The hooks that are the same under every strategy. Each strategy mixes them into one of Lightning's."""

    runs_inside_forward = True  # whether a step must run inside the forward of the wrapped module
    weights_class: type[WeightsInHooks] = WeightsInHooks  # what hooks see of weights
    scales_by_gradient = True  # whether the backward pass may start from another gradient than 1
    train_loader: TrainLoader | None = None
    float8: Float8Layers | None  # the layers that multiply in fp8
    shared: SharedBatches | None  # where ranks share batches
    sharded: DTensorState  # finds parameters and optimizer state

    def _use(
        self,
        plan: Plan,
        precision: Callable[[Plan, StepVerdict], PlannedPrecision] = PlannedPrecision,
    ) -> None:
        self.plan, self.mesh = plan, Mesh(plan)
        self.weights, self.float8 = self.weights_class(self), None
        self.step = StepState(plan, self.mesh)
        self.order = CollectiveOrder(plan, lambda: self.module_name, self.file_group)
        self.precision_plugin = precision(plan, self.step.verdict)
        self.evaluation, self.shared = Evaluation(), None
        gather_metrics_among(None)  # an earlier run of this process may have had other groups
        self.closing = Closing(plan)

    # Set-up

    def _begin_setup(self, module: LightningModule) -> None:
        """Do the part of the set-up that does not depend on how the module is sharded."""
        self.module_name = type(module).__name__  # kept, since FSDP2 changes the class
        cast_late_layers(module, self.plan.precision)
        refuse_parameters(module, self.plan)
        self.units, message = units_for(module, self.plan)
        _tell(message)
        if self.plan.activation_checkpointing.name != "none":
            _tell(without_caches(module))
        self.step.set_up(module, self.root_device)
        step_logging(module.trainer).reduce_over(self.mesh.group("loss"))
        self.sharded = self._make_sharded_state(module)
        self.state = TrainState(
            self.plan, module, self.root_device, self.sharded, self.planned_precision,
            loader=lambda: self.train_loader, file_group=self.file_group,
            synchronize_buffers=self.step.synchronize_buffers, gradient_order=self._gradient_order,
        )  # fmt: skip

    def _make_sharded_state(self, module: LightningModule) -> DTensorState:
        return DTensorState(module, lambda: self.optimizers)

    def parallelize(self, module: LightningModule, units: Units, *, casts_inputs: bool) -> None:
        parallelize(module, units, self.plan, copied=self._is_copied, casts_inputs=casts_inputs)
        mixed = self.plan.precision.is_mixed
        outside = copy_outside_units(module, units, self.plan, self._is_copied) if mixed else []
        self.step_forward = StepForward(module, self.plan, self.planned_precision, outside, self._forward_redirection)
        self.weights.run_layers_as_in_steps(module)
        if self.plan.precision.loss_scaling:
            step_schedules_unless(module, lambda: self.step.verdict.skipped_by_scaler)

    def keeps_whole(self, parameter: nn.Parameter) -> bool:
        """Whether every rank keeps the whole `parameter`."""
        return False

    def _is_copied(self, parameter: nn.Parameter) -> bool:
        """Whether shardwise makes low-precision copies of `parameter`."""
        return self.keeps_whole(parameter) and not (self.float8 and self.float8.cast_from_master(parameter))

    def prepare_float8(self, module: LightningModule, divided: TensorParallel | None = None) -> None:
        """Let layers multiply in fp8 if the Plan says so, and tell the user which."""
        self.float8 = prepare_float8(module, self.plan, divided)
        if self.float8 is not None and self.is_global_zero:
            slow = self.plan.compile.name == "none" and self.plan.accelerator == "cuda"
            print(f"{self.float8}{'; slow without compile=layer or model' if slow else ''}", flush=True)

    def refresh_float8(self) -> None:
        """Compute the scales of weights that are gathered in fp8. Collective."""
        if self.float8 is not None:
            self.float8.refresh_scales()

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        order_alike(self.module, self.optimizers, self.file_group())

    @property
    def module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def planned_precision(self) -> PlannedPrecision:
        assert isinstance(self.precision_plugin, PlannedPrecision)
        return self.precision_plugin

    def teardown(self) -> None:
        self.closing.close()
        module = self.lightning_module
        if not self.order.is_refused and (module is None or not any(p.is_meta for p in module.parameters())):
            super().teardown()  # moves the module to the CPU: on meta that raises; behind others' collective it waits

    def file_group(self) -> dist.ProcessGroup | None:
        """The group of all hosts for work on files. The first call is collective."""
        return self.closing.file_group() if self.world_size > 1 else None

    # Data

    def process_dataloader(self, dataloader: object) -> object:
        module, plan, rank = self.module, self.plan, self.mesh.data_rank(self.global_rank)
        if module.trainer.state.stage != RunningStage.TRAINING:
            validating = module.trainer.state.stage == RunningStage.VALIDATING
            limit = plan.max_validation_batches if validating or plan.quick_check else None
            take, cut = self.evaluation.note, partial(self._cut, keeps=True)
            return EvaluationLoader(dataloader, plan, rank, take, limit, self.file_group, cut)
        if self.train_loader is not None:
            raise ConfigError("several training loaders: a step is one global batch of one loader; combine the data")
        self.train_loader = TrainLoader(
            dataloader, self.plan, rank, self.root_device,
            weigher_of(module) if self.shared is None else self.shared.loss_weight(), flops_of(module),
            self.file_group, self.mesh, self._cut,
        )  # fmt: skip
        if self.is_global_zero:
            print("".join(f"{line}\n" for line in self.train_loader.notices()), end="", flush=True)
        return self.train_loader

    def _cut(self, batch: Any, *, keeps: bool = False) -> Any:  # a loader may be made before ranks share batches
        cut = None if self.shared is None else self.shared.cut_and_keep if keeps else self.shared.cut
        return batch if cut is None else cut(batch)

    @cached_property
    def _transfer(self) -> BatchTransfer:
        data = getattr(self.module.trainer, "datamodule", None)
        return BatchTransfer(self.root_device, self.module, *([data] if data else []))

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self.shared is not None:
            self.shared.seed_batch()
        self.evaluation.begin_batch(self.module.trainer)
        begins_window = self.train_loader is not None and self.train_loader.window_has_begun()
        if begins_window:
            self.step.recorder.batch_fetched()
        batch = self._transfer.copy(batch)
        if self._transfer.leaves_work(batch):
            batch = super().batch_to_device(batch, device, dataloader_idx)
        if begins_window:
            self.step.recorder.batch_arrived()
        return batch

    # Steps

    def _run_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        assert self.model is not None
        if self.shared is not None:
            self.shared.begin_batch(*args)
        if self._weights_may_be_new(name):
            self.refresh_float8()
        self.order.begin(name, reduces=len(self.step.window.losses) + 1 == self.step.window.micro_batches)
        output = self.step_forward.run(self.model if self.runs_inside_forward else None, name, *args, **kwargs)
        if name != "training_step" or not self.module.automatic_optimization:  # no backward pass follows
            self.order.end()
        if self.shared is not None:
            self.shared.end_batch()
        return output

    def _weights_may_be_new(self, name: str) -> bool:
        """Whether the step `name` may see weights that the one before has not seen."""
        return name != "training_step" or not self.step.window.losses  # its further micro-batches see the same ones

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = self._run_step("training_step", *args, **kwargs)
        if self.module.automatic_optimization:
            self.step.recorder.forward_ended(is_first=not self.step.window.losses)
            check_output(output, self.module_name, has_own_backward=is_overridden("backward", self.module))
        else:
            self.step.window.take_loss_of_manual_step(output)
            self.step.verdict.count_skipped_by_hand(self.planned_precision.end_batch_by_hand())
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", *args, **kwargs)

    def _evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self.shared is not None:
            self.shared.begin_evaluation()
        is_padding = self.evaluation.take()
        output = self._run_step(name, *args, **kwargs)
        return None if is_padding else output

    @property
    def stream_rank(self) -> int:
        """The rank whose random streams this one has."""
        return self.global_rank if self.shared is None else self.shared.stream_rank

    def on_train_start(self) -> None:
        # Every rank built the model from the same random stream, but dropout must differ between ranks.
        consumed = 0 if self.train_loader is None else self.train_loader.consumed
        seed_streams(derived_seed(self.plan.seed, "training", self.stream_rank, *([consumed] if consumed else [])))
        if self.state.of_rank is not None:
            with self.state.loading():  # in the layout that saved it this rank may have had other streams
                streams, _ = load_own(self.state.loaded_from, self.stream_rank, self.plan.trust)
            if streams is not None:
                set_random_state(streams, self.root_device)
        if self.train_loader is not None:
            self.train_loader.go_on_from((self.state.of_rank or {}).get("stream"))
        if not self.module.automatic_optimization:
            for optimizer in self.optimizers:
                optimizer.register_step_pre_hook(self.planned_precision.watch_step_by_hand)
                optimizer.register_step_post_hook(self._note_step)
        super().on_train_start()
        refuse_unfilled(self.module, self.plan, self.sharded, self.file_group)
        if self.plan.checkpoint.saves:
            check_one_owner(self.optimizers, self.module_name)
            self.state.rehearse(last=False)
        self.step.before_first()

    def _note_step(self, *_: Any) -> None:
        self.step.note_step()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert self.train_loader is not None
        self.step.begin_batch(batch_idx, self.train_loader.next_scale())
        super().on_train_batch_start(batch, batch_idx)

    def check_loss(self, loss: Tensor) -> None:
        """Refuse a loss that a step cannot learn from. Collective in a strategy that divides layers."""
        check_loss(loss, self.module_name, self.plan.strategy.name)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        self.check_loss(closure_loss)
        assert self.train_loader is not None
        scaled = self.step.window.scale_loss(closure_loss)
        if self.module.automatic_optimization and self.step.window.is_complete:
            seed = self.step.gradient_seed(self.train_loader, like=scaled)
            if self.scales_by_gradient and not is_overridden("backward", self.module):
                kwargs["gradient"] = seed  # saves three kernels against a product
            else:
                scaled = scaled * seed
        try:
            return super().backward(scaled, optimizer, *args, **kwargs)
        except RuntimeError as error:
            if (explained := explain(error, self.module_name)) is not None:
                raise explained from None
            if "does not currently support double backward" not in str(error):
                raise
            raise ConfigError(
                f"{self.module_name} differentiates a gradient (create_graph=True), which torch.compile cannot: use "
                f"compile=none"
            ) from None

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        self.step.note_learning_rate(optimizer)  # before the schedule moves on
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self.module.automatic_optimization:
            self._note_step()
            optimizer.zero_grad(set_to_none=True)  # Lightning would keep the gradients until after the next forward
            _tell(self.step.end(self.module.trainer, self.planned_precision))
        return result

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        # `self.log(..., sync_dist=True)` averages batch sizes over ranks. In integers the mean of 7 and 6 would be 6.
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and reduce_op in ("mean", "avg"):
            tensor = tensor.to(torch.float64)
        return super().reduce(tensor, self._counting_once(group), reduce_op)  # type: ignore[safe-super]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return super().all_gather(tensor, self._counting_once(group), sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(int(decision), device=self.root_device)
        world = self.mesh.group("world")
        sum_over(world, votes)
        return bool(votes == world.size()) if all else bool(votes)

    def _counting_once(self, group: Any) -> Any:
        """The group of a collective of the module's own, in which peers that see the same samples are not all."""
        if group is not None or self.plan.topology.is_data_parallel_only:
            return group
        return self.mesh.group("loss")

    def on_test_start(self) -> None:
        refuse_loaders_together(self.module.trainer, self.plan)
        super().on_test_start()

    def on_validation_start(self) -> None:
        refuse_loaders_together(self.module.trainer, self.plan)
        self.step.synchronize_buffers()
        self.evaluation.begin(self.root_device if self.state.is_training else None)
        super().on_validation_start()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self.evaluation.end()

    def _gradient_order(self) -> list[int]:
        """The order in which gradients arrive, if it decides which gradients are summed together; else empty."""
        return []


def strategy_of(trainer: Trainer) -> PlannedStrategy:
    """The strategy of a Trainer that shardwise has made."""
    assert isinstance(trainer.strategy, PlannedStrategy)
    return trainer.strategy


def _tell(message: str | None) -> None:
    if message is not None and dist.get_rank() == 0:
        print(message, flush=True)
