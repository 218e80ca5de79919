"""`fsdp` and `fsdp_hybrid` with a pipeline: each rank has some of the layers, which the ranks of its stage shard.

The accumulation window is the pipeline's micro-batches (step/pipeline_window.py). The module runs unchanged, between
stubs (parallel/pipeline/stages.py). Rank 0 has the last stage, so losses and logs are where Lightning has its loggers.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.distributed.collectives import sum_over
from shardwise.distributed.dtensor import local_part
from shardwise.distributed.process_group import group_timeout
from shardwise.lightning_internals.results import in_micro_batch
from shardwise.parallel.activation_checkpointing import explain
from shardwise.parallel.pipeline.engine import Engine
from shardwise.parallel.pipeline.links import Links
from shardwise.parallel.pipeline.random_streams import RandomStreams
from shardwise.parallel.pipeline.stages import Stages
from shardwise.parallel.precision import dtype_of
from shardwise.parallel.tensor_parallel import TensorParallel
from shardwise.plan import Plan
from shardwise.plan.pipeline_schedule import make_schedule
from shardwise.process.watchdog import progress
from shardwise.step.pipeline_window import PipelineWindow, shapes_in
from shardwise.strategies.fsdp_gathering import free_gathered
from shardwise.strategies.fsdp_sharding import FsdpSharding
from shardwise.strategies.pipelined_buffers import OwnBuffers
from shardwise.strategies.pipelined_checks import check_module, loss_in, one_tensor
from shardwise.strategies.pipelined_gradients import StageGradients
from shardwise.strategies.pipelined_logs import PipelinedLogs, PipelinedWeights
from shardwise.strategies.pipelined_state import PipelinedState
from shardwise.strategies.sharded_state import DTensorState
from shardwise.weights.initialize import Materializer


class StageSharding(FsdpSharding):
    """The same of the stages of one rank."""

    strategy: PipelinedStrategy

    def divide_layers(self) -> TensorParallel | None:
        divided = super().divide_layers()
        if divided is not None:
            for name, twin in self.strategy.stages.twins.items():
                divided.wrap(twin, name)
        return divided

    def materialize_unit(self, materializer: Materializer, unit: nn.Module) -> bool:
        owned = self.strategy.stages.owns(unit)
        if owned or not materializer.initializes_itself:
            materializer.materialize(unit)
        return owned

    def materialize_rest(self, materializer: Materializer) -> None:
        # What is on other stages keeps no memory, unless a layer of this rank shares its weight.
        materializer.done.update(self.strategy.stages.absent())
        super().materialize_rest(materializer)
        self.strategy.stages.cut()

    def begin_roots(self) -> None:
        with self.strategy.stages.whole():
            pass  # the layers that stand in for others know the sharded weights now
        super().begin_roots()  # while the layers of all own stages are in the module

    def settle_last(self) -> None:
        """Not behind the backward pass of each stage: `backward` does it once, when all have ended."""


class PipelinedStrategy(PipelinedLogs):
    """FSDP2 inside the stages of a pipeline."""

    weights_class, sharding_class = PipelinedWeights, StageSharding
    engine: Engine

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        strategy, topology = plan.strategy, plan.topology
        self._step_name = "training_step"
        self._place = ""  # the step or the batch that this rank is in, in words
        self._optimizer: Optimizer | None = None  # that of the step under way
        self.count = topology.pipeline * strategy.pipeline_chunks
        micro_batches = plan.accumulate_grad_batches if plan.stage == "fit" else topology.pipeline  # else none is run
        self.schedule = make_schedule(
            strategy.pipeline_schedule, topology.pipeline, strategy.pipeline_chunks, micro_batches
        )

    # Set-up

    def setup_environment(self) -> None:
        super().setup_environment()
        topology = self.plan.topology
        pipelines = [ranks[::-1] for ranks in topology.groups(("pipeline",))]
        self._links = Links(pipelines, self.count > topology.pipeline, self.root_device, group_timeout(self.plan))
        self.position = topology.pipeline_rank(self.global_rank)
        self.engine = Engine(self.position, topology.pipeline, self.count, self._links)
        self.engine.call_before_each(self._say_where)
        self.step.take_window(PipelineWindow(self.plan.accumulate_grad_batches, self.root_device))

    def _begin_setup(self, module: LightningModule) -> None:
        super()._begin_setup(module)
        own = range(self.position, self.count, self.plan.topology.pipeline)
        split = check_module(module, self.units, self.plan, self.count)
        if self.is_global_zero:
            print(f"pipeline: {', '.join(map(str, split))} layers in its stages, in their order", flush=True)
        dtype = dtype_of(self.plan.precision.compute_dtype)
        self.stages = Stages(module, self.units, split, own, self.root_device, dtype)
        self.own_buffers = OwnBuffers(module)

    def _make_sharded_state(self, module: LightningModule) -> DTensorState:
        group = self.mesh.group("pipeline")
        return PipelinedState(module, lambda: self.optimizers, lambda: free_gathered(module), group)

    def setup_optimizers(self, trainer: Trainer) -> None:
        with self.stages.whole():
            super().setup_optimizers(trainer)
            assert isinstance(self.sharded, PipelinedState)
            self.sharded.keep_own_groups()
        shared = [p for p in self.stages.ownership.shared() if p.requires_grad]
        self._shared = shared
        counted_elsewhere = {id(p) for p in shared} if self.position == 0 else set()
        norm = self.planned_precision.stage_norm
        dtype = torch.promote_types(dtype_of(self.plan.precision.parameter_dtype), torch.float32)
        norm.measure_over(self.mesh.group("pipeline"), counted_elsewhere, self.root_device, dtype)

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        self.streams = RandomStreams(self.plan.seed, self.stream_rank, self.root_device)
        if (scaler := self.planned_precision.scaler) is not None:
            scaler.scale(torch.zeros((), device=self.root_device))  # makes the scale: each stage unscales
        self._share_logs(trainer)
        self._gradients = StageGradients(
            self.plan, self.module, self.stages, self.sharding.backwards.layers, self.count
        )

    @property
    def stream_rank(self) -> int:
        own = super().stream_rank
        return next(ranks[0] for ranks in self.plan.topology.groups(("pipeline",)) if own in ranks)

    # Steps

    @property
    def window(self) -> PipelineWindow:
        assert isinstance(self.step.window, PipelineWindow)
        return self.step.window

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.window.note(args, kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if not self.window.is_full:
            return closure_loss.detach()
        self._step_name, self._optimizer = "training_step", optimizer
        self._place = f"step {self.module.trainer.global_step + 1}"
        self._gradients.begin_step()
        self.refresh_float8()
        with self._explaining(), self.streams.apart():
            self.sharding.backwards.run(lambda: self.engine.run(self.schedule, self))
        self._check_metrics()
        self.stages.rest()
        self.sharding.settle_gradients()
        self._sum_shared_gradients()
        skip = self.window.share(self.step.verdict.skip_requested, self.mesh.group("pipeline"))
        self.step.verdict.take_request(skip)
        self.window.end()
        return closure_loss.detach()

    def shapes(self, micro_batch: int) -> Hashable:
        return shapes_in(self.window.batches[micro_batch])

    def compute(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        """Of the engine: one micro-batch through one stage, in training."""
        args, kwargs = self.window.batches[micro_batch]
        self.window.go_to(micro_batch)
        self.streams.begin(self._step_name, self.module.trainer.global_step, micro_batch)
        with in_micro_batch(self.module.trainer, micro_batch, self.window.micro_batches, args[0]):
            self.own_buffers.begin()
            output = self._run_stage(stage, received, args, kwargs)
        if stage < self.count - 1:
            return one_tensor(output, f"{self.module_name}.{self._step_name}")
        self.own_buffers.check()
        loss = loss_in(output, self.module_name)
        self.check_loss(loss)
        return self.window.scale_loss_of(micro_batch, loss)

    def differentiate(
        self, stage: int, micro_batch: int, output: Tensor, gradient: Tensor | None, is_last: bool, is_end: bool
    ) -> None:
        """Of the engine: the backward of one micro-batch through one stage."""
        context = None if self.shared is None else self.shared.context
        if context is not None:  # attention that is computed again looks at it
            context.begin_batch(self.window.batches[micro_batch][0][0])
        in_turn = in_micro_batch(
            self.module.trainer, micro_batch, self.window.micro_batches, self.window.batches[micro_batch][0][0]
        )
        with in_turn, self._gradients.in_backward(stage, is_last, is_end):
            try:
                if gradient is None:
                    self._differentiate_loss(micro_batch, output)
                elif output.requires_grad:
                    torch.autograd.backward(output, gradient)
                    self.precision_plugin.post_backward(output, self.module)
                elif self._gradients.are_due(is_last, is_end):  # nothing of this stage needs gradients in this pass
                    self.sharding.backwards.end()
            except RuntimeError as error:
                if (explained := explain(error, self.module_name)) is not None:
                    raise explained from None
                raise

    def _differentiate_loss(self, micro_batch: int, loss: Tensor) -> None:
        seed = torch.ones_like(loss)
        if micro_batch == self.window.micro_batches - 1:
            assert self.train_loader is not None
            seed = self.step.gradient_seed(self.train_loader, like=loss)
        Strategy.backward(self, loss, self._optimizer, gradient=seed)

    def _run_stage(self, stage: int, received: Tensor | None, args: Any, kwargs: Any) -> Any:
        step = getattr(self.module, self._step_name)

        def receive() -> Tensor | None:
            self.own_buffers.enter_layers()
            return self.streams.enter_layers(stage, received)

        def run(*args: Any, **kwargs: Any) -> Any:  # inside the root's forward, so that FSDP2 sees what is handed over
            return self.stages.run(stage, receive, lambda: step(*args, **kwargs))

        self.module.__dict__["pipelined_step"] = run
        return self._run_step("pipelined_step", *args, **kwargs)

    def _weights_may_be_new(self, name: str) -> bool:
        return False  # all micro-batches of a window see the weights that it begins with

    def _sum_shared_gradients(self) -> None:
        """Add up the gradients that both ends of the pipeline have of a weight that they share. Collective."""
        for p in self._shared:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            assert self._links.ends is not None
            with torch.no_grad():
                sum_over(self._links.ends, local_part(p.grad))

    # Evaluation

    def _evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._step_name = name
        result = super()._evaluate("pipelined_evaluation", *args, **kwargs)
        self._check_metrics()
        return result if self.is_last else None

    def _run_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name != "pipelined_evaluation":
            return super()._run_step(name, *args, **kwargs)

        def forward(stage: int, received: Tensor | None) -> Any:
            self.streams.begin(self._step_name, *args[1:])
            output = self._run_stage(stage, received, args, kwargs)
            return output if stage == self.count - 1 else one_tensor(output, f"{self.module_name}.{self._step_name}")

        self.refresh_float8()
        self._place = progress.activity  # which batch it is
        with self._explaining(), self.streams.apart():
            result = self.engine.evaluate((self._step_name, shapes_in(args)), forward)
        self.stages.rest()  # what looks at the weights next, such as an average of them, finds those of all own stages
        return result

    def _say_where(self, words: str, waits: bool) -> None:
        """Tell the watchdog what this rank does, in which step or batch."""
        progress.doing(f"{self._place}, {words}", waits)

    def on_validation_end(self) -> None:
        self._links.wait()
        super().on_validation_end()

    def on_test_end(self) -> None:
        self._links.wait()
        super().on_test_end()
