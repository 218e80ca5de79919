"""What a pipeline runs on one rank: its stages, and each micro-batch through them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from shardwise.distributed.dtensor import local_part
from shardwise.distributed.mesh import Mesh, group_timeout, sum_over
from shardwise.distributed.rng import RandomStreams
from shardwise.errors import ConfigError, class_name
from shardwise.lightning_internals.results import in_micro_batch, step_logging
from shardwise.parallel.activation_checkpointing import explain
from shardwise.parallel.pipeline.engine import Engine, Links
from shardwise.parallel.pipeline.placeholders import refusal_of
from shardwise.parallel.pipeline.stages import Stages
from shardwise.parallel.precision import dtype_of
from shardwise.parallel.units import Units
from shardwise.plan import Plan
from shardwise.plan.pipeline_schedule import make_schedule
from shardwise.process.watchdog import progress
from shardwise.strategies.pipelined_checks import check_module, loss_in, one_tensor
from shardwise.strategies.pipelined_weights import absent_state
from shardwise.strategies.pipelined_window import PipelineWindow, StageGradients, shapes_in


class PipelineRun:
    """The stages of this rank, and what the engine asks of them. Made when ranks know each other."""

    stages: Stages  # from `begin_setup` on
    own_buffers: OwnBuffers

    def __init__(self, strategy: Any) -> None:
        plan: Plan = strategy.plan
        mesh: Mesh = strategy.mesh
        self.strategy, self.plan, self.mesh = strategy, plan, mesh
        options, topology = self.plan.strategy, self.plan.topology
        self.count = topology.pipeline * options.pipeline_chunks  # stages of all ranks
        is_fit = self.plan.stage == "fit"
        micro_batches = self.plan.accumulate_grad_batches if is_fit else topology.pipeline  # else none is run
        chunks = options.pipeline_chunks
        self._schedule = make_schedule(options.pipeline_schedule, topology.pipeline, chunks, micro_batches)
        pipelines = [ranks[::-1] for ranks in topology.groups(("pipeline",))]
        is_ring = self.count > topology.pipeline
        self.links = Links(pipelines, is_ring, strategy.root_device, group_timeout(self.plan))
        self.position = topology.pipeline_rank(strategy.global_rank)
        self._engine = Engine(self.position, topology.pipeline, self.count, self.links)
        self._engine.call_before_each(self._say_where)
        self._step_name = "training_step"
        self._place = ""  # the step or the batch that this rank is in, in words
        self._optimizer: Optimizer | None = None  # that of the step under way

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, which alone knows losses and logs."""
        return self.position == self.plan.topology.pipeline - 1

    @property
    def module(self) -> LightningModule:
        module: LightningModule = self.strategy.module
        return module

    @property
    def window(self) -> PipelineWindow:
        assert isinstance(self.strategy.step.window, PipelineWindow)
        return self.strategy.step.window

    # Set-up

    def begin_setup(self, module: LightningModule, units: Units) -> None:
        """Before layers of other stages are cut out of `module`."""
        own = range(self.position, self.count, self.plan.topology.pipeline)
        split = check_module(module, units, self.plan, self.count)
        if self.strategy.is_global_zero:
            print(f"pipeline: {', '.join(map(str, split))} layers in its stages, in their order", flush=True)
        dtype = dtype_of(self.plan.precision.compute_dtype)
        self.stages = Stages(module, units, split, own, self.strategy.root_device, dtype)
        self.own_buffers = OwnBuffers(module)

    def take_optimizers(self) -> None:
        """Once they are made: count weights that both ends have once in the norm of all gradients."""
        self._shared = [p for p in self.stages.ownership.shared() if p.requires_grad]
        elsewhere = {id(p) for p in self._shared} if self.position == 0 else set()
        dtype = torch.promote_types(dtype_of(self.plan.precision.parameter_dtype), torch.float32)
        norm = self.strategy.planned_precision.stage_norm
        norm.measure_over(self.mesh.group("pipeline"), elsewhere, self.strategy.root_device, dtype)

    def end_setup(self) -> None:
        strategy = self.strategy
        self._streams = RandomStreams(self.plan.seed, strategy.stream_rank, strategy.root_device)
        if (scaler := strategy.planned_precision.scaler) is not None:
            scaler.scale(torch.zeros((), device=strategy.root_device))  # makes the scale: each stage unscales
        step_logging(self.module.trainer).share_metrics_by(self._metrics_of_last_stage)
        layers = strategy.sharding.backwards.layers
        self._gradients = StageGradients(self.plan, self.module, self.stages, layers, self.count)

    # Training

    def train(self, optimizer: Optimizer | None) -> None:
        """Run all micro-batches of a step, forward and backward."""
        strategy = self.strategy
        self._step_name, self._optimizer = "training_step", optimizer
        self._place = f"step {self.module.trainer.global_step + 1}"
        self._gradients.begin_step()
        strategy.refresh_float8()
        with strategy.explaining(), self._streams.apart():
            strategy.sharding.backwards.run(lambda: self._engine.run(self._schedule, self))
        self._check_metrics()
        self.stages.rest()
        strategy.sharding.settle_gradients()
        self._sum_shared_gradients()
        verdict = strategy.step.verdict
        verdict.take_request(self.window.share(verdict.skip_requested, self.mesh.group("pipeline")))
        self.window.end()

    def shapes(self, micro_batch: int) -> Hashable:
        return shapes_in(self.window.batches[micro_batch])

    def compute(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        """Of the engine: one micro-batch through one stage, in training."""
        args, kwargs = self.window.batches[micro_batch]
        self.window.go_to(micro_batch)
        self._streams.begin(self._step_name, self.module.trainer.global_step, micro_batch)
        with in_micro_batch(self.module.trainer, micro_batch, self.window.micro_batches, args[0]):
            self.own_buffers.begin()
            output = self._run_stage(stage, received, args, kwargs)
        if stage < self.count - 1:
            return one_tensor(output, f"{self.strategy.module_name}.{self._step_name}")
        self.own_buffers.check()
        loss = loss_in(output, self.strategy.module_name)
        self.strategy.check_loss(loss)
        return self.window.scale_loss_of(micro_batch, loss)

    def differentiate(
        self, stage: int, micro_batch: int, output: Tensor, gradient: Tensor | None, is_last: bool, is_end: bool
    ) -> None:
        """Of the engine: the backward of one micro-batch through one stage."""
        context = None if self.strategy.shared is None else self.strategy.shared.context
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
                    self.strategy.precision_plugin.post_backward(output, self.module)
                elif self._gradients.are_due(is_last, is_end):  # nothing of this stage needs gradients in this pass
                    self.strategy.sharding.backwards.end()
            except RuntimeError as error:
                if (explained := explain(error, self.strategy.module_name)) is not None:
                    raise explained from None
                raise

    def _differentiate_loss(self, micro_batch: int, loss: Tensor) -> None:
        seed = torch.ones_like(loss)
        if micro_batch == self.window.micro_batches - 1:
            assert self.strategy.train_loader is not None
            seed = self.strategy.step.gradient_seed(self.strategy.train_loader, like=loss)
        Strategy.backward(self.strategy, loss, self._optimizer, gradient=seed)

    def _run_stage(self, stage: int, received: Tensor | None, args: Any, kwargs: Any) -> Any:
        step = getattr(self.module, self._step_name)

        def receive() -> Tensor | None:
            self.own_buffers.enter_layers()
            return self._streams.enter_layers(stage, received)

        def run(*args: Any, **kwargs: Any) -> Any:  # inside the root's forward, so that FSDP2 sees what is handed over
            return self.stages.run(stage, receive, lambda: step(*args, **kwargs))

        self.module.__dict__["pipelined_step"] = run
        return self.strategy.run_stage("pipelined_step", *args, **kwargs)

    def _sum_shared_gradients(self) -> None:
        """Add up the gradients that both ends of the pipeline have of a weight that they share. Collective."""
        for p in self._shared:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            assert self.links.ends is not None
            with torch.no_grad():
                sum_over(self.links.ends, local_part(p.grad))

    # Evaluation

    def evaluate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run the step `name` of an evaluation. Returns what it gives on the last stage."""
        strategy, self._step_name = self.strategy, name

        def forward(stage: int, received: Tensor | None) -> Any:
            self._streams.begin(self._step_name, *args[1:])
            output = self._run_stage(stage, received, args, kwargs)
            return output if stage == self.count - 1 else one_tensor(output, f"{strategy.module_name}.{name}")

        strategy.refresh_float8()
        self._place = progress.activity  # which batch it is
        with strategy.explaining(), self._streams.apart():
            result = self._engine.evaluate((name, shapes_in(args)), forward)
        self.stages.rest()  # what looks at the weights next, such as an average of them, finds those of all own stages
        self._check_metrics()
        return result if self.is_last else None

    def _metrics_of_last_stage(self, own: dict[str, Any]) -> dict[str, Any]:
        """What the last stage has logged. Collective."""
        found = [{name: value.detach().cpu() for name, value in own.items() if isinstance(value, Tensor)}]
        group = self.mesh.group("pipeline")
        dist.broadcast_object_list(found, group_src=0, group=group, device=self.strategy.root_device)
        return {} if self.is_last else {name: value.to(self.strategy.root_device) for name, value in found[0].items()}

    def _check_metrics(self) -> None:
        """Refuse numbers of other stages in the metrics of the module: some would be lost among the ranks' own.

        Raises:
            ConfigError
        """
        for name, layer in self.module.named_modules() if self.is_last else ():
            if isinstance(layer, Metric) and (absent := absent_state(layer)) is not None:
                raise refusal_of(absent, f"{self.strategy.module_name}: the metric {name} is given")

    def _say_where(self, words: str, waits: bool) -> None:
        """Tell the watchdog what this rank does, in which step or batch."""
        progress.doing(f"{self._place}, {words}", waits)


# Buffers of a module itself in a pipeline, where the last stage alone runs what is behind the layers.


class OwnBuffers:
    """Sees on the last stage, which runs all of a step but the layers, what the step does with buffers of `module`."""

    def __init__(self, module: LightningModule) -> None:
        self.module_name = class_name(module)
        self._read: set[str] = set()
        self._read_before: set[str] = set()  # before the layers
        self._at_layers: dict[str, Any] = {}  # what tells whether a buffer was written since
        self._buffers = _Noting(module._buffers, self._read)
        module.__dict__["_buffers"] = self._buffers

    def begin(self) -> None:
        """A step begins."""
        self._read.clear()

    def enter_layers(self) -> None:
        """The step has come to the layers that repeat."""
        self._read_before, self._at_layers = set(self._read), self._versions()

    def check(self) -> None:
        """Refuse a buffer that other stages would have read with an old value.

        Raises:
            ConfigError
        """
        written = {name for name, version in self._versions().items() if version != self._at_layers.get(name)}
        for name in sorted(written & self._read_before):
            raise ConfigError(
                f"{self.module_name}: training_step reads the buffer {name!r} before the layers that repeat and writes "
                f"it behind them, which only the last stage of a pipeline does: others would go on with its old value; "
                f"write it before the layers, read it behind them, or use strategy.pipeline_parallel_size=1"
            )

    def _versions(self) -> dict[str, Any]:
        return {
            name: (id(b), None if b.is_inference() else b._version)
            for name, b in self._buffers.items()
            if b is not None
        }


class _Noting(dict[str, Tensor | None]):
    """Notes what is read by name, as an attribute of the module is."""

    def __init__(self, buffers: dict[str, Tensor | None], read: set[str]) -> None:
        super().__init__(buffers)
        self.read = read

    def __getitem__(self, name: str) -> Tensor | None:
        self.read.add(name)
        return super().__getitem__(name)
