"""Runs of a small language model in pipelines, and modules that a pipeline refuses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.utils.data import DataLoader

from shardwise.config.compose import compose
from shardwise.parallel.pipeline.engine import Engine
from shardwise.plan import Host
from shardwise.plan.resolve import make_plan
from shardwise.run_dir.files import checkpoint_path
from tests.harness.cells import cell_plan, fit

BASE = ["recipe=language_modeling", "model.n_layers=4", "strategy=fsdp", "global_batch_size=8", "micro_batch_size=1",
        "max_steps=3", "checkpoint=none", "gradient_clip_val=0.1", "validate_every_n_steps=3"]  # fmt: skip
SIZE = ["strategy.pipeline_parallel_size=2"]
INTERLEAVED = ["strategy.pipeline_schedule=interleaved", "strategy.pipeline_chunks=2"]
SAVING = ["checkpoint=default", "checkpoint.save_every_n_steps=1", "checkpoint.monitor=null"]
SGD, ADAMW = ["optimizer=sgd", "optimizer.lr=0.3"], ["optimizer=adamw", "optimizer.lr=0.01"]


def run(folder: Path, ranks: int, cells: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """In each rank: one run after the other."""
    return [fit(cell_plan(folder / str(number), ranks, *BASE, *words)) for number, words in enumerate(cells)]


def run_counting(
    folder: Path, ranks: int, cells: Sequence[Sequence[str]], what: str = "foreach_all_gather"
) -> list[dict[str, Any]]:
    """`run`, and how many gathers of FSDP2, or reductions, each run made in its last step."""
    found, original = [], getattr(_fsdp_param_group, what)
    for number, words in enumerate(cells):
        with patch.object(_fsdp_param_group, what, side_effect=original) as called:
            counts = list[int]()
            with patch.object(Engine, "run", _counted(called, counts)):
                result = fit(cell_plan(folder / str(number), ranks, *BASE, *words))
        found.append(result | {"calls": counts[-1]})
    return found


def _counted(called: Any, counts: list[int]) -> Any:
    run = Engine.run

    def counting(*arguments: Any) -> None:
        before = called.call_count
        run(*arguments)
        counts.append(called.call_count - before)

    return counting


def stack_argv(folder: Path, module: str, data: str = f"{__name__}.Numbers") -> list[str]:
    return ["recipe=custom", f"module._target_={module}", f"runs_dir={folder}", "name=run",
            f"data._target_={data}", "accelerator=cpu", "devices=2", "max_steps=1",
            "checkpoint=none", "strategy=fsdp", "global_batch_size=4", "micro_batch_size=2", *SIZE, *SGD]  # fmt: skip


def run_stack(folder: Path, module: str, words: Sequence[str] = ()) -> dict[str, Any]:
    """One step of a module of this file in a pipeline of two ranks, or as `words` say."""
    argv = [*stack_argv(folder, f"{__name__}.{module}"), *words]
    (folder / "run").mkdir(parents=True, exist_ok=True)
    return fit(make_plan(compose(argv).jobs[0].config, Host(cuda_devices=0)))


class Numbers(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(list(torch.ones(16, 4)), batch_size=2)  # type: ignore[arg-type]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Stack(LightningModule):
    """Four layers that repeat between two that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()


class Halves(Stack):
    """Changes gradients after each micro-batch."""

    def on_after_backward(self) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


class HalvesInHooks(Stack):
    """The same, by hooks on the parameters."""

    def on_train_start(self) -> None:
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(_halve)


class FrozenStart(Stack):
    """Its first layers are frozen: a stage that has no others has nothing to differentiate."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.layers[0].requires_grad_(False)


class FrozenEnd(Stack):
    """A rank of an interleaved schedule has nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.layers[1], self.layers[3], self.last):
            layer.requires_grad_(False)


class EndsWithoutGradients(Stack):
    """In the last micro-batch of each step no gradient reaches the first two layers."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.set_grad_enabled(batch_idx % 2 == 0):
            x = self.first(batch)
            for layer in self.layers[:2]:
                x = layer(x)
        for layer in self.layers[2:]:
            x = layer(x)
        return self.last(x).square().mean()


def run_stacks(folder: Path, cells: Sequence[tuple[str, Sequence[str]]]) -> list[dict[str, Any]]:
    """In each rank: three steps of modules of this file, one run after the other."""
    return [
        run_stack(folder / str(number), module, ["max_steps=3", "precision=fp64", *words])
        for number, (module, words) in enumerate(cells)
    ]


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def run_halving(folder: Path, module: str, cells: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """In each rank: two steps of a module that changes gradients, one run after the other."""
    return [run_stack(folder / str(number), module, ["max_steps=2", *words]) for number, words in enumerate(cells)]


class Between(Stack):
    """Computes between two layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) * 2
        return self.last(x)


class Twice(Stack):
    """Makes two passes in a step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean() + self(batch).mean()


class Conditioned(Stack):
    """Gives every layer a second tensor that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adds() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = condition = self.first(x)
        for layer in self.layers:
            x = layer(x, condition)
        return self.last(x)


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + condition


class Collects(Stack):
    """Looks at what every layer gave."""

    def forward(self, x: Tensor) -> Tensor:
        every = [self.first(x)]
        for layer in self.layers:
            every.append(layer(every[-1]))
        return self.last(torch.stack(every[1:]).sum(0))


class Early(Stack):
    """Runs a layer before the others that is defined behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.late(x))


class Leaves(Stack):
    """Leaves the third layer out."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in (0, 1, 3):
            x = self.layers[number](x)
        return self.last(x)


class Tuples(Stack):
    """Its layers give tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)[0]
        return self.last(x)


class Counts(Stack):
    """Compares with whole numbers that a layer with weights gives, before those that repeat."""

    def __init__(self) -> None:
        super().__init__()
        self._modules = {"codes": Codes(4, 4), **self._modules}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        codes = self.codes(batch)
        return (self(batch) - codes).square().mean()


class Teaches(Stack):
    """Compares with the place of the largest number that a layer gives, before those that repeat."""

    def __init__(self) -> None:
        super().__init__()
        self._modules = {"teacher": nn.Linear(4, 4), **self._modules}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        places = self.teacher(batch).argmax(-1, keepdim=True)
        return (self(batch) - places).square().mean()


class Likens(Stack):
    """Makes tensors in the likeness of what a layer gives, which needs none of its numbers."""

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x) + torch.ones_like(first).mean() + first.new_zeros(first.shape[0], 1)


class Vector(Stack):
    """Gives one loss for each sample."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean(-1)


class Codes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(-1, keepdim=True)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return torch.tanh(self.linear(x)), 1


class Draws(Stack):
    """Notes what it draws: before and in its step, before the layers that repeat, and inside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Draw() for _ in range(4))
        self.drawn: dict[str, list[float]] = {"hook": [], "step": [], "python": []}

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.drawn["hook"].append(float(torch.rand(())))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.drawn["step"].append(float(torch.rand(())))
        self.log("own/drawn", self.drawn["step"][-1], on_step=False, on_epoch=True, sync_dist=True, batch_size=2)
        self.drawn["python"].append(random.random())
        return super().training_step(batch, batch_idx)


class Draw(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(())
        self.drawn.append(float(noise))
        return super().forward(x) * (0.5 + noise)


def drawn(folder: Path, *words: str) -> dict[str, list[float]]:
    """In each rank: what `Draws` drew in two steps, its layers' numbers under their names, and what it has logged."""
    argv = [*stack_argv(folder, f"{__name__}.Draws"), *words, "max_steps=2"]
    (folder / "run").mkdir(exist_ok=True)
    made: list[Draws] = []
    original = Draws.__init__

    def keep(self: Draws) -> None:
        original(self)
        made.append(self)

    Draws.__init__ = keep  # type: ignore[method-assign]
    logged = fit(make_plan(compose(argv).jobs[0].config, Host(cuda_devices=0)))["validation"]["own/drawn"]
    layers = [layer for layer in made[0].layers if layer.__dict__.get("drawn")]
    return {**made[0].drawn, **{str(number): layer.drawn for number, layer in enumerate(layers)}, "logged": [logged]}


def drawn_after_shards(folder: Path, *words: str) -> dict[str, list[float]]:
    """In each rank: what `Draws` draws in the second step, after the checkpoint of as many ranks without a pipeline."""
    run_stack(folder / "saved", "Draws", ["strategy.pipeline_parallel_size=1", *SAVING])
    return drawn(folder, f"resume={checkpoint_path(folder / 'saved' / 'run', 1)}", *words)


def drawn_after_a_stop(folder: Path, *words: str) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """In each rank: what `Draws` draws in two steps, and in the second of them after a checkpoint of the first."""
    straight, resumed = folder / "straight", folder / "resumed"
    for home in (straight, resumed):
        home.mkdir(exist_ok=True)
    before = drawn(straight, *SAVING, *words)
    return before, drawn(resumed, *SAVING, *words, f"resume={checkpoint_path(straight / 'run', 1)}")
