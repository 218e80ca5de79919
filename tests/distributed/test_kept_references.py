"""References to weights that a module keeps: from before the set-up, or from one hook to the next."""

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

STRATEGIES = ("ddp", "fsdp", "zero1", "zero3")


class Plain(LightningModule):
    """Trains with SGD, and keeps an average of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Sequential(Layer(4), Layer(4)), nn.Linear(4, 1)
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.net(batch[1])).square().mean()

    def trained(self) -> list[nn.Parameter]:
        return [*self.net.parameters(), *self.head.parameters()]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.trained(), 0.1)

    def pairs_now(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.average.parameters(), self.net.parameters(), strict=True))

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for mine, p in self.kept():
            mine.lerp_(p, 0.2)

    def kept(self) -> Any:
        return self.pairs_now()


class OptimizerInInit(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.made = torch.optim.SGD(self.trained(), 0.1)

    def configure_optimizers(self) -> Any:
        return self.made


class StateInInit(OptimizerInInit):
    """Adagrad makes its state when it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.made = torch.optim.Adagrad(self.trained(), 0.1)  # type: ignore[assignment]


class GroupsInInit(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.groups = {"all": self.trained()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.groups["all"], 0.1)


class PairsInInit(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = self.pairs_now()

    def kept(self) -> Any:
        return self.pairs


class Keeper:
    """As in many repositories: an object that is given the weights once."""

    def __init__(self, pairs: Any) -> None:
        self.pairs = pairs


class ObjectInFitStart(Plain):
    def on_fit_start(self) -> None:
        self.keeper = Keeper(self.pairs_now())

    def kept(self) -> Any:
        return self.keeper.pairs


ALIKE = ("Plain", "OptimizerInInit", "GroupsInInit", "PairsInInit", "ObjectInFitStart")


class TiedInList(Plain):
    """Computes with another layer's weight, which is not to be registered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = [self.head.weight]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.net(batch[1])
        return (self.head(x) + F.linear(x, self.tied[0])).square().mean()


class TiedByName(TiedInList):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.net(batch[1])
        return (self.head(x) + F.linear(x, self.head.weight)).square().mean()


class Joins(Plain):
    """A layer joins the optimizer in mid-run. `forgets`: what is left of the steps before, as Lightning does."""

    def __init__(self, forgets: bool = False) -> None:
        super().__init__()
        self.forgets = forgets

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.net[1].parameters(), *self.head.parameters()], 0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2:
            optimizer: Any = self.optimizers()
            optimizer.add_param_group({"params": list(self.net[0].parameters())})
            if self.forgets:
                self.net.zero_grad()


class Normed(torch.optim.SGD):
    """Looks at the norm of each gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm(), alpha=0.1)


class NormedSteps(Plain):
    def configure_optimizers(self) -> Any:
        return Normed(self.trained(), 0.1)


class TwiceAround(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class StepsOfTheParent(Plain):
    def configure_optimizers(self) -> Any:
        torch.optim.SGD(self.trained(), 0.1)  # torch hooks the step of the class when one is made
        return TwiceAround(self.trained(), 0.1)


def train(folder: Path, name: str, strategy: str, *words: str) -> Any:
    try:
        return fit(plan_of(
            folder / f"{name}-{strategy}-{len(words)}", name, f"strategy={strategy}", "units=[Layer]", "max_steps=4",
            "global_batch_size=4", "checkpoint=none", *words, file=__name__,
        ))["final"]  # fmt: skip
    except ConfigError as error:
        return str(error)


def run_all(folder: Path) -> dict[tuple[str, ...], Any]:
    unused = "strategy.find_unused_parameters=true"
    empty = "whole_weights_in=[on_train_batch_end,on_fit_start]"
    found = {
        (name, strategy): train(folder, name, strategy, *([empty] if strategy == "zero3" else []))
        for name in ALIKE
        for strategy in STRATEGIES
    }
    found |= {(name, "ddp"): train(folder, name, "ddp") for name in ("TiedInList", "TiedByName", "StepsOfTheParent")}
    found |= {
        ("NormedSteps", strategy): train(folder, "NormedSteps", strategy) for strategy in ("ddp", "fsdp", "zero1")
    }
    found |= {("StateInInit", strategy): train(folder, "StateInInit", strategy) for strategy in ("ddp", "fsdp")}
    found |= {("Joins", "fsdp"): train(folder, "Joins", "fsdp")}
    for forgets in ("false", "true"):
        found["Joins", "ddp", forgets] = train(folder, "Joins", "ddp", unused, f"module.forgets={forgets}")
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Any]:
    runs: dict[tuple[str, ...], Any] = spawn(2, run_all, tmp_path_factory.mktemp("kept"))[0]
    return runs


def assert_alike(one: Any, other: Any) -> None:
    assert not isinstance(one, str), one
    assert not isinstance(other, str), other
    for name, tensor in other.items():
        assert torch.allclose(one[name], tensor, atol=1e-6), name


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ALIKE)
def test_what_is_kept_follows_the_weights(found: Any, name: str, strategy: str) -> None:
    plain = found["Plain", "ddp"]
    assert not torch.equal(plain["average.0.linear.weight"], plain["net.0.linear.weight"])
    assert_alike(found[name, strategy], plain)


def test_a_weight_in_a_list_is_the_weight(found: Any) -> None:
    assert_alike(found["TiedInList", "ddp"], found["TiedByName", "ddp"])


def test_state_of_whole_weights_is_refused(found: Any) -> None:
    assert not isinstance(found["StateInInit", "ddp"], str)
    assert found["StateInInit", "fsdp"] == (
        "Adagrad was built before the weights were sharded, and has state of whole ones: build it in "
        "configure_optimizers, or use strategy=ddp"
    )


def test_a_layer_joins_the_optimizer_in_mid_run(found: Any) -> None:
    expected = found["Joins", "ddp", "true"]
    assert_alike(found["Joins", "ddp", "false"], expected)
    assert_alike(found["Joins", "fsdp"], expected)


def test_a_step_of_a_subclass_has_whole_weights(found: Any) -> None:
    assert_alike(found["NormedSteps", "fsdp"], found["NormedSteps", "ddp"])
    assert "Normed is not known to treat every weight by itself" in found["NormedSteps", "zero1"]


def test_a_step_may_call_that_of_its_parent(found: Any) -> None:
    assert_alike(found["StepsOfTheParent", "ddp"], found["Plain", "ddp"])
