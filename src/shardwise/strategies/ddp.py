"""`ddp`: a whole copy of the model on every rank, gradients averaged by DistributedDataParallel."""

from __future__ import annotations

from datetime import timedelta
from inspect import signature
from typing import Any, cast

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel as DDP

from shardwise.initialize import Materializer, broadcast_from_rank_zero
from shardwise.plan import Plan
from shardwise.precision import cast_parameters, dtype_of
from shardwise.strategies.common import PlannedStrategy

# torch 2.13 renamed the argument
_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in signature(DDP).parameters else "broadcast_buffers"


class DdpStrategy(PlannedStrategy, DDPStrategy):
    """Lightning's DDPStrategy; in mixed precision each unit computes on copies of its parameters, as under FSDP."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(
            timeout=timedelta(minutes=plan.strategy.timeout_minutes),
            find_unused_parameters=plan.strategy.find_unused_parameters,
            bucket_cap_mb=plan.strategy.bucket_cap_mb,
            gradient_as_bucket_view=False,  # gradients are freed after the step; as views they could not be
            **cast(dict[str, Any], {_BUFFERS: False}),  # one rule everywhere: see PlannedStrategy
        )
        self._use(plan)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # setup makes the parameters: what was loaded before would be initialised over

    def setup(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        units = self._find_units(module)
        Materializer(module, self.root_device, self.plan.seed).place(module)
        broadcast_from_rank_zero(list(module.buffers()))
        precision = self.plan.precision
        if precision.compute_dtype != precision.parameter_dtype:
            cast_parameters(module, units, dtype_of(precision.compute_dtype))
        super().setup(trainer)

    def _setup_model(self, model: Module) -> DDP:
        # Lightning wraps on a side stream, which then has to wait for the main one in every backward (torch warns).
        return DDP(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return super().load_checkpoint(checkpoint_path, weights_only=True)
