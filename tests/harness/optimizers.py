"""What the tests of optimizers with compact state and of Muon run: a small model, and their plain versions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.config.compose import compose
from shardwise.optim.adamw import shares
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.run_dir.files import checkpoint_path
from tests.harness.cells import fit
from tests.harness.everything import BATCH, IGNORE, VOCABULARY, Everything, rows
from tests.harness.parity import STRATEGIES
from tests.harness.reference import WEIGHT_DECAY, groups_of, plain_loop, update_deviation

STEPS, SAVED, SKIPPED, CLIP, WIDTH = 6, 2, 3, 0.1, 64
RATES = {"adamw_8bit": 0.01, "adamw_bf16": 0.01, "muon": 0.02}
BLOCKS = {64: 64, 67: 67, 320: 160}  # the length of a row → that of its blocks; rows of 5 have none
MATRICES = [f"blocks.{i}.{name}.weight" for i in range(2) for name in ("down", "up", "kernel", "back")]


class Block(nn.Module):
    """Neither two nor four ranks divide 67 or 5 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 67), nn.Linear(67, WIDTH)
        self.kernel, self.back = nn.Conv1d(WIDTH, 5, 5, padding=2), nn.Linear(5, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.up(torch.tanh(self.down(self.norm(x))))
        mixed: Tensor = self.back(torch.tanh(self.kernel(x.transpose(1, 2))).transpose(1, 2))
        return x + mixed


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * 0.2)

    def loss_sum(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        x = self.embedding(batch["tokens"])
        for block in self.blocks:
            x = block(x)
        targets = batch["targets"].flatten()
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets, ignore_index=IGNORE, reduction="sum")
        return loss, (targets != IGNORE).sum()


class Wide(Everything):
    """The network as a LightningModule. In step `nan_at`, counted from 0, the loss of rank 1 is not a number."""

    def __init__(self, nan_at: int = -1) -> None:
        super().__init__(occasional=False)
        self.network, self.nan_at = Network(), nan_at  # type: ignore[assignment]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        odd = self.trainer.global_step == self.nan_at and self.trainer.global_rank == 1
        return super().training_step(batch, batch_idx) * (torch.nan if odd else 1.0)


@dataclass(frozen=True)
class Cell:
    optimizer: str
    strategy: str
    precision: str = "fp64"
    skips: bool = False  # the step with the number SKIPPED is passed over

    @property
    def name(self) -> str:
        return f"{self.optimizer}-{self.strategy}-{self.precision}{'-skips' * self.skips}".replace(" ", "-").replace(
            ",", ""
        )


def plan_of(cell: Cell, ranks: int, folder: Path, *words: str) -> Plan:
    folder.mkdir(parents=True, exist_ok=True)
    argv = [
        "recipe=custom", "module._target_=tests.harness.optimizers.Wide", "units=[Block]",
        "data._target_=tests.harness.everything.Rows", "+data.batch_size=${micro_batch_size}",
        f"runs_dir={folder.parent}", f"name={folder.name}", "accelerator=cpu", f"devices={ranks}",
        *STRATEGIES[cell.strategy], f"precision={cell.precision}", f"optimizer={cell.optimizer}",
        f"optimizer.lr={RATES[cell.optimizer]}", f"optimizer.weight_decay={WEIGHT_DECAY}",
        f"max_steps={STEPS}", f"global_batch_size={BATCH}", f"micro_batch_size={BATCH // ranks // 2}",
        f"gradient_clip_val={CLIP}", "checkpoint.monitor=null", f"checkpoint.save_every_n_steps={SAVED}",
        "checkpoint.keep_last=9", "checkpoint.save_at_end=false", "log_every_n_steps=1", *words,
        *([f"+module.nan_at={SKIPPED}", "guard.on_nonfinite=skip"] if cell.skips else []),
    ]  # fmt: skip
    return make_plan(compose(argv).jobs[0].config, Host(cuda_devices=0))


def run_all(
    folder: Path, ranks: int, cells: list[Cell], going_on_from: dict[Cell, Cell] | None = None
) -> dict[Cell, dict[str, Any]]:
    """In each rank: the weights of every cell, at its start and end, and its losses.

    `going_on_from`: the cell whose checkpoint a cell begins with.
    """
    found = {}
    for cell in cells:
        saved = (going_on_from or {}).get(cell)
        words = [] if saved is None else [f"resume={checkpoint_path(folder / saved.name, SAVED)}"]
        name = cell.name if saved is None else f"{saved.name}-to-{ranks}-{cell.name}"
        result = fit(plan_of(cell, ranks, folder / name, *words))
        found[cell] = {key: result[key] for key in ("start", "final", "losses")}
    return found


# The plain versions


class PlainAdamW:
    """AdamW as the paper has it. `keep` gives the moments of a parameter as they are read in the next step."""

    def __init__(self, groups: list[dict[str, Any]], keep: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self.groups, self.keep, self.steps = groups, keep, 0
        self.moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for g in groups for p in g["params"]}

    @torch.no_grad()
    def step(self, lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8) -> None:
        self.steps += 1
        for group in self.groups:
            for p in group["params"]:
                first, second = self.moments[p]
                first = beta1 * first + (1 - beta1) * p.grad
                second = beta2 * second + (1 - beta2) * p.grad**2
                root = (second / (1 - beta2**self.steps)).sqrt()
                p -= lr * group["weight_decay"] * p
                p -= lr * first / (1 - beta1**self.steps) / (root + eps)
                self.moments[p] = self.keep(first, second)


def in_bf16(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    return first.bfloat16().to(first.dtype), second.bfloat16().to(second.dtype)


def in_8_bits(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    if first.ndim < 2 or first[0].numel() not in BLOCKS:
        return first, second
    return nearest(first, signed=True), nearest(second.sqrt(), signed=False).square()


def nearest(values: Tensor, signed: bool) -> Tensor:
    """Each number as the nearest of the 256 shares of the largest of its block; what is not 0 stays so if unsigned."""
    blocks = values.reshape(-1, BLOCKS[values[0].numel()])
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True)).float().to(values.dtype)
    table = torch.tensor(shares(signed), dtype=values.dtype)
    share = (blocks / largest).nan_to_num()
    above = torch.searchsorted(table, share).clamp(1, 255)
    low, high = table[above - 1], table[above]
    read = torch.where((share - low < high - share) & (signed or low != 0), low, high)
    read = read.float().to(values.dtype)  # the table is in fp32
    return torch.where((largest == 0) | (~torch.tensor(signed) & (blocks == 0)), 0.0, read * largest).reshape(
        values.shape
    )


class PlainMuon:
    """torch.optim.Muon, which would orthogonalise in bfloat16, for `matrices`, and torch.optim.AdamW for the rest."""

    def __init__(self, module: nn.Module, matrices: list[str], lr: float = 0.02) -> None:
        chosen = [p for name, p in module.named_parameters() if name in matrices]
        assert len(chosen) == len(matrices)
        self.flat = [(p, nn.Parameter(p.detach().flatten(1))) for p in chosen]  # they share memory
        ids = {id(p) for p in chosen}
        others = [{**g, "params": [p for p in g["params"] if id(p) not in ids]} for g in groups_of(module)]
        self.muon = torch.optim.Muon(
            [flat for _, flat in self.flat], lr=lr, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
        )
        self.adamw = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95))

    def step(self) -> None:
        for p, flat in self.flat:
            assert p.grad is not None
            flat.grad = p.grad.flatten(1)
        with patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
            self.muon.step()
        self.adamw.step()


class Skipping:
    """An optimizer that does nothing in the step with the number SKIPPED."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        if self.steps != SKIPPED:
            self.optimizer.step()
        self.steps += 1


PLAIN: dict[str, Callable[[nn.Module], Any]] = {
    "adamw_8bit": lambda module: PlainAdamW(groups_of(module), in_8_bits),
    "adamw_bf16": lambda module: PlainAdamW(groups_of(module), in_bf16),
    "muon": lambda module: PlainMuon(module, MATRICES),
}


@functools.cache
def reference(optimizer: str, precision: str, skips: bool) -> tuple[dict[str, Tensor], list[float]]:
    """The weights at the end, by their names in `Wide`, and the losses: of a plain loop that nothing interrupts."""
    network = Network().to({"fp64": torch.float64, "fp32": torch.float32}[precision])

    def make(module: nn.Module) -> Any:
        return Skipping(PLAIN[optimizer](module)) if skips else PLAIN[optimizer](module)

    final, losses, _ = plain_loop(network, rows(), Network.loss_sum, make, STEPS, BATCH, CLIP)
    return {f"network.{name}": p for name, p in final.items()}, losses


def deviation(cell: Cell, result: dict[str, Any]) -> float:
    """The largest from the plain loop, of the update of any tensor or of any loss."""
    final, losses = reference(cell.optimizer, cell.precision, cell.skips)
    updates = update_deviation({name: result["start"][name] for name in final}, result["final"], final)
    pairs = zip(result["losses"], losses[STEPS - len(result["losses"]) :], strict=True)
    return max(*updates.values(), *(abs(ours / theirs - 1) for ours, theirs in pairs if math.isfinite(ours)))
