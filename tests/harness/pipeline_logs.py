"""Modules that log or look at what a stage of a pipeline may not have, as their authors would write them."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MeanSquaredError, Metric

from shardwise.config.compose import compose
from shardwise.distributed.mesh import init_process_group
from shardwise.plan import Host
from shardwise.plan.resolve import make_plan
from shardwise.trainer import build_data, build_module, build_trainer
from tests.harness.cells import fit
from tests.harness.pipelines import Stack, stack_argv


class Rows(LightningDataModule):
    def _loader(self, rows: int) -> DataLoader[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return DataLoader(list(torch.randn(rows, 4, generator=generator)), batch_size=2)  # type: ignore[arg-type]

    def train_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(16)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(6)

    def test_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(6)


def run_module(folder: Path, module: str, words: Sequence[str] = ()) -> dict[str, Any]:
    """In each rank: two steps and a validation of a module of this file. Gives also what it logged in its steps."""
    argv = stack_argv(folder, f"{__name__}.{module}", f"{__name__}.Rows")
    argv += ["precision=fp64", "max_steps=2", "validate_every_n_steps=2", "log_every_n_steps=1", *words]
    (folder / "run").mkdir(parents=True, exist_ok=True)
    found = fit(make_plan(compose(argv).jobs[0].config, Host(cuda_devices=0)))
    rows = list(csv.DictReader((folder / "run" / "metrics.csv").open())) if os.environ["RANK"] == "0" else [{}]
    own = {name: [float(row[name]) for row in rows if row[name]] for name in rows[0] if name.startswith("own/")}
    own |= {name: [value] for name, value in found["validation"].items()} | {"norms": found["norms"]}
    return {"logged": own, "final": found["final"]}


def run_test(folder: Path, module: str) -> None:
    """In each rank: a test of a module of this file, with the weights that it is made with."""
    argv = stack_argv(folder, f"{__name__}.{module}", f"{__name__}.Rows")
    (folder / "run").mkdir(parents=True, exist_ok=True)
    plan = make_plan(compose([*argv, "stage=test"]).jobs[0].config, Host(cuda_devices=0))
    init_process_group(plan)
    built = build_module(plan)
    build_trainer(plan, built).test(built, datamodule=build_data(plan), verbose=False)


def run_modules(folder: Path, modules: Sequence[str], words: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    return {module: run_module(folder / module, module, words) for module in modules}


class Apart(Stack):
    """Keeps what its first layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_buffer("scale", torch.ones(()))
        self.noticed: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.noticed = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation/loss", self(batch).square().mean(), sync_dist=True)


# Refused


class LogsWeight(Apart):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("own/weight", self.first.weight.norm())
        return loss


class LogsBuffer(Apart):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch)
        self.log("own/scale", self.first.scale)


class ReadsBuffer(Apart):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.first.scale.item()


class Penalizes(Apart):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * self.layers[0].linear.weight.square().sum()


class LogsNorm(Apart):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("own/norm", sum(p.detach().norm() for p in self.parameters()))
        return loss


class LogsActivation(Apart):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("own/activation", self.noticed.norm())
        return loss


class ReadsOutputs(Apart):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        outputs = self(batch)
        return {"loss": outputs.square().mean(), "largest": outputs.detach().max()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("own/largest", outputs["largest"])


class LooksBackAtBuffer(Apart):
    """Reads a buffer in front of the layers that it writes behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        outputs = self(batch + self.center)
        self.center.lerp_(outputs.detach().mean(), 0.5)
        return outputs.square().mean()


class Validates(Apart):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation/loss", (self(batch) - self.noticed.mean()).square().mean(), sync_dist=True)


class ValidatesNumbers(Apart):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation/loss", (self(batch) - self.noticed.mean()).square().mean().item())


class Tests(Apart):
    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test/loss", (self(batch) - self.noticed.mean()).square().mean(), sync_dist=True)


class Centers(Apart):
    """Has a buffer that it reads and writes behind the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        outputs = self(batch)
        loss = (outputs - self.center).square().mean()
        self.center = torch.lerp(self.center, outputs.detach().mean(), 0.5)
        self.log_dict({"own/loss": loss, "own/center": self.center.clone()})
        return loss


class Measures(Apart):
    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.error.update(self(batch), self.noticed[:, :1])


class Collects(Apart):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch)
        self.kept.update(self.noticed)

    def on_validation_epoch_end(self) -> None:
        self.log("own/kept", self.kept.compute())


class Kept(Metric):
    kept: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("kept", [], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        self.kept.append(values)

    def compute(self) -> Tensor:
        return torch.cat(self.kept).mean()


class LooksBack(Apart):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("own/loss", outputs["loss"])


class LogsGradients(Apart):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [_whole(p.grad).norm() for p in self.parameters() if p.grad is not None]
        self.log("own/norm", torch.stack(norms).norm())


class Averages(Apart):
    """Keeps an average in an object."""

    whole_weights_in: tuple[str, ...] = ("on_before_zero_grad",)

    def __init__(self) -> None:
        super().__init__()
        self.mean = {name: p.detach().clone() for name, p in self.named_parameters()}

    @torch.no_grad()
    def on_before_zero_grad(self, optimizer: Any) -> None:
        for name, p in self.named_parameters():
            self.mean[name].mul_(0.9).add_(p, alpha=0.1)


class AveragesBehind(Averages):
    whole_weights_in = ("on_train_batch_end",)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        """Not here."""

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_before_zero_grad(None)


class ClipsByNorm(Apart):
    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class Lists(Apart):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.losses.append(self(batch).square().mean())

    def on_validation_epoch_end(self) -> None:
        self.log("validation/loss", torch.stack(self.losses).mean(), sync_dist=True)
        self.losses.clear()


# Right


class Halves(Apart):
    """Changes every gradient by itself, and counts the weights."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        one, count = next(self.parameters()), sum(p.numel() for p in self.parameters())
        assert (one.device, one.dtype, count) == (batch.device, batch.dtype, 205)
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


class ClipsByValue(Apart):
    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.001)


class ClipsAsLightning(Apart):
    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")


class WritesInPlace(Apart):
    """Writes into what its first layer gives."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x += 1
        x = torch.nn.functional.relu(x.mul_(2), inplace=True)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class LogsMuch(Apart):
    """Logs in its steps and in hooks what every stage or the last one knows."""

    def __init__(self) -> None:
        super().__init__()
        self.losses, self.inputs = MeanMetric(), MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.inputs.update(batch.mean())
        self.log("own/inputs", self.inputs, on_step=False, on_epoch=True)
        self.log("own/before", batch.mean(), sync_dist=True)
        loss = super().training_step(batch, batch_idx)
        self.losses(loss)
        self.log("own/losses", self.losses, on_step=True, on_epoch=True)
        self.log("own/head", self.last.weight.norm())
        self.log("own/global_step", float(self.global_step))
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("own/share", loss)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("own/batches", float(batch_idx), reduce_fx="sum")


def _whole(gradient: Any) -> Tensor:
    found: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found
