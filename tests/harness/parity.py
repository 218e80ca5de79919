"""What the parity tests and `make parity` run: strategies × optimizers × accumulation × clipping, one small model."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from shardwise.config.compose import compose
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from tests.harness.cells import fit
from tests.harness.everything import BATCH, Network, rows
from tests.harness.reference import WEIGHT_DECAY, plain_loop, update_deviation

STEPS = 20
CLIP = 0.1  # far below every gradient norm of these runs
BOUNDS = {"fp64": 1e-9, "fp32": 1e-4}
OPTIMIZERS = {"sgd": ["optimizer=sgd", "optimizer.lr=0.3"], "adamw": ["optimizer=adamw", "optimizer.lr=0.01"]}
STRATEGIES = {
    "ddp": ["strategy=ddp"],
    "fsdp": ["strategy=fsdp"],
    "fsdp, parameters kept": ["strategy=fsdp", "strategy.reshard_after_forward=false"],
    "fsdp, sync deferred": ["strategy=fsdp", "strategy.defer_gradient_sync=true"],
    "fsdp_hybrid": ["strategy=fsdp_hybrid", "strategy.shard_size=2"],
    "fsdp_hybrid, replicas only": ["strategy=fsdp_hybrid", "strategy.shard_size=1"],
    "zero1": ["strategy=zero1"],
    "zero1, optimizer offloaded": ["strategy=zero1", "strategy.offload_optimizer=true"],
    "zero2": ["strategy=zero2"],
    "zero2, optimizer offloaded": ["strategy=zero2", "strategy.offload_optimizer=true"],
    "zero3": ["strategy=zero3"],
    "zero3, optimizer offloaded": ["strategy=zero3", "strategy.offload_optimizer=true"],
    "zero3, all offloaded": [
        "strategy=zero3",
        "strategy.offload_optimizer=true",
        "strategy.offload_parameters=true",
    ],
}


@dataclass(frozen=True)
class Cell:
    strategy: str
    precision: str
    optimizer: str
    accumulate: int  # micro-batches of a step, on every rank
    clip: float | None
    occasional: bool  # with weights that not every step needs; without is the path without find_unused_parameters

    def words(self, ranks: int) -> list[str]:
        finds = self.occasional and not self.strategy.startswith("fsdp")
        return [
            *STRATEGIES[self.strategy], *(["strategy.find_unused_parameters=true"] if finds else []),
            f"precision={self.precision}", *OPTIMIZERS[self.optimizer], f"optimizer.weight_decay={WEIGHT_DECAY}",
            f"global_batch_size={BATCH}", f"micro_batch_size={BATCH // ranks // self.accumulate}",
            f"gradient_clip_val={'null' if self.clip is None else self.clip}",
            f"+module.occasional={'true' if self.occasional else 'false'}",
        ]  # fmt: skip


def all_cells(ranks: int) -> list[Cell]:
    """Every strategy, precision and optimizer that can be had on `ranks` ranks."""
    more = [(1, None, True), (4, None, False), (1, CLIP, False)]  # with it, all four of accumulation and clipping
    kinds = [(4, CLIP, True), *(more if ranks == 2 else [])]
    return [
        Cell(strategy, precision, optimizer, *kind)
        for strategy, precision, optimizer, kind in itertools.product(STRATEGIES, BOUNDS, OPTIMIZERS, kinds)
        if not (strategy.startswith("zero") and precision == "fp64")  # its masters are fp32
        if not (strategy == "fsdp_hybrid" and ranks == 1)
        if BATCH % (ranks * kind[0]) == 0  # 8 ranks would have no sample for each of four micro-batches
    ]


def some_cells(ranks: int) -> list[Cell]:
    """What a test has time for: each strategy with all that makes it hard and, on two ranks, the usual path as well."""
    if ranks != 2:
        hard = ("fp32", "sgd" if ranks == 1 else "adamw", 4, CLIP, True)
        cells = [cell for cell in all_cells(ranks) if cell == Cell(cell.strategy, *hard)]
        return [cell for cell in cells if ranks == 1 or "," not in cell.strategy]  # four on two cores: no variants
    kinds = [("fp32", "sgd", 4, CLIP, True), ("fp32", "adamw", 1, None, False)]
    usual = ("adamw", 4, CLIP, False)
    return [
        Cell(strategy, *kind)
        for strategy in STRATEGIES
        for kind in (*kinds, ("fp32" if strategy.startswith("zero") else "fp64", *usual))
    ]


def plan_of(cell: Cell, ranks: int, run_dir: Path, accelerator: str = "cpu", more: Sequence[str] = ()) -> Plan:
    run_dir.mkdir(parents=True, exist_ok=True)
    argv = [
        "recipe=custom", "module._target_=tests.harness.everything.Everything",
        "data._target_=tests.harness.everything.Rows", "+data.batch_size=${micro_batch_size}",
        f"runs_dir={run_dir.parent}", f"name={run_dir.name}", f"accelerator={accelerator}", f"devices={ranks}",
        f"max_steps={STEPS}", "checkpoint=none", "log_every_n_steps=1",
    ]  # fmt: skip
    return make_plan(
        compose([*argv, *cell.words(ranks), *more]).jobs[0].config, Host(cuda_devices=torch.cuda.device_count())
    )


class Collectives(Callback):
    """Counts the collectives of the third step by kind; what moves at most four elements is `scalars`.

    Before the first steps have passed DDP rebuilds its buckets and FSDP learns its order. The loss's weight is reduced
    when its window is fetched: that of the step after this one falls into it.
    """

    STEP = 2

    def __init__(self, accumulate: int) -> None:
        self.first, self.last = self.STEP * accumulate, (self.STEP + 1) * accumulate - 1
        self.profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.STEP and batch_idx % (self.last + 1 - self.first) == 0:
            self.profile.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.STEP + 1 and batch_idx == self.last:
            self.profile.stop()

    def counts(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        for event in self.profile.events() or ():
            if (kind := KINDS.get(event.name)) is not None:
                found[kind] += 1
            elif event.name.endswith(":all_reduce") and numel(event.input_shapes) <= 4:
                found["scalars"] += 1
        found["all_reduce"] -= found["scalars"]
        return {kind: count for kind, count in sorted(found.items()) if count}


# What torch dispatches, from Python or C++, whatever the backend: gloo does some of them by means of others.
KINDS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::reduce_": "reduce",
    "c10d::broadcast_": "broadcast",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::alltoall_": "all_to_all",
    "c10d::barrier": "barrier",
}


def numel(shapes: Any) -> int:
    """Elements of the first tensor."""
    shape = shapes[0] if shapes else []
    return functools.reduce(lambda a, b: a * b, shape, 1)


class Held(Callback):
    """What share of the parameters and of the optimizer's state this rank holds before the second update.

    In this hook weights are not gathered. In `on_train_batch_end` they would be, after every micro-batch.
    """

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 1:
            self.shares = shares_held(trainer)


def shares_held(trainer: Trainer) -> dict[str, float]:
    module, [optimizer] = trainer.lightning_module, trainer.optimizers
    trained = [p for p in module.parameters() if p.requires_grad]
    whole = sum(getattr(p, "ds_numel", p.numel()) for p in trained)
    state = getattr(optimizer, "optimizer", optimizer).state.values()  # DeepSpeed's has torch's inside
    momenta = [v for values in state for v in values.values() if isinstance(v, Tensor) and v.ndim]
    kinds = max(1, len({k for values in state for k, v in values.items() if isinstance(v, Tensor) and v.ndim}))
    return {
        "parameters": sum(local_numel(p) for p in trained) / whole,
        "optimizer_state": sum(map(local_numel, momenta)) / kinds / whole,
    }


def local_numel(tensor: Tensor) -> int:
    if hasattr(tensor, "ds_tensor"):
        return int(tensor.ds_tensor.numel())
    return tensor.to_local().numel() if isinstance(tensor, DTensor) else tensor.numel()


def run_cells(folder: Path, ranks: int, cells: list[Cell], accelerator: str = "cpu") -> dict[Cell, dict[str, Any]]:
    """In each rank: one cell after the other."""
    results = {}
    for number, cell in enumerate(cells):
        plan = plan_of(cell, ranks, folder / str(number), accelerator)
        counted, held = Collectives(cell.accumulate), Held()
        looks = [held] if cell.occasional else [held, counted]  # profiling a step takes a second
        results[cell] = fit(plan, *looks) | {"held": held.shares, "ranks": ranks}
        if not cell.occasional:
            results[cell]["collectives"] = counted.counts()
    return results


@functools.cache
def reference(
    precision: str, optimizer: str, clip: float | None, occasional: bool, zeros: bool = True
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float], list[float]]:
    """Start and final parameters, losses and gradient norms of the plain loop, on the CPU."""
    network = Network(occasional).to({"fp64": torch.float64, "fp32": torch.float32}[precision])
    final, losses, norms = plain_loop(network, rows(), Network.loss_sum, optimizer, STEPS, BATCH, clip, zeros)
    start = {f"network.{name}": p.detach() for name, p in network.named_parameters()}
    return start, {f"network.{name}": p for name, p in final.items()}, losses, norms


def deviations(cell: Cell, result: dict[str, Any]) -> dict[str, Any]:
    """The largest relative deviations from the plain loop, of any tensor's update and of any step's numbers."""
    zeros = cell.strategy.startswith("zero") or (cell.strategy != "ddp" and result["ranks"] > 1)
    start, final, losses, norms = reference(cell.precision, cell.optimizer, cell.clip, cell.occasional, zeros)
    assert all(torch.equal(result["start"][name], tensor) for name, tensor in start.items()), f"{cell} starts elsewhere"
    frozen = [name for name in start if torch.equal(start[name], final[name])]
    assert len(frozen) == 5 and all(torch.equal(result["final"][name], start[name]) for name in frozen), cell
    trained = [name for name in start if name not in frozen]
    updates = update_deviation(*({name: state[name] for name in trained} for state in (start, result["final"], final)))
    worst = max(updates, key=updates.__getitem__)
    return {
        "update": updates[worst],
        "tensor": worst,
        "loss": largest(result["losses"], losses),
        "gradient_norm": largest(result["norms"], norms),
    }


def largest(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))
