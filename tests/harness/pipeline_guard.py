"""Runs of a module whose samples can be bad, in a pipeline and in one process: what the guard does, and an average."""

from __future__ import annotations

import io
import json
import math
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shardwise.config.compose import compose
from shardwise.errors import NonFiniteError
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.rank import run_until_rolled_back
from tests.harness.cells import Capture, fit
from tests.harness.modules import Bare, Layer, samples
from tests.harness.pipelines import INTERLEAVED, SIZE

BATCH = 8  # four micro-batches of two samples
ODD = 21  # a sample of the third window: of its third micro-batch
MARK, BEYOND = 7.25, 8.5  # a sample whose gradient is not a number, and one whose loss is infinite
SPIKE, LEAP = 36 * BATCH + 1, 900.0  # a sample of step 37, and its value

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "pipeline": (2, SIZE),
    "interleaved": (2, [*SIZE, *INTERLEAVED]),
}
SPIKES = [f"+data.value={LEAP}", f"+data.at={SPIKE}", "+data.count=400", "max_steps=39"]


class Odd(Layer):
    """The first one's gradient is not a number for a marked sample; what it computes always is."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.1)
        out = super().forward(x)
        if (x[:, 0] == MARK).any():
            bias = self.linear.bias
            out = out + (bias - bias.detach()).abs().sqrt()
        return out


class Fragile(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.Sequential(*(Odd(6) for _ in range(4))), nn.ModuleList()
        for number, layer in enumerate(self.layers):
            layer.mean.fill_(number)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        return loss + math.inf if (batch[0][:, 0] == BEYOND).any() else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)


class Marked(LightningDataModule):
    """In order; sample `at` holds `value`."""

    def __init__(self, batch_size: int, value: float = 0.0, at: int = ODD, count: int = 80) -> None:
        super().__init__()
        self.batch_size, self.value, self.at, self.count = batch_size, value, at, count

    def train_dataloader(self) -> DataLoader[Any]:
        rows = samples("pairs", self.count, 0).tensors[0].clone()
        rows[self.at, 0] = self.value
        return DataLoader(TensorDataset(rows), batch_size=self.batch_size, shuffle=False)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(samples("pairs", 5, 1).tensors[0]), batch_size=2)


class Look(Callback):
    """The weights, and this rank's buffers, after each step."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.buffers: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % 4 == 0:
            self.weights[trainer.global_step] = trainer.strategy.sharded.full_parameters()
            self.buffers[trainer.global_step] = {name: one.clone() for name, one in pl_module.named_buffers()}


def plan_for(run_dir: Path, layout: str, *words: str) -> Plan:
    ranks, more = LAYOUTS[layout]
    run_dir.mkdir(parents=True, exist_ok=True)
    argv = [
        "recipe=custom", "module._target_=tests.harness.pipeline_guard.Fragile",
        "data._target_=tests.harness.pipeline_guard.Marked", "+data.batch_size=${micro_batch_size}",
        f"runs_dir={run_dir.parent}", f"name={run_dir.name}", "accelerator=cpu", f"devices={ranks}", "strategy=fsdp",
        "micro_batch_size=2", f"global_batch_size={BATCH}", "max_steps=5", "precision=fp32",
        "checkpoint.save_every_n_steps=null", "checkpoint.monitor=null", "validate_every_n_steps=1000",
        "log_every_n_steps=1",
    ]  # fmt: skip
    return make_plan(compose([*argv, *more, *words]).jobs[0].config, Host(cuda_devices=0))


def watched(plan: Plan) -> dict[str, Any]:
    look, out, error = Look(), io.StringIO(), None
    with redirect_stdout(out):
        try:
            fit(plan, look)
        except NonFiniteError as raised:
            error = str(raised)
    lines = Path(plan.run_dir, "guard.jsonl")
    noted = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    return {"weights": look.weights, "buffers": look.buffers, "error": error, "out": out.getvalue(), "noted": noted}


def run_guard(folder: Path, cells: list[tuple[str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    """In each rank, of (layout, kind): steps that are not finite are skipped, or stop the run; so is a leap, or the run
    is rolled back."""
    skip, loss, gradient = "guard.on_nonfinite=skip", f"+data.value={BEYOND}", f"+data.value={MARK}"
    words = {"loss": [loss, skip], "loss-fp16": [loss, skip, "precision=fp16"], "gradient": [gradient, skip],
             "stopped": [loss], "leap": [*SPIKES, "guard.on_spike=skip"]}  # fmt: skip
    found = {}
    for layout, kind in cells:
        run_dir = folder / layout / kind
        if kind == "rollback":
            found[layout, kind] = roll_back(run_dir, layout)
        else:
            found[layout, kind] = watched(plan_for(run_dir, layout, *words[kind]))
    return found


def roll_back(run_dir: Path, layout: str) -> dict[str, Any]:
    words = [*SPIKES, "guard.on_spike=rollback", "checkpoint.save_every_n_steps=30", "checkpoint.keep_last=9"]
    capture, out = Capture(), io.StringIO()
    with redirect_stdout(out):
        again = run_until_rolled_back(plan_for(run_dir, layout, *words))
        assert again is not None
        groups = len(dist.distributed_c10d._world.pg_map)
        assert run_until_rolled_back(again, capture) is None
    more = len(dist.distributed_c10d._world.pg_map) - groups
    return {"final": capture.final, "out": out.getvalue(), "pass_over": again.guard.pass_over, "groups": more}


class Average(Callback):
    """What evaluation sees: the average of the weights."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(trainer.strategy.sharded.full_parameters())


def run_average(folder: Path, layouts: list[str]) -> dict[str, dict[str, Any]]:
    """In each rank: an average over five steps, the third of which is skipped; and one that goes on after two."""
    found: dict[str, dict[str, Any]] = {}
    words = ["ema_decay=0.5", f"+data.value={MARK}", "guard.on_nonfinite=skip", "validate_every_n_steps=5"]
    saving = "checkpoint.save_every_n_steps=2"
    for layout in layouts:
        home, straight, resumed = folder / layout, Average(), Average()
        result = fit(plan_for(home / "straight", layout, *words), straight)
        fit(plan_for(home / "stopped", layout, *words, saving, "max_steps=2"))
        saved = home / "stopped" / "checkpoints" / "step-00000002.ckpt"
        fit(plan_for(home / "resumed", layout, *words, saving, f"resume={saved}"), resumed)
        found[layout] = {"seen": straight.seen, "resumed": resumed.seen, "final": result["final"],
                         "buffers": result["buffers"], "validation": result["validation"]}  # fmt: skip
    return found
