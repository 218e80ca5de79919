"""`fsdp` and `fsdp_hybrid` with a pipeline: each rank has some of the layers, which the ranks of its stage shard.

The accumulation window is the pipeline's micro-batches (strategies/pipelined_window.py). The module runs unchanged,
between stubs (parallel/pipeline/stages.py). Rank 0 has the last stage, so losses and logs are where Lightning has its
loggers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint.state import shapes_of
from shardwise.distributed.mesh import gather_objects
from shardwise.errors import ConfigError, first_of
from shardwise.parallel.tensor_parallel import TensorParallel
from shardwise.strategies.fsdp import FsdpStrategy
from shardwise.strategies.fsdp_gathering import free_gathered
from shardwise.strategies.fsdp_sharding import FsdpSharding
from shardwise.strategies.pipeline_run import PipelineRun
from shardwise.strategies.pipelined_weights import PipelinedWeights
from shardwise.strategies.pipelined_window import PipelineWindow
from shardwise.strategies.sharded_state import DTensorState
from shardwise.weights.initialize import Materializer


class StageSharding(FsdpSharding):
    """The same of the stages of one rank."""

    strategy: Any

    def divide_layers(self) -> TensorParallel | None:
        divided = super().divide_layers()
        if divided is not None:
            for name, twin in self.strategy.pipeline.stages.twins.items():
                divided.wrap(twin, name)
        return divided

    def materialize_unit(self, materializer: Materializer, unit: nn.Module) -> bool:
        owned: bool = self.strategy.pipeline.stages.owns(unit)
        if owned or not materializer.initializes_itself:
            materializer.materialize(unit)
        return owned

    def materialize_rest(self, materializer: Materializer) -> None:
        # What is on other stages keeps no memory, unless a layer of this rank shares its weight.
        materializer.done.update(self.strategy.pipeline.stages.absent())
        super().materialize_rest(materializer)
        self.strategy.pipeline.stages.cut()

    def begin_roots(self) -> None:
        with self.strategy.pipeline.stages.whole():
            pass  # the layers that stand in for others know the sharded weights now
        super().begin_roots()  # while the layers of all own stages are in the module

    def settle_last(self) -> None:
        """Not behind the backward pass of each stage: `backward` does it once, when all have ended."""


class PipelinedStrategy(FsdpStrategy):
    """FSDP2 inside the stages of a pipeline."""

    weights_class, sharding_class = PipelinedWeights, StageSharding
    pipeline: PipelineRun  # from `setup_environment` on

    def setup_environment(self) -> None:
        super().setup_environment()
        self.pipeline = PipelineRun(self)
        self.step.take_window(PipelineWindow(self.plan.accumulate_grad_batches, self.root_device))

    def _begin_setup(self, module: LightningModule) -> None:
        super()._begin_setup(module)
        self.pipeline.begin_setup(module, self.units)

    def _make_sharded_state(self, module: LightningModule) -> DTensorState:
        group = self.mesh.group("pipeline")
        return PipelinedState(module, lambda: self.optimizers, lambda: free_gathered(module), group)

    def setup_optimizers(self, trainer: Trainer) -> None:
        with self.pipeline.stages.whole():
            super().setup_optimizers(trainer)
            assert isinstance(self.sharded, PipelinedState)
            self.sharded.keep_own_groups()
        self.pipeline.take_optimizers()

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        self.pipeline.end_setup()

    @property
    def stream_rank(self) -> int:
        own = super().stream_rank
        return next(ranks[0] for ranks in self.plan.topology.groups(("pipeline",)) if own in ranks)

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.pipeline.window.note(args, kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self.pipeline.window.is_full:
            self.pipeline.train(optimizer)
        return closure_loss.detach()

    def _run_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self.pipeline.evaluate(name, *args, **kwargs)  # training steps are `run_stage`

    def run_stage(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run what `name` of the module does in one stage, in a forward of the root."""
        return super()._run_step(name, *args, **kwargs)

    def _weights_may_be_new(self, name: str) -> bool:
        return False  # all micro-batches of a window see the weights that it begins with

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Say what a computation with weights of other stages is, which are on the meta device."""
        try:
            with super().explaining():
                yield
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error):
                raise
            first = " ".join(str(error).split())[:100]
            raise ConfigError(
                f"{self.module_name} computes with weights or buffers of a layer that is on another stage of the "
                f"pipeline ({first}); move that into the layer, leave it out, or use "
                f"strategy.pipeline_parallel_size=1"
            ) from error

    def on_validation_end(self) -> None:
        self.pipeline.links.wait()
        super().on_validation_end()

    def on_test_end(self) -> None:
        self.pipeline.links.wait()
        super().on_test_end()


# A stage's part of the run's state: its own layers, under the names of the whole module.


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
