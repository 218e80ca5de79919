"""Weights in the hooks of a step, and what ZeRO has put out of reach there: seen as under ddp, or refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn

from shardwise.errors import ConfigError
from tests.distributed.test_drawn_alike import plan_of
from tests.harness.cells import fit
from tests.harness.modules import Layer
from tests.harness.processes import spawn
from tests.harness.selected import needed

STRATEGIES = {
    "ddp": ["strategy=ddp"],
    "zero1": ["strategy=zero1"],
    "zero2": ["strategy=zero2"],
    "zero3": ["strategy=zero3", "strategy.persistence_threshold_elements=0"],
}
LOOKS = ("optimizer_step", "closure_first", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
         "optimizer_zero_grad", "lr_scheduler_step", "before_step", "after_step", "groups_after_step",
         "groups_in_optimizer_step", "groups_of_batch", "asks_for_device", "weight_of_a_layer", "lightnings_optimizer",
         "skips_a_step")  # fmt: skip
REFUSED = {  # what a run does → what it is told
    "adds_group": "weights are added to the groups of Sees's SGD while the run goes on",
    "adds_to_lightnings": "weights are added to the groups of Sees's SGD while the run goes on",
    "removes_group": "weights are added to, or taken out of, the groups of Sees's SGD while the run goes on",
    "writes_in_optimizer_step": "in optimizer_step: under",
    "writes_after_step": "in a hook on the steps of the optimizer: under",
    "state_after_step": "a hook on the steps of the optimizer looks at optimizer.state",
    "gradients_before_step": "a hook on the steps of the optimizer looks at gradients",
    "late_hook": "a hook on the steps of the optimizer that may look at weights (it uses self) is registered while",
}
ABSENT = {  # what zero3 alone refuses
    "reads": "Sees.training_step (test_weights_in_steps.py, line ",
    "reads_by_layer": "Sees.training_step (test_weights_in_steps.py, line ",
    "reads_groups": "Sees.training_step (test_weights_in_steps.py, line ",
    "reads_validating": "Sees.validation_step (test_weights_in_steps.py, line ",
}
HOOKS = {"after_step", "groups_after_step", "writes_after_step", "state_after_step"}
SEEN: list[float] = []


def norm(weights: Any) -> float:
    return float(sum(p.detach().double().norm() for p in weights))


class Penalty(nn.Module):
    """Has weights of others, which are not its own."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__()
        self.weights = weights

    def value(self, of: nn.Module) -> float:
        return norm(of.parameters())


class Sees(LightningModule):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.net, self.head = what, nn.Sequential(Layer(4), Layer(4)), nn.Linear(4, 4)
        self.penalty = Penalty([])
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def look(self, what: str) -> None:
        if what == self.what:
            SEEN.append(norm(p for p in self.parameters() if p.requires_grad))

    def look_at_groups(self, groups: Any) -> None:
        SEEN.append(norm(p for group in groups for p in group["params"]))

    @torch.no_grad()
    def follow(self) -> None:
        for old, new in zip(self.average.parameters(), self.net.parameters(), strict=True):
            old.lerp_(new, 0.3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.what == "reads" and self.global_step == 2:
            SEEN.append(norm(self.parameters()))
        if self.what == "reads_by_layer" and self.global_step == 2:
            SEEN.append(self.penalty.value(self.net))
        if self.what == "reads_groups":
            self.look_at_groups(self.optimizers().param_groups)  # type: ignore[union-attr]
        if self.what == "asks_for_device":
            SEEN.extend(float(p.requires_grad) for p in self.parameters())
            assert next(self.parameters()).device == batch[1].device
        if self.what == "weight_of_a_layer":
            SEEN.append(float(self.head.weight.detach().norm()))
        return self.head(self.net(batch[1])).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.what == "reads_validating":
            SEEN.append(norm(self.parameters()))

    def configure_optimizers(self) -> Any:
        groups = [{"params": list(self.net.parameters())}, {"params": list(self.head.parameters()), "lr": 0.2}]
        self.made = optimizer = torch.optim.SGD(groups, 0.1, momentum=0.9)
        if self.what in HOOKS:
            optimizer.register_step_post_hook(self.after)
        if self.what in ("before_step", "gradients_before_step"):
            optimizer.register_step_pre_hook(self.before)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def before(self, optimizer: Any, *_: Any) -> None:
        self.look("before_step")
        if self.what == "gradients_before_step":
            SEEN.extend(float(p.grad.norm()) for p in self.parameters() if p.grad is not None)

    def after(self, optimizer: Any, *_: Any) -> None:
        self.look("after_step")
        if self.what == "after_step":
            self.follow()
        if self.what == "groups_after_step":
            self.look_at_groups(optimizer.param_groups)
        if self.what == "writes_after_step":
            self.shrink()
        if self.what == "state_after_step":
            SEEN.append(len(optimizer.state))

    @torch.no_grad()
    def shrink(self) -> None:
        for p in self.head.parameters():
            p.mul_(0.9)

    def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.look("optimizer_step")
        if self.what == "closure_first":
            optimizer_closure()
            self.look("closure_first")
            optimizer.step()
            self.look("closure_first")
        elif self.what == "skips_a_step" and epoch == 0 and batch_idx == 3:
            optimizer_closure()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.look("optimizer_step")
        if self.what == "optimizer_step":
            self.follow()
        if self.what == "groups_in_optimizer_step":
            self.look_at_groups(optimizer.param_groups)
        if self.what == "writes_in_optimizer_step":
            self.shrink()

    def on_before_backward(self, loss: Tensor) -> None:
        self.look("on_before_backward")

    def on_after_backward(self) -> None:
        self.look("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look("on_before_optimizer_step")

    def optimizer_zero_grad(self, *args: Any) -> None:
        self.look("optimizer_zero_grad")
        super().optimizer_zero_grad(*args)

    def lr_scheduler_step(self, *args: Any) -> None:
        self.look("lr_scheduler_step")
        super().lr_scheduler_step(*args)

    def on_fit_start(self) -> None:
        if self.what == "lightnings_optimizer":
            self.optimizers().register_step_post_hook(lambda *_: self.look("lightnings_optimizer"))  # type: ignore[union-attr]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step != 2 or batch_idx % 2:
            return
        optimizer: Any = self.optimizers()
        if self.what == "adds_group":
            self.made.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        if self.what == "adds_to_lightnings":
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        if self.what == "removes_group":
            self.made.param_groups.pop()
        if self.what == "late_hook":
            self.made.register_step_post_hook(lambda *_: self.look("late_hook"))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.what == "groups_of_batch":
            self.look_at_groups(self.optimizers().param_groups)  # type: ignore[union-attr]


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
    every = (*LOOKS, *(REFUSED if strategy != "ddp" else ()), *ABSENT, "own_optimizer")
    for what in (what for what in every if cases is None or what in cases):
        SEEN.clear()
        module = "WithOwnOptimizer" if what == "own_optimizer" else "Sees"
        plan = plan_of(folder / what, module, f"module.what={what}", *STRATEGIES[strategy], "units=[Layer]",
                       "max_steps=4", "checkpoint=none", file=__name__)  # fmt: skip
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
    assert truth[1] and found[1] == pytest.approx(truth[1], rel=1e-5)
    for name, weight in truth[0].items():
        assert torch.allclose(found[0][name], weight, atol=1e-6), name


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("what", LOOKS)
def test_a_hook_of_a_step_sees_weights_as_under_ddp(runs: Any, what: str, strategy: str) -> None:
    for rank, truth in zip(runs[strategy], runs["ddp"], strict=True):
        if what == "skips_a_step":  # it looks at none
            found = rank[what][0], [1.0]
            assert_same(found, (truth[what][0], [1.0]))
        else:
            assert_same(rank[what], truth[what])


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("what", REFUSED)
def test_what_deepspeed_would_lose_is_refused(runs: Any, what: str, strategy: str) -> None:
    for rank in runs[strategy]:
        assert isinstance(rank[what], str) and REFUSED[what] in rank[what] and strategy in rank[what], rank[what]


@pytest.mark.parametrize("what", ABSENT)
def test_a_step_that_reads_weights_is_right_or_refused(runs: Any, what: str) -> None:
    for rank, truth in zip(runs["zero3"], runs["ddp"], strict=True):
        told = rank[what]
        assert isinstance(told, str) and told.startswith(ABSENT[what]), told
        assert "reads the weight" in told and "read weights in a hook, where they are whole" in told
        assert not isinstance(truth[what], str)
    for strategy in ("zero1", "zero2"):
        for rank, truth in zip(runs[strategy], runs["ddp"], strict=True):
            assert_same(rank[what], truth[what])


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("what", ["own_optimizer"])
def test_an_optimizer_that_only_calls_torchs_step_is_torchs(runs: Any, what: str, strategy: str) -> None:
    for rank, truth in zip(runs[strategy], runs["ddp"], strict=True):
        assert not isinstance(rank[what], str), rank[what]
        for name, weight in truth[what][0].items():
            assert torch.allclose(rank[what][0][name], weight, atol=1e-5), name
