"""Weights in the hooks of a step and of a batch, and what ZeRO has put out of reach there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn

from shardwise import gathered_weights
from shardwise.errors import ConfigError
from tests.distributed.test_drawn_alike import plan_of
from tests.harness.cells import fit
from tests.harness.modules import Layer
from tests.harness.processes import spawn
from tests.harness.selected import needed

STRATEGIES = {
    "ddp": ["strategy=ddp"],
    "fsdp": ["strategy=fsdp"],
    "zero1": ["strategy=zero1"],
    "zero3": ["strategy=zero3", "strategy.persistence_threshold_elements=0"],
}
LOOKS = ("optimizer_step", "on_before_optimizer_step", "lr_scheduler_step", "on_train_batch_end", "gathered_by_word",
         "asks_for_device", "weight_of_a_layer")  # fmt: skip
REFUSED = {  # what a run does → what it is told under ZeRO
    "adds_group": "weights are added to the groups of Sees's SGD while the run goes on",
    "adds_to_lightnings": "weights are added to the groups of Sees's SGD while the run goes on",
    "removes_group": "weights are added to, or taken out of, the groups of Sees's SGD while the run goes on",
    "writes": "Sees or a callback writes into head.weight, head.bias in",
    "state_after_step": "a hook on the steps of the optimizer looks at optimizer.state",
    "gradients_before_step": "a hook on the steps of the optimizer looks at gradients",
}
ABSENT = {  # what zero3 alone refuses
    "reads": "Sees.training_step (test_weights_in_steps.py, line ",
    "reads_validating": "Sees.validation_step (test_weights_in_steps.py, line ",
    "reads_in_batch": "on_train_batch_start of Sees or of a callback (test_weights_in_steps.py, line ",
}
SEEN: list[float] = []


def norm(weights: Any) -> float:
    return float(sum(p.detach().double().norm() for p in weights))


class Sees(LightningModule):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.net, self.head = what, nn.Sequential(Layer(4), Layer(4)), nn.Linear(4, 4)
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def look(self, what: str) -> None:
        if what == self.what:
            with gathered_weights(self):
                SEEN.append(norm(p for p in self.parameters() if p.requires_grad))
                self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        for old, new in zip(self.average.parameters(), self.net.parameters(), strict=True):
            old.lerp_(new, 0.3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.what == "reads" and self.global_step == 2:
            SEEN.append(norm(self.parameters()))
        if self.what == "gathers":
            self.look("gathers")
        if self.what == "asks_for_device":
            SEEN.extend(float(p.requires_grad) for p in self.parameters())
            assert next(self.parameters()).device == batch[1].device
        if self.what == "weight_of_a_layer":
            SEEN.append(float(self.head(torch.ones(1, 4)).detach().norm()))
        return self.head(self.net(batch[1])).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.what == "reads_validating":
            SEEN.append(norm(self.parameters()))

    def configure_optimizers(self) -> Any:
        groups = [{"params": list(self.net.parameters())}, {"params": list(self.head.parameters()), "lr": 0.2}]
        self.made = optimizer = torch.optim.SGD(groups, 0.1, momentum=0.9)
        if self.what == "state_after_step":
            optimizer.register_step_post_hook(lambda *_: SEEN.append(len(optimizer.state)))
        if self.what == "gradients_before_step":
            optimizer.register_step_pre_hook(self.before)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def before(self, optimizer: Any, *_: Any) -> None:
        SEEN.extend(float(p.grad.norm()) for p in self.parameters() if p.grad is not None)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.look("optimizer_step")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look("on_before_optimizer_step")

    def lr_scheduler_step(self, *args: Any) -> None:
        self.look("lr_scheduler_step")
        super().lr_scheduler_step(*args)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.what == "reads_in_batch":
            SEEN.append(norm(self.parameters()))
        if self.global_step != 2 or batch_idx % 2:
            return
        optimizer: Any = self.optimizers()
        if self.what == "adds_group":
            self.made.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        if self.what == "adds_to_lightnings":
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        if self.what == "removes_group":
            self.made.param_groups.pop()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.look("on_train_batch_end")
        if self.what == "gathered_by_word":
            SEEN.append(norm(p for p in self.parameters() if p.requires_grad))
        with torch.no_grad():
            if self.what == "writes":
                with gathered_weights(self):
                    for p in self.head.parameters():
                        p.mul_(0.9)
            if self.what == "a_layer_runs":
                with gathered_weights(self):
                    for p in self.average.parameters():
                        p.mul_(0.9)
                    x = self.average(torch.ones(1, 4))  # has what was written
                    SEEN.append(float(self.head(self.net(x)).norm()))
                    self.average[0].linear.weight.add_(0.1)  # type: ignore[union-attr, operator]
                    SEEN.append(norm(self.average.parameters()))


class OfOthers(torch.optim.AdamW):
    """Its step does nothing of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class WithOwnOptimizer(Sees):
    def configure_optimizers(self) -> Any:
        return OfOthers([p for p in self.parameters() if p.requires_grad], 0.01)


def train(folder: Path, strategy: str, cases: set[str] | None) -> dict[str, Any]:
    """In each rank."""
    found: dict[str, Any] = {}
    every = (*LOOKS, *REFUSED, *ABSENT, "own_optimizer", "gathers", "a_layer_runs")
    for what in (what for what in every if cases is None or what in cases):
        SEEN.clear()
        module = "WithOwnOptimizer" if what == "own_optimizer" else "Sees"
        words = ["whole_weights_in=[on_train_batch_end]"] if what == "gathered_by_word" else []
        plan = plan_of(folder / what, module, f"module.what={what}", *STRATEGIES[strategy], "units=[Layer]",
                       "max_steps=4", "checkpoint=none", *words, file=__name__)  # fmt: skip
        try:
            found[what] = fit(plan)["final"], list(SEEN)
        except ConfigError as error:
            found[what] = str(error)
    return found


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    cases = needed(request, "what")
    return {name: spawn(2, train, tmp_path_factory.mktemp(name), name, cases) for name in STRATEGIES}


def assert_same(found: Any, truth: Any) -> None:
    assert not isinstance(found, str), found
    assert found[1] == pytest.approx(truth[1], rel=1e-5)
    for name, weight in truth[0].items():
        assert torch.allclose(found[0][name], weight, atol=1e-6), name


@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero3"])
@pytest.mark.parametrize("what", LOOKS)
def test_gathered_weights_are_those_of_ddp(runs: Any, what: str, strategy: str) -> None:
    for rank, truth in zip(runs[strategy], runs["ddp"], strict=True):
        assert truth[what][1]
        assert_same(rank[what], truth[what])


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@pytest.mark.parametrize("what", REFUSED)
def test_what_deepspeed_would_lose_is_refused(runs: Any, what: str, strategy: str) -> None:
    for rank in runs[strategy]:
        assert isinstance(rank[what], str) and REFUSED[what] in rank[what] and strategy in rank[what], rank[what]


@pytest.mark.parametrize("what", ["writes"])
def test_what_is_written_is_kept_under_fsdp(runs: Any, what: str) -> None:
    for rank, truth in zip(runs["fsdp"], runs["ddp"], strict=True):
        assert_same(rank[what], truth[what])


@pytest.mark.parametrize("what", ["a_layer_runs"])
def test_a_layer_that_runs_has_what_was_written(runs: Any, what: str) -> None:
    for strategy in ("fsdp", "zero1"):
        for rank, truth in zip(runs[strategy], runs["ddp"], strict=True):
            assert_same(rank[what], truth[what])
    assert (
        "reads the weight average.0.linear.weight, which is not there" in runs["zero3"][0][what]
    )  # the layer freed it


@pytest.mark.parametrize("what", ABSENT)
def test_reading_an_empty_weight_is_refused(runs: Any, what: str) -> None:
    for rank in runs["zero3"]:
        told = rank[what]
        assert isinstance(told, str) and told.startswith(ABSENT[what]), told
        assert "reads the weight" in told and "put `with shardwise.gathered_weights(module):` around it" in told
    for strategy in ("fsdp", "zero1"):
        for rank, truth in zip(runs[strategy], runs["ddp"], strict=True):
            assert_same(rank[what], truth[what])


@pytest.mark.parametrize("what", ["gathers"])
def test_weights_are_not_gathered_within_a_step(runs: Any, what: str) -> None:
    assert not isinstance(runs["ddp"][0][what], str)
    for strategy in ("fsdp", "zero1", "zero3"):
        assert runs[strategy][0][what].startswith(
            f"gathered_weights in training_step of Sees: there layers gather their own weights under {strategy}; use it"
        )


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@pytest.mark.parametrize("what", ["own_optimizer"])
def test_an_optimizer_that_only_calls_torchs_step_is_torchs(runs: Any, what: str, strategy: str) -> None:
    for rank, truth in zip(runs[strategy], runs["ddp"], strict=True):
        assert not isinstance(rank[what], str), rank[what]
        for name, weight in truth[what][0].items():
            assert torch.allclose(rank[what][0][name], weight, atol=1e-5), name
