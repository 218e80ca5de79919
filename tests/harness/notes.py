"""Modules that note something on their parameters: attributes for the optimizer, hooks on gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from shardwise.config.compose import compose
from shardwise.plan import Host
from shardwise.plan.resolve import make_plan
from tests.harness.cells import fit
from tests.harness.gradient_hooks import Divided
from tests.harness.pipelines import SIZE, Stack, stack_argv

_NOTED: dict[str, Any] = {}  # what the module of this process has noted


def run(folder: Path, module: str, words: Sequence[str]) -> dict[str, Any]:
    """In each rank: two steps of a module of this file. Gives what it has noted, and its weights."""
    stack = stack_argv(folder, f"{__name__}.{module}", "tests.harness.pipeline_logs.Rows")
    argv = [word for word in stack if word not in SIZE and not word.startswith(("optimizer", "schedule"))]
    argv += ["precision=fp64", "max_steps=2", "log_every_n_steps=1", "validate_every_n_steps=1000000",
             *words]  # fmt: skip
    (folder / "run").mkdir(parents=True, exist_ok=True)
    _NOTED.clear()
    found = fit(make_plan(compose(argv).jobs[0].config, Host(cuda_devices=0)))
    return _NOTED | {"start": found["start"], "final": found["final"]}


def marks_of(module: nn.Module) -> dict[str, int]:
    return {name: getattr(p, "mark", -1) for name, p in module.named_parameters()}


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)


class Plain(Stack):
    def configure_optimizers(self) -> Any:
        return sgd(self)


class Marking(LightningModule):
    """Marks its weights when it is made, and looks at the marks when it makes its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        for number, p in enumerate(self.parameters()):
            p.mark = number  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        _NOTED["marks"] = marks_of(self)
        return sgd(self)


class DividedMarks(Marking, Divided):
    """Ranks of a tensor axis have parts of its weights."""


class Marks(Marking, Stack):
    """Marks one weight again later."""

    def on_train_start(self) -> None:
        self.first.weight.late = 7  # type: ignore[assignment]
        _NOTED["in a hook"] = marks_of(self)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        _NOTED["late"] = getattr(self.first.weight, "late", -1)


def halve_behind(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.mul_(0.5)


def halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def on_gradient(module: Any) -> None:
    module.first.weight.register_hook(halve)


def behind(module: Any) -> None:
    module.first.weight.register_post_accumulate_grad_hook(halve_behind)


def at(hook: str, register: Callable[[Any], None]) -> type[Plain]:
    """A module that registers a hook on a gradient in `hook`."""

    def run(self: Any) -> Any:
        if hook == "__init__":
            Plain.__init__(self)
        register(self)
        return sgd(self) if hook == "configure_optimizers" else None

    return type(f"{register.__name__}_{hook.strip('_')}", (Plain,), {hook: run})


for _hook in ("__init__", "configure_optimizers", "on_train_start"):
    for _register in (on_gradient, behind):
        _made = at(_hook, _register)
        globals()[_made.__name__] = _made


def moved(found: dict[str, Any], name: str) -> Tensor:
    """By how much a weight has changed."""
    change: Tensor = found["final"][name] - found["start"][name]
    return change.to(torch.float64)
