"""What a step writes into weights is kept, or refused by strategies that would lose it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor, nn

from shardwise.errors import ConfigError
from tests.distributed.test_drawn_alike import plan_of
from tests.harness.cells import fit
from tests.harness.modules import Layer
from tests.harness.processes import spawn

HOW = ("assigned", "in_place", "limited", "by_teacher", "shards_alone", "nothing", "by_method")
STRATEGIES = ("ddp", "fsdp", "zero1", "zero3")
REFUSED = {  # what a strategy would lose; zero1 leaves weights alone that are not trained
    "ddp": (), "fsdp": ("in_place", "limited"), "zero1": ("in_place", "limited"),
    "zero3": ("assigned", "in_place", "limited", "shards_alone"),
}  # fmt: skip


class Writes(LightningModule):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.net, self.head = how, nn.Sequential(Layer(4)), nn.Linear(4, 4)
        self.table = nn.Embedding(4, 4, max_norm=0.1 if how == "limited" else None)
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for old, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            old.mul_(0.9).add_(new, alpha=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.how == "assigned":
            bias = self.teacher[0].linear.bias
            bias.data = bias.data * 0.9
        if self.how == "in_place":
            self.head.weight.data.copy_(F.normalize(self.head.weight.data))
        if self.how == "shards_alone":
            self.follow()
        if self.how == "by_method":  # the layer is not called
            return self.net[0].linear(batch[1]).square().mean()
        x = (
            self.head(self.net(batch[1]))
            + self.table(torch.arange(len(batch[1]), device=batch[1].device))
            + self.teacher(batch[1])
        )
        return x.square().mean()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.how == "by_teacher":
            self.follow()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)


def train(folder: Path, strategy: str) -> dict[str, Any]:
    """In each rank."""
    found: dict[str, Any] = {}
    for how in HOW:
        words = [f"module.how={how}", f"strategy={strategy}", "units=[Layer]", "max_steps=3",
                 "global_batch_size=4", "micro_batch_size=2", "max_validation_batches=0",
                 "checkpoint=none"]  # fmt: skip
        try:
            found[how] = fit(plan_of(folder / how, "Writes", *words, file=__name__))["final"]
        except ConfigError as error:
            found[how] = str(error)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return {name: spawn(2, train, tmp_path_factory.mktemp(name), name)[0] for name in STRATEGIES}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_write_is_kept_or_refused(runs: dict[str, dict[str, Any]], strategy: str) -> None:
    for how in HOW:
        found, truth = runs[strategy][how], runs["ddp"][how]
        if how in REFUSED[strategy]:
            assert isinstance(found, str) and found.startswith("training_step writes into the weight "), (how, found)
            assert "test_lost_writes.py, line" in found and f"{strategy} computes with a copy" in found
        elif (strategy, how) == ("fsdp", "by_method"):
            assert "computes with weights outside the forward of the layer" in found and "use units=[]" in found
        elif strategy != "ddp" and how != "by_method":  # the other strategies need weights in each step
            assert not isinstance(found, str), (how, found)
            for name, weight in truth.items():
                assert torch.allclose(found[name], weight, atol=1e-6), (how, name)
