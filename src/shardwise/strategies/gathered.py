"""What a module asks of all ranks: to gather sharded weights for many forward passes, to reduce its own numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise import accelerator
from shardwise.data.agreement import smallest
from shardwise.distributed.collectives import sum_over
from shardwise.distributed.mesh import Mesh
from shardwise.errors import ConfigError
from shardwise.lightning_internals.hooks import current_hook
from shardwise.nn.sequence_parts import whole_sequences
from shardwise.plan import Plan
from shardwise.step.layers_in_hooks import LayersInHooks

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_SPARE = 0.1  # of all memory is left for what the forward passes need


class GatheringHooks(Strategy):
    """Implements `whole_weights` and `kept_gathered` of protocols.py, which a strategy that shards weights extends."""

    plan: Plan
    mesh: Mesh
    layers_in_hooks: LayersInHooks | None = None  # in low precision
    hides_weights: bool
    is_global_zero: bool
    module_name: str
    _is_whole = _told_of_no_room = False  # whether weights are whole at the moment
    shared: Any  # what divides sequences over ranks, if anything does

    def file_group(self) -> dist.ProcessGroup | None:
        """The group of all hosts, which agree on whether memory suffices."""
        raise NotImplementedError

    def whole_weights(self) -> AbstractContextManager[None]:
        """Make all weights whole inside, as they are under ddp. Collective.

        Raises:
            ConfigError: in a step, whose layers gather their own weights.
        """
        assert self.lightning_module is not None
        hook = current_hook(self.lightning_module) or "a hook"
        if hook in _STEPS and self.hides_weights:
            raise ConfigError(
                f"gathered_weights in {hook} of {self.module_name}: there layers gather their own weights under "
                f"{self.plan.strategy.name}; use it in a hook, on_train_batch_start or on_train_batch_end, say"
            )
        return nullcontext() if self._is_whole else self._whole_in(hook)

    @contextmanager
    def _whole_in(self, hook: str) -> Iterator[None]:
        self._is_whole = True
        try:
            with self.whole_parameters(hook):
                yield
        finally:
            self._is_whole = False

    @contextmanager
    def whole_parameters(self, hook: str) -> Iterator[None]:
        """What makes all weights whole around a hook of this name. Collective."""
        yield

    def around_hook(self, hook: str, *, whole: bool) -> AbstractContextManager[None]:
        """What is put around a hook of the module or of a callback. `whole`: it sees whole weights."""
        return self._whole_in(hook) if whole and not self._is_whole and self._has_room(hook) else nullcontext()

    def _has_room(self, hook: str) -> bool:
        """Whether every rank has memory for whole weights; if not, `hook` sees what there is. Collective."""
        needed = self._bytes_of_whole()
        if smallest(int(needed <= max(0, _free_bytes(self.root_device))), self.file_group):
            return True
        if not self._told_of_no_room and self.is_global_zero:
            self._told_of_no_room = True
            print(
                f"{hook} sees parts of weights: whole ones are {needed / 1e9:.1f} GB, more than a rank has left",
                flush=True,
            )
        return False

    def _bytes_of_whole(self) -> int:
        """How much more memory a rank needs for whole weights."""
        assert self.lightning_module is not None
        return sum(p.numel() * p.itemsize for p in self.lightning_module.parameters() if isinstance(p, DTensor))

    def outside_steps(self) -> list[AbstractContextManager[None]]:
        """What is put around hooks of the module and of callbacks, in which layers may run on anything."""
        return [
            *([] if self.layers_in_hooks is None else [self.layers_in_hooks.found()]),
            *([] if self.shared is None or self.shared.context is None else [whole_sequences()]),
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
    def kept_gathered(self) -> Iterator[None]:
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
