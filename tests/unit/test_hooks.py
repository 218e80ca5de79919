"""Which hooks look at weights: those around which a strategy gathers them."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from torch import nn
from torchmetrics import MeanMetric

from recipes.language_modeling.model import Transformer
from recipes.language_modeling.module import LanguageModel
from shardwise.config.compose import compose
from shardwise.lightning_internals import hooks
from shardwise.lightning_internals.hook_analysis import OF_STEPS, looks_at_weights, reads_in_step
from shardwise.nn.mean_metric import ExactMean
from shardwise.plan import Host, make_plan


def blend(module: Any) -> None:
    for p in module.parameters():
        p.detach()


class Average:
    def update(self) -> None: ...


class Own(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.metric = nn.Linear(2, 2), MeanMetric()
        self.count, self.average, self.names = 0, Average(), ["a"]

    def helper(self) -> None:
        self.net.weight.detach()

    def on_train_start(self) -> None:
        self.count += len(self.names)
        self.log("count", float(self.count))

    def on_train_epoch_end(self) -> None:
        self.log("metric", self.metric.compute())
        torch.zeros(1).add_(1)

    def on_fit_start(self) -> None:
        self.helper()

    def on_train_end(self) -> None:
        blend(self)

    def on_validation_start(self) -> None:
        self.average.update()

    def on_validation_end(self) -> None:
        list(self.net.parameters())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.helper()


class Inherits(Own):
    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        super().on_fit_start()

    def on_train_batch_start(self, *args: Any) -> None:
        super().on_train_start()


class Looks(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net.weight.sum()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        print(trainer.current_epoch)


def test_hooks_that_look_at_weights_are_found() -> None:
    module = Inherits()
    for hook, looks in {
        "on_train_start": False, "on_train_epoch_end": False, "on_train_batch_start": False, "on_fit_start": True,
        "on_train_end": True, "on_validation_start": True, "on_validation_end": True, "on_train_batch_end": True,
        "on_before_optimizer_step": False, "on_test_start": False,
    }.items():  # fmt: skip
        assert (looks_at_weights(module, hook, module) is not None) is looks, hook
    assert looks_at_weights(Looks(), "on_train_start", module) == "net"
    assert looks_at_weights(Looks(), "on_train_end", module) is None
    for theirs in (EarlyStopping("x"), LearningRateMonitor()):
        assert not looks_at_weights(theirs, "on_train_start", module)


def test_the_language_models_evaluation_does_not_look_at_weights() -> None:
    """Else all weights would be gathered for each validation. It has metrics for each set, in a list."""
    module = LanguageModel(Transformer(9, dim=8, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=8, max_seq_len=4))
    module.evaluations = nn.ModuleList([ExactMean(module.device)])
    for hook in ("on_validation_epoch_start", "on_validation_epoch_end", "on_test_epoch_start", "on_test_epoch_end"):
        assert not looks_at_weights(module, hook, module), hook


def weights(module: Any) -> None:
    """Has the name of an attribute of `Named`."""
    blend(module)


class Blends:
    def __init__(self) -> None:
        self.times = 0

    def update(self, module: Any) -> None:
        self.count()
        blend(module)

    def count(self) -> None:
        self.times += 1


class Settings:
    __slots__ = ("rate",)

    def scaled(self) -> Any:
        return self.rate


AVERAGED, SETTINGS = Blends(), Settings()


class Named(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.weights = nn.Linear(2, 2), [1.0]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.weights.append(0.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        weights(self)

    def on_train_start(self) -> None:
        deepcopy(self)

    def on_train_end(self) -> None:
        import somebodys  # type: ignore[import-not-found]

        somebodys.look(self)

    def on_fit_start(self) -> None:
        AVERAGED.update(self)

    def on_fit_end(self) -> None:
        AVERAGED.count()

    def on_validation_start(self) -> None:
        SETTINGS.scaled()

    def on_train_epoch_end(self) -> None:
        import math

        self.weights.append(math.pi)


def test_an_attribute_is_not_taken_for_a_function_of_its_name() -> None:
    module = Named()
    for hook, name in {
        "on_train_batch_start": None, "on_train_batch_end": "parameters", "on_train_start": "deepcopy",
        "on_train_end": "somebodys", "on_train_epoch_end": None,
        "on_fit_start": "parameters", "on_fit_end": None, "on_validation_start": None,
    }.items():  # fmt: skip
        assert looks_at_weights(module, hook, module) == name, hook


def reset(module: Any) -> None:
    nn.init.normal_(module.net.weight)


@dataclass(slots=True)
class Rates:
    rate: float = 0.1


class Reached(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.init_by, self.count_by, self.count = nn.Linear(2, 2), reset, len, 0
        self.settings, self.net_count = Rates(), 0

    @property
    def norm(self) -> Any:
        return self.net.weight.norm()

    @cached_property
    def layers(self) -> Any:
        return [self.net]

    @property
    def steps(self) -> int:
        return self.count

    def reset(self) -> None:
        reset(self)

    def step(self) -> None:
        self.count += 1


class Reaches(Callback):
    """Reaches weights in ways that do not name them, or reaches none."""

    def __init__(self) -> None:
        self.names, self.reset_by, self.counted_by = ["net"], partial(reset), self.count
        self.part, self.found = partial(len, ["a"]), {"steps": 0}

    def count(self, module: Any) -> None:
        module.step()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.reset()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.norm  # noqa: B018

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.layers[0].reset_parameters()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for name in self.names:
            getattr(pl_module, name).reset_parameters()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        getattr(pl_module, "net").reset_parameters()  # noqa: B009

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.reset_by(pl_module)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        getattr(pl_module, getattr(pl_module, "name")).reset_parameters()  # noqa: B009

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.init_by(pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for stage in self.names:
            getattr(pl_module, f"n{stage}")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for stage in self.names:
            pl_module.log(stage, getattr(pl_module, f"{stage}_count", pl_module.settings.rate))

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        getattr(pl_module, self.names[0], "steps")

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        getattr(pl_module, "steps" if self.names else "net")

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        getattr(self.found["steps"], self.names[0])

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        from . import helpers  # type: ignore[attr-defined]

        helpers.look(pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.step()
        self.part()
        self.counted_by(pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("steps", getattr(pl_module, "steps", 0.0) + pl_module.count_by(self.names))


def test_weights_that_are_reached_under_another_name_are_found() -> None:
    found = {
        "on_fit_start": "net", "on_fit_end": "net", "on_train_start": "net", "on_train_end": "getattr",
        "on_validation_start": "net", "on_validation_end": "net", "on_test_start": "getattr", "on_test_end": "net",
        "on_train_epoch_start": None, "on_train_epoch_end": None, "on_train_batch_start": "net",
        "on_train_batch_end": None, "on_sanity_check_start": "getattr", "on_sanity_check_end": "getattr",
        "on_predict_start": "getattr", "on_predict_end": "import",
    }  # fmt: skip
    assert {hook: looks_at_weights(Reaches(), hook, Reached()) for hook in found} == found


@pytest.mark.parametrize(("words", "is_rounded"), [
    (["strategy=zero1", "precision=bf16"], True), (["strategy=zero3", "precision=bf16"], True),
    (["strategy=zero1", "precision=fp32"], False), (["strategy=fsdp", "precision=bf16"], False),
])  # fmt: skip
def test_a_hook_that_sees_weights_in_16_bits_is_told_so(words: list[str], is_rounded: bool) -> None:
    plan = make_plan(compose(["name=run", "accelerator=cpu", "devices=2", *words]).jobs[0].config, Host(0))
    told = hooks.cost_of_looking(plan, "on_train_batch_end of Mine", "parameters")
    assert "on_train_batch_end of Mine may look at weights (it uses parameters)" in told
    assert ("it sees weights in 16 bits, and writes them so" in told) == is_rounded


class Steps(Own):
    """Sets a rate in one hook of a step, and looks at weights in others."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        for group in scheduler.optimizer.param_groups:
            self.decay(group)

    def decay(self, group: Any) -> None:
        for p in group["params"]:
            p.mul_(0.9)

    def on_before_backward(self, loss: Any) -> None:
        self.helper()


def test_hooks_of_steps_look_where_a_strategy_makes_weights_whole() -> None:
    module = Steps()
    for hook, name in {"optimizer_step": None, "lr_scheduler_step": "params", "on_before_backward": "net",
                       "optimizer_zero_grad": None, "on_after_backward": None}.items():  # fmt: skip
        assert looks_at_weights(module, hook, module, also=OF_STEPS) == name, hook
        assert looks_at_weights(module, hook, module) is None


class Penalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.inner(x)

    def penalty(self) -> Any:
        return sum(p.norm() for p in self.parameters())


class Reads(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Penalized()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).sum() + self.net.penalty()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch.to(next(self.parameters()).dtype)
        return self.net(x) + self.net.inner.weight.sum()

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        for group in self.trainer.optimizers[0].param_groups:
            blend(group["params"])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return blend(self)


def test_steps_that_read_weights_beside_their_layers_are_found() -> None:
    module = Reads()
    found = {
        "training_step": "parameters",
        "validation_step": None,
        "test_step": "params",
        "predict_step": "parameters",
    }
    assert {step: reads_in_step(module, step) for step in found} == found
    assert reads_in_step(Own(), "training_step") is None
