"""What one step sends between the ranks, in which dtype, and how much of the model's state a rank holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from shardwise.plan import Plan
from tests.distributed.cells import fit
from tests.distributed.parity import STRATEGIES, Cell, Configuration, plan_of

WINDOW = 2  # the third step: DDP lays out its buckets anew after the first, and ZeRO-3 learns the order of layers
# Weights that no strategy keeps whole for being small, and no size that ranks divide
SIZES = ["+module.width=331", "+module.hidden=337"]
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
# torch's operators, the same over gloo and NCCL; the backend's own record inside each has the shape
KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_": "reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all",
}


class Traffic(Callback):
    """Records one accumulation window on this rank.

    `calls` and `elements` by kind: elements that go in, per rank. What carries at most a handful (norms, weights of
    windows, whether to stop) is counted under "small". `dtypes`: of parameters between steps, of those that a layer
    computes with, of what is reduced. `held`: this rank's share of all elements of the parameters and of the
    optimizer's state between two steps.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.calls: dict[str, int] = {}
        self.elements: dict[str, int] = {}
        self.dtypes: dict[str, list[str]] = {}
        self.held: dict[str, float] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == WINDOW * self.plan.accumulate_grad_batches:
            layer: Any = pl_module.layers[0]  # type: ignore[index,union-attr]
            layer.up.register_forward_hook(self._look_at_layer)
            self.profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            self.profile.start()

    def _look_at_layer(self, layer: Any, inputs: Any, out: Tensor) -> None:
        self.dtypes["compute"] = [str(layer.weight.dtype).removeprefix("torch.")]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 != (WINDOW + 1) * self.plan.accumulate_grad_batches:
            return
        self.profile.stop()
        self._count(self.profile.profiler.kineto_results.events())  # type: ignore[union-attr]
        strategy: Any = trainer.strategy
        self.dtypes["parameters"] = names_of({part.dtype for part in strategy.master_shards().values()})
        whole = sum(p.numel() for p in strategy.full_parameters().values())
        self.held["parameters"] = sum(map(elements_held, pl_module.parameters())) / whole
        optimizer = getattr(trainer.optimizers[0], "optimizer", trainer.optimizers[0])
        state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor) and t.ndim]
        trained = sum(strategy.full_parameters()[n].numel() for n, p in pl_module.named_parameters() if p.requires_grad)
        self.held["optimizer state"] = sum(map(elements_held, state)) / trained / 2  # two moments of AdamW

    def _count(self, events: Any) -> None:
        sent = sorted((e for e in events if e.name().startswith(("c10d::", "gloo:", "nccl:"))), key=lambda e: e.start_ns())
        reduced: set[str] = set()
        for number, event in enumerate(sent):
            kind = KINDS.get(event.name().removeprefix("c10d::"))
            if kind is None:
                continue
            inside = next(e for e in sent[number + 1 :] if not e.name().startswith("c10d::"))
            size = sum(torch.Size(shape).numel() for shape in inside.shapes() if shape)
            word = kind if size > 8 else "small"
            self.calls[word] = self.calls.get(word, 0) + 1
            self.elements[word] = self.elements.get(word, 0) + size
            if word in REDUCING:
                reduced.update(name for name in inside.dtypes() if name)
        self.dtypes["reduction"] = sorted(name.removeprefix("c10::").lower() for name in reduced)


def names_of(dtypes: set[torch.dtype]) -> list[str]:
    return sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)


def elements_held(tensor: Tensor) -> int:
    if isinstance(tensor, DTensor):
        return tensor.to_local().numel()
    shard = getattr(tensor, "ds_tensor", None)  # ZeRO-3's, beside a parameter that is gathered or empty
    return tensor.numel() + (0 if shard is None else shard.numel())


def run_traffic(folder: Path, ranks: int, wanted: list[tuple[str, int, str]], accelerator: str) -> list[dict[str, Any]]:
    """In each rank: strategy × accumulation × precision, three steps each."""
    rows = []
    for number, (strategy, accumulate, precision) in enumerate(wanted):
        made = Configuration("adamw", accumulate, True, forks=False, precision=precision)
        plan = plan_of(folder / f"traffic-{number}", ranks, Cell(strategy, made), *SIZES, f"max_steps={WINDOW + 1}",
                       accelerator=accelerator)  # fmt: skip
        traffic = Traffic(plan)
        fit(plan, traffic)
        rows.append({"strategy": strategy, "accumulate": accumulate, "precision": precision, "calls": traffic.calls,
                     "elements": traffic.elements, "dtypes": traffic.dtypes, "held": traffic.held})  # fmt: skip
    return rows
