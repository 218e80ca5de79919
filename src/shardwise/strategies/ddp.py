"""`ddp`: every rank has a whole copy of the model, and DistributedDataParallel averages the gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel as DDP

from shardwise.checkpoint.files import load_rest
from shardwise.distributed.dtensor import CopiedMatrices
from shardwise.distributed.mesh import broadcast_from_rank_zero
from shardwise.errors import ConfigError
from shardwise.optim.optimizers import NewWeights, use_matrices
from shardwise.plan import Plan
from shardwise.protocols import wants_channels_last
from shardwise.strategies.base import PlannedStrategy
from shardwise.strategies.refusals import FrozenForGood
from shardwise.weights.initialize import Materializer

# torch 2.13 renamed this argument.
_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in signature(DDP).parameters else "broadcast_buffers"


def mean_in_fp32(group, bucket):  # type: ignore[no-untyped-def] # torch accepts only its own annotations, or none
    """Average 16-bit gradients in fp32, as the other strategies do."""
    whole = bucket.buffer().float().div_(group.size())
    work = dist.all_reduce(whole, group=group, async_op=True)
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


class DdpStrategy(PlannedStrategy, DDPStrategy):
    """DDPStrategy of Lightning. In mixed precision each unit computes on copies of its parameters, as under FSDP."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(
            timeout=timedelta(minutes=plan.strategy.timeout_minutes),
            # What is frozen in the first epochs takes no part until then.
            find_unused_parameters=plan.strategy.find_unused_parameters or plan.freeze_epochs is not None,
            bucket_cap_mb=plan.strategy.bucket_cap_mb,
            gradient_as_bucket_view=False,  # views of buckets could not be freed after the step
            **cast(dict[str, Any], {_BUFFERS: False}),  # PlannedStrategy synchronizes buffers
        )
        self._use(plan)
        self._new_weights = NewWeights()
        self._order: list[int] = []  # the order in which gradients arrived in the first step
        self._with_own_gradient: set[nn.Parameter] = set()  # in this window, apart from the memory of a recorded graph

    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        self._begin_setup(module)
        Materializer(module, self.root_device, self.plan.seed, self.mesh.group("world")).materialize(module)
        broadcast_from_rank_zero(list(module.buffers()), self.mesh.group("world"))
        if wants_channels_last(module):  # otherwise every step would rearrange the weights of convolutions
            for parameter in module.parameters():
                if parameter.ndim == 4:
                    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        if not module.automatic_optimization:
            if self.plan.compile.cudagraphs:
                raise ConfigError(
                    f"compile.cudagraphs=true: {self.module_name} optimizes by hand, and may still need what a replay "
                    f"writes over; leave it out"
                )
            self._ddp_kwargs["find_unused_parameters"] = True  # each loss uses only some of the networks
        self.prepare_float8(module)
        self.parallelize(module, self.units, casts_inputs=True)
        super().setup(trainer)
        for optimizer in self.optimizers if self.world_size > 1 else ():
            use_matrices(optimizer, lambda: CopiedMatrices(self.mesh.group("loss")))
        self._end_setup()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.plan.accumulate_grad_batches == 0 and self.module.automatic_optimization:
            self._new_weights.forget_gradients(self.optimizers)
        super().on_train_batch_start(batch, batch_idx)

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().backward(*args, **kwargs)
        if self.world_size > 1:
            with self._explaining_unused():  # at once: other ranks may wait for what this one does not reduce
                cast(DDP, self.model)._check_reducer_finalized()  # type: ignore[no-untyped-call]
        if self.plan.compile.cudagraphs and not self.step.window.is_complete:
            # They lie in memory of a recorded graph, which the next micro-batch's replay writes over.
            if len(self.step.window.losses) == 1:
                self._with_own_gradient.clear()
            for p in self.module.parameters():
                if p.grad is not None and p not in self._with_own_gradient:
                    p.grad = p.grad.clone()
                    self._with_own_gradient.add(p)
        return loss

    def keeps_whole(self, parameter: nn.Parameter) -> bool:
        return True

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._explaining_unused():
            return super().training_step(*args, **kwargs)

    @contextmanager
    def _explaining_unused(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if "find_unused_parameters" not in str(error):
                raise
            raise ConfigError(
                f"{self.module_name} has parameters that took no part in the loss: give "
                f"strategy.find_unused_parameters=true, or leave them out of the module"
            ) from None

    def configure_ddp(self) -> None:
        self.runs_inside_forward = self.world_size > 1
        if self.world_size > 1:
            super().configure_ddp()
            self.step.freeze(FrozenForGood(self.module, self.plan.strategy.name))
        # With one rank there is nothing to average, and DDP would only copy the gradients.

    def _setup_model(self, model: Module) -> DDP:
        # Lightning wraps on a side stream, which would have to wait for the main one in every backward (torch warns).
        with _buckets_as_before(self._order_before(), self._ddp_kwargs["bucket_cap_mb"]):
            ddp = DDP(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)
        if self.plan.precision.parameter_dtype == "bfloat16":
            ddp.register_comm_hook(self.mesh.group("loss"), mean_in_fp32)
        self._note_order(ddp)
        return ddp

    # After its first step DDP puts gradients into buckets in the order in which they arrived. The buckets decide the
    # last bit of the sums, so a run that is resumed needs the same ones from its first step on.

    def _note_order(self, ddp: DDP) -> None:
        if self._ddp_kwargs["find_unused_parameters"]:
            return  # then DDP does not change its buckets
        trained = [p for p in ddp.module.parameters() if p.requires_grad]
        handles: list[Any] = []

        def note(number: int, _: Tensor) -> None:
            self._order.append(number)
            if len(self._order) == len(trained):
                for handle in handles:
                    handle.remove()

        handles += [p.register_post_accumulate_grad_hook(partial(note, i)) for i, p in enumerate(trained)]

    def _gradient_order(self) -> list[int]:
        return self._order

    def _order_before(self) -> list[int]:
        if self.plan.resume is None or not self.state.is_training:
            return []
        with self.state.loading():
            order: list[int] = load_rest(Path(self.plan.resume))[0]["gradient_order"]
        assert self.lightning_module is not None
        trained = sum(p.requires_grad for p in self.lightning_module.parameters())
        return order if sorted(order) == list(range(trained)) else []


@contextmanager
def _buckets_as_before(order: list[int], cap_mb: int) -> Iterator[None]:
    """Let a DDP that is made inside start with the buckets that it has after its first step."""
    torch_dist: Any = dist
    assign = torch_dist._compute_bucket_assignment_by_size

    def in_order(parameters: list[Tensor], _: Any, sparse: list[bool]) -> Any:
        # All buckets have one limit. torch has a smaller one for the first bucket only if no cap is given.
        buckets, sizes = assign([parameters[i] for i in order], [cap_mb * 2**20], [sparse[i] for i in order], order)
        return buckets[::-1], sizes[::-1]  # DDP reverses the list

    with patch.object(dist, "_compute_bucket_assignment_by_size", in_order) if order else nullcontext():
        yield
