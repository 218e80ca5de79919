"""Modules whose hooks read numbers of gradients, as their authors would write them."""

from __future__ import annotations

import copy
import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from shardwise.config.compose import compose
from shardwise.plan import Host
from shardwise.plan.resolve import make_plan
from tests.harness.cells import fit
from tests.harness.pipelines import SIZE, Layer, Stack, stack_argv


def run(folder: Path, module: str, words: Sequence[str]) -> dict[str, list[float]]:
    """In each rank: two steps of a module of this file. Gives what it has logged, on rank 0."""
    stack = stack_argv(folder, f"{__name__}.{module}", "tests.harness.pipeline_logs.Rows")
    argv = [word for word in stack if word not in SIZE]
    argv += ["precision=fp64", "max_steps=2", "log_every_n_steps=1", "validate_every_n_steps=1", *words]
    (folder / "run").mkdir(parents=True, exist_ok=True)
    fit(make_plan(compose(argv).jobs[0].config, Host(cuda_devices=0)))
    if os.environ["RANK"] != "0":
        return {}
    rows = list(csv.DictReader((folder / "run" / "metrics.csv").open()))
    return {
        name: [float(row[name]) for row in rows if row[name]] for name in rows[0] if name.startswith(("own/", "grad_"))
    }


class Reads(Stack):
    """In every way that one finds in modules."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        first = gradients[0]
        total = sum(g.detach().data.norm(2).item() ** 2 for g in gradients) ** 0.5
        self.log_dict({
            "own/total": total, "own/float": float(first.norm()), "own/tensor": first.norm(),
            "own/text": float(f"{first.norm():.6f}"), "own/list": sum(first.flatten().tolist()),
            "own/numpy": float(first.numpy().sum()), "own/stack": torch.stack([g.norm() for g in gradients]).norm(),
            "own/new": torch.tensor([g.norm() for g in gradients]).norm(),
            "own/large": 1.0 if first.norm() > 0.5 else 0.0,
        })  # fmt: skip
        self.log_dict(grad_norm(self, norm_type=2))


class ReadsWeights(Stack):
    """In the step, before and after the layers run; and in hooks that do not look at gradients."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        before = self.layers[1].linear.weight.norm().item()
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"own/before": before, "own/after": self.layers[1].linear.weight.norm().item(),
                       "own/bias": float(self.last.bias.detach().abs().max()),
                       "own/large": 1.0 if self.first.weight.sum() > 0 else 0.0})  # fmt: skip
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("own/hook", sum(p.detach().square().sum().item() for p in self.parameters()))


class Evaluates(Stack):
    """Runs layers in a hook that writes weights before and after."""

    whole_weights_in = ("on_train_batch_start",)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        with torch.no_grad():
            for turn in ("first", "second", "third"):
                self.first.weight.mul_(1.1)
                self.layers[1].linear.weight.data.mul_(0.9)
                self.log(f"own/{turn}", self(batch).square().mean(), sync_dist=True)
                self.log_dict(
                    {
                        f"own/{turn} weight": self.first.weight.norm(),
                        f"own/{turn} weights": sum(float(p.square().sum()) for p in self.layers.parameters()),
                    }
                )
            self.last.bias.add_(0.1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("own/loss", loss := super().training_step(batch, batch_idx))
        return loss


class RunsBetween(Stack):
    """Runs layers in the hooks between a forward pass and the next, and validates. None of them looks at weights."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, float] = {}

    def look(self, hook: str) -> None:
        with torch.no_grad():
            result = self(self.probe)
        assert result.dtype == self.probe.dtype, (hook, result.dtype)
        self.seen[f"own/{hook}"] = float(result.square().mean())

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.probe = batch[:1]

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.look("zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.look("before_backward")

    def on_after_backward(self) -> None:
        self.look("after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look("before_step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log_dict(self.seen, sync_dist=True)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("own/validation", super().training_step(batch, batch_idx), sync_dist=True)


class Ignores(Stack):
    """No target of its second batch counts, so that the loss is not a number and its gradients are zero."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        targets = torch.full((len(batch),), -100 if batch_idx else 0)
        return nn.functional.cross_entropy(self(batch), targets)


class Clips(Stack):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.log("own/norm", float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)))


class ByHand(LightningModule):
    """Its networks are in containers, one in another. Some layers repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        layers = nn.ModuleList(Layer() for _ in range(3))
        self.nets = nn.ModuleDict({"first": nn.Linear(4, 6), "layers": layers, "last": nn.Linear(6, 2)})

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        hidden = self.nets["first"](batch)
        for layer in self.nets["layers"]:  # type: ignore[union-attr]
            hidden = layer(hidden)
        self.manual_backward(self.nets["last"](hidden).square().mean())
        squares = [p.grad.norm(2).item() ** 2 for p in self.parameters() if p.grad is not None]
        self.log("own/total", sum(squares) ** 0.5)
        optimizer.step()


class ByHandWithLoose(ByHand):
    """Owns parameters, in a container that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4))])


class Divided(LightningModule):
    """Of which ranks of a tensor axis have parts."""

    tensor_parallel_layers: ClassVar[dict[str, str]] = {
        "embedding": "embedding", "body": "gather", "body.0": "column", "body.2": "row", "head": "head",
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 8), nn.Linear(8, 40)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        tokens = (batch.float() * 10).long() % 40
        logits = self.head(self.body(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class DividedReads(Divided):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("own/norm", self.head.weight.grad.norm().item())  # type: ignore[union-attr]


class DividedLogs(Divided):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("own/norm", self.head.weight.grad.norm())  # type: ignore[union-attr]


class DividedReadsWeights(Divided):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("own/norm", self.head.weight.norm().item())
        return super().training_step(batch, batch_idx)


class DividedClips(Divided):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class DividedKeeps(Divided):
    """Keeps averages of whole weights, and validates with them."""

    whole_weights_in = ("on_fit_start", "on_train_batch_end", "on_validation_start", "on_validation_end")

    def on_fit_start(self) -> None:
        self.kept = [p.detach().clone() for p in self.parameters()]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("own/kept", sum(float(kept.square().sum()) for kept in self.kept))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for mine, p in zip(self.kept, self.parameters(), strict=True):
            mine.lerp_(p.detach(), 0.3)

    def on_validation_start(self) -> None:
        for i, p in enumerate(self.parameters()):
            average, self.kept[i] = self.kept[i], p.detach().clone()
            p.data.copy_(average)

    on_validation_end = on_validation_start

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("own/loss", super().training_step(batch, batch_idx), sync_dist=True)


class DividedRuns(Divided):
    """Runs layers in a hook that sees whole weights."""

    whole_weights_in = ("on_train_batch_start",)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.log("own/norm", self.head.weight.detach().norm())
        with torch.no_grad():
            self.log("own/before", self.training_step(batch, batch_idx))
            self.head.weight.mul_(1.1)
            self.log("own/written", self.training_step(batch, batch_idx))
        self.log("own/after", self.head.weight.detach().norm())


class Copies(Stack):
    def on_fit_start(self) -> None:
        self.copy = [copy.deepcopy(self.layers)]


class DividedWrites(Divided):
    """Rows of what is a part already."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.head.weight.grad[:8].zero_()  # type: ignore[index]


class DividedChanges(Divided):
    """What each number of a gradient becomes by itself is right, and so is Lightning's own clipping."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.clamp_(-0.01, 0.01)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
