"""Runs in which a rank shares its parameters with no other: as they are, and as FSDP2 runs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shardwise.plan import Plan
from shardwise.strategies import fsdp_alone
from shardwise.strategies.base import strategy_of
from tests.harness.anybodys_module import plan_for
from tests.harness.cells import cell_plan, fit
from tests.harness.parity import CLIP, Cell, plan_of

LANGUAGE = ["max_steps=4", "validate_every_n_steps=2", "checkpoint=none", "global_batch_size=8", "micro_batch_size=2",
            "strategy=fsdp", "model.n_layers=4", "model.n_heads=4", "model.n_kv_heads=2",
            "model.ffn_dim=48"]  # fmt: skip
TENSOR, PIPELINE = "strategy.tensor_parallel_size=2", "strategy.pipeline_parallel_size=2"
COMPILED = ["precision=bf16", "compile=layer"]
# Name → ranks, and the words of a language model; or the module that runs
CELLS: dict[str, tuple[int, list[str] | str]] = {
    "everything": (1, []),
    "odd hooks": (1, "Odd"),
    "tensor": (2, [*LANGUAGE, TENSOR, "precision=fp32", "activation_checkpointing=full"]),
    "pipeline": (2, [*LANGUAGE, PIPELINE, "precision=fp32", "model.tie_embeddings=true"]),
    "interleaved": (2, [*LANGUAGE, PIPELINE, "precision=fp32", "strategy.pipeline_schedule=interleaved",
                        "strategy.pipeline_chunks=2"]),
    "tensor, bf16": (2, [*LANGUAGE, TENSOR, *COMPILED]),
}  # fmt: skip


class Inside(nn.Module):
    """A layer that computes a part of itself again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(checkpoint(lambda y: torch.tanh(self.up(y)), x, use_reentrant=False))


class Odd(LightningModule):
    """Does in hooks what is allowed under `fsdp`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(6, 6), nn.Sequential(*(Inside() for _ in range(3)))
        self.last = nn.Linear(6, 1)
        self.last.requires_grad_(False)
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Any:
        return self.last(self.layers(self.first(x)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert isinstance(self.first.weight, nn.Parameter) and not isinstance(self.first.weight.data, DTensor)
        assert isinstance(self.layers[0].up.weight, DTensor), "a layer's own weights are whole while it runs"
        loss: Tensor = self(batch[0]).square().mean()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("validation/loss", self(batch[0]).square().mean())

    def on_train_epoch_start(self) -> None:
        self.seen.append(float(self(torch.ones(2, 6)).sum()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.last.requires_grad_(batch_idx >= 2)
        own: Any = strategy_of(self.trainer)
        for parameter in () if own.own is None else own.own._all():
            held = parameter.shard.grad is not None
            assert parameter.own.grad is None and held == (batch_idx % 2 == 1 and parameter.shard.requires_grad), held

    def on_train_end(self) -> None:
        assert self.counted == 8, "once in each micro-batch"

    def on_after_backward(self) -> None:
        for p in self.parameters():
            assert isinstance(p, DTensor) and (p.grad is None or isinstance(p.grad, DTensor))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.first.bias.mul_(0.9)

    def configure_optimizers(self) -> Any:
        self.counted = 0

        def count(weight: Tensor) -> None:
            assert isinstance(weight, DTensor) and isinstance(weight.grad, DTensor)
            self.counted += 1

        self.first.weight.register_post_accumulate_grad_hook(count)
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


def plan_for_cell(name: str, folder: Path) -> Plan:
    ranks, words = CELLS[name]
    if isinstance(words, str):
        plan = plan_for(folder, "Bare", ranks, f"module._target_=tests.harness.alone.{words}", "strategy=fsdp")
        return dataclasses.replace(plan, gradient_clip_val=0.05)
    if words:
        return cell_plan(folder, ranks, *words)
    return plan_of(Cell("fsdp", "fp32", "adamw", 2, CLIP, True), ranks, folder)


@contextmanager
def by_fsdp2() -> Iterator[None]:
    with patch.object(fsdp_alone, "is_alone", lambda *_: False):
        yield


def train(folder: Path, ranks: int) -> dict[str, Any]:
    """In each rank: every cell as it is, and as FSDP2 runs it."""
    found = {}
    for number, name in enumerate(name for name, (n, _) in CELLS.items() if n == ranks):
        plan = plan_for_cell(name, folder / str(number))
        wraps = fsdp_alone.OwnParameters
        with (
            patch.object(fsdp_alone, "USED", True),
            patch.object(fsdp_alone, "OwnParameters", wraps=wraps) as made,
        ):
            own = fit(plan) | {"alone": made.call_count}
        other = Path(plan.run_dir).with_name(f"{number}-fsdp2")
        other.mkdir(exist_ok=True)
        with by_fsdp2():
            found[name] = [own, fit(dataclasses.replace(plan, run_dir=str(other)))]
    return found
