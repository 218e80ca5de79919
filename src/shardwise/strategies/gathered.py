"""What a module asks of all ranks: to gather sharded weights for many forward passes, to reduce its own numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from shardwise import accelerator
from shardwise.data.agreement import smallest
from shardwise.distributed.collectives import sum_over
from shardwise.distributed.mesh import Mesh
from shardwise.lightning_internals.hook_analysis import reads_in_step
from shardwise.nn.sequence_parts import whole_sequences
from shardwise.plan import Plan
from shardwise.step.layers_in_hooks import LayersInHooks
from shardwise.strategies.lost_writes import LostWrites, tell_of_reads

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_SPARE = 0.1  # of all memory is left for what the forward passes need


class GatheringHooks(Strategy):
    """Implements `gathered_weights` of protocols.py. A strategy that shards weights overrides the two steps."""

    plan: Plan
    mesh: Mesh
    layers_in_hooks: LayersInHooks | None = None  # in low precision
    hides_weights: bool
    weights_in_steps: tuple[str, ...] = ()  # hooks of steps around which it makes weights whole, as around all others
    lost_writes: LostWrites | None = None  # finds writes into weights that this strategy would lose
    reads: dict[str, str]  # under ZeRO: the steps that may read weights → the name by which they do
    context: Any = None  # how sequences are divided over ranks, if they are

    def file_group(self) -> dist.ProcessGroup | None:
        """The group of all hosts, which agree on whether memory suffices."""
        raise NotImplementedError

    @contextmanager
    def whole_parameters(self, hook: str) -> Iterator[None]:
        """Make all weights whole while a hook looks at them, as they are under ddp. Collective."""
        yield

    def around_hook(self, hook: str, *, looks: bool) -> AbstractContextManager[None]:
        """What is put around a hook of the module or of a callback. `looks`: at weights, on one rank or another."""
        return self.whole_parameters(hook) if looks else nullcontext()

    def watch_writes(self, module: LightningModule) -> None:
        """Refuse what the module would write into its weights in vain. They are sharded by now."""
        stage, name, compiler = self.plan.strategy.zero_stage, self.plan.strategy.name, self.plan.compile.name
        steps = {step: reads_in_step(module, step) for step in _STEPS} if stage else {}
        self.reads = {step: found for step, found in steps.items() if found is not None}
        if self.hides_weights and compiler == "none":
            self.lost_writes = LostWrites(module, name, stage, self.reads if stage == 3 else {})
        elif self.reads and stage == 3:
            step, found = next(iter(self.reads.items()))
            tell_of_reads(module, name, step, found, f"compile={compiler}")

    def watched(self, step: str, run: Callable[[], Any]) -> Any:
        """Call `run`, which is a step of this name."""
        if self.lost_writes is None:
            return run()
        with self.lost_writes.in_step(step, from_the_start=self.plan.resume is None):
            return run()

    def watched_set_up(self) -> AbstractContextManager[Any]:
        """What is put around `configure_optimizers` if training does not begin with the weights that are there then."""
        is_kept = self.plan.strategy.zero_stage < 3 and not self.plan.precision.is_mixed
        if self.lost_writes is None or is_kept or self.plan.resume is not None:
            return nullcontext()
        return self.lost_writes.in_set_up()

    def outside_steps(self) -> list[AbstractContextManager[None]]:
        """What is put around hooks of the module and of callbacks, in which layers may run on anything."""
        return [
            *([] if self.layers_in_hooks is None else [self.layers_in_hooks.found()]),
            *([] if self.context is None else [whole_sequences()]),
        ]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return super().reduce(tensor, self._counting_once(group), reduce_op)  # type: ignore[safe-super]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return super().all_gather(tensor, self._counting_once(group), sync_grads)  # type: ignore[safe-super]

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

    @contextmanager
    def gathered_weights(self) -> Iterator[None]:
        """Inside, forward passes without gradients find all weights gathered, if every rank has memory for that.

        Layers that training has compiled are not compiled again for each length of a text. Collective.
        """
        # A stance imports the compiler, which a run without it does not wait for.
        eager: Any = torch.compiler.set_stance("force_eager") if self.plan.compile.name == "layer" else nullcontext()
        needed = self._bytes_to_gather()
        has_room = needed == 0 or bool(smallest(int(needed <= _free_bytes(self.root_device)), self.file_group))
        with eager, self._gathering() if needed and has_room else nullcontext():
            yield

    def _bytes_to_gather(self) -> int:
        """How much more memory a rank needs for all weights. Every rank gives 0, or none does."""
        return 0

    def _gathering(self) -> AbstractContextManager[None]:
        return nullcontext()


def _free_bytes(device: torch.device) -> int:
    """The memory that this rank may still use; below 0 where there is none to spare."""
    if device.type != "cpu":
        free, total = accelerator.free_and_total(device)
        return int(free + accelerator.reserved(device) - accelerator.allocated(device) - _SPARE * total)
    free, total = (os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
    return int((free - _SPARE * total) / int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
