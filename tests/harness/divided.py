"""The language model under layouts that divide layers or sequences, against a plain loop over the same module."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from recipes.language_modeling.model import FeedForward, Transformer
from recipes.language_modeling.module import LanguageModel
from shardwise.nn.linear_cross_entropy import IGNORE, linear_cross_entropy
from shardwise.run_dir.files import checkpoint_path
from shardwise.weights.initialize import Materializer
from tests.harness.cells import MaskedTokens, cell_plan, fit, masked_tokens
from tests.harness.parity import OPTIMIZERS, largest
from tests.harness.reference import WEIGHT_DECAY, plain_loop, update_deviation

STEPS, BATCH, CLIP = 4, 8, 0.1
SIZES = {"dim": 32, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 44}
SAVING = ("checkpoint=default", "checkpoint.save_every_n_steps=2", "checkpoint.monitor=null")


def axis_words(tensor: int = 1, context: int = 1, pipeline: int = 1, *more: str) -> tuple[str, ...]:
    """The words of a layout: the sizes of its axes, and what else it has."""
    sizes = {"tensor": tensor, "context": context, "pipeline": pipeline}
    return ("strategy=fsdp", *(f"strategy.{axis}_parallel_size={n}" for axis, n in sizes.items() if n > 1), *more)


HEADS, KEYS = (f"strategy.context_parallel_method={method}" for method in ("heads", "keys"))
INTERLEAVED = ("strategy.pipeline_schedule=interleaved", "strategy.pipeline_chunks=2")
HYBRID = ("strategy=fsdp_hybrid", "strategy.shard_size=2")
COPIES = ("strategy=fsdp_hybrid", "strategy.shard_size=1")


@dataclass(frozen=True)
class Divided:
    """One layout and what makes it hard: tied weights, accumulation, clipping, checkpointing."""

    layout: tuple[str, ...]
    data_ranks: int = 1
    precision: str = "fp64"
    optimizer: str = "adamw"
    tied: bool = True
    accumulate: int = 2
    clip: float | None = CLIP
    layers: int = 2
    more: tuple[str, ...] = field(default=())

    def words(self) -> list[str]:
        return [
            *self.layout, f"precision={self.precision}", *OPTIMIZERS[self.optimizer], "schedule=none",
            f"optimizer.weight_decay={WEIGHT_DECAY}", f"max_steps={STEPS}", f"validate_every_n_steps={STEPS}",
            f"global_batch_size={BATCH}",
            f"micro_batch_size={BATCH // self.data_ranks // self.accumulate}",
            f"gradient_clip_val={'null' if self.clip is None else self.clip}", "checkpoint=none",
            *(f"model.{name}={size}" for name, size in SIZES.items()), f"model.n_layers={self.layers}",
            f"model.tie_embeddings={self.tied}", *self.more,
        ]  # fmt: skip


class Scale(nn.Module):
    """A parameter without a dimension, which FSDP2 does not shard."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ScaledFeedForward(FeedForward):
    """Where layers are divided, its scale sees this rank's part of the sequence."""

    tensor_parallel_layers: ClassVar[dict[str, str]] = {"scale": "norm"}

    def __init__(self, feed_forward: FeedForward) -> None:
        nn.Module.__init__(self)
        self.w1, self.w3, self.w2, self.scale = feed_forward.w1, feed_forward.w3, feed_forward.w2, Scale()

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.scale(super().forward(x))
        return scaled


class Scaled(LanguageModel):
    """Scales what each feed-forward gives."""

    def __init__(self, model: Transformer, sample_prompt: str = "", sample_tokens: int = 0) -> None:
        super().__init__(model, sample_prompt, sample_tokens)
        for block in model.blocks:
            block.feed_forward = ScaledFeedForward(block.feed_forward)  # type: ignore[arg-type]

    def init_module_weights(self, module: nn.Module) -> None:
        if isinstance(module, Scale):
            nn.init.constant_(module.weight, 1.5)
        else:
            super().init_module_weights(module)


class OfTwoLengths(MaskedTokens):
    """The sequences of every other micro-batch are half as long."""

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        rows = [
            {key: tensor[: 8 if number // self.batch_size % 2 else 16] for key, tensor in row.items()}
            for number, row in enumerate(masked_tokens(48))
        ]
        return DataLoader(rows, batch_size=self.batch_size)  # type: ignore[arg-type]


def run_divided(folder: Path, ranks: int, cells: Sequence[Divided], accelerator: str = "cpu") -> list[dict[str, Any]]:
    """In each rank: one cell after the other."""
    return [
        fit(cell_plan(folder / str(number), ranks, *cell.words(), accelerator=accelerator))
        for number, cell in enumerate(cells)
    ]


def run_saved(folder: Path, ranks: int, runs: Sequence[tuple[str, Divided, str | None]]) -> dict[str, dict[str, Any]]:
    """In each rank: named runs that save after every second step; each goes on from one of another name, or begins."""
    found = {}
    for name, cell, before in runs:
        resume = [] if before is None else [f"resume={checkpoint_path(folder / before, 2)}"]
        found[name] = fit(cell_plan(folder / name, ranks, *cell.words(), *SAVING, *resume))
    return found


@functools.cache
def reference(
    precision: str, optimizer: str, tied: bool, clip: float | None, layers: int, made_on: str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float], list[float], float]:
    """Parameters at the start and the end, losses, gradient norms, validation: of one process without a strategy.

    `made_on`: where the initial weights are drawn, as a GPU draws other ones; everything else is on the CPU.
    """
    dtype = {"fp64": torch.float64, "fp32": torch.float32}[precision]
    model = LanguageModel(Transformer(vocab_size=61, max_seq_len=16, n_layers=layers, tie_embeddings=tied, **SIZES))
    model = model.to(dtype)
    Materializer(model, torch.device(made_on), 0).materialize(model)
    model = model.cpu()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    final, losses, norms = plain_loop(model, masked_tokens(50), _loss_sum, optimizer, STEPS, BATCH, clip)
    model.load_state_dict(final, strict=False)
    rows = masked_tokens(13, seed=1)  # those of MaskedTokens.val_dataloader
    with torch.no_grad():
        total, items = _loss_sum(model, {key: torch.stack([row[key] for row in rows]) for key in rows[0]})
    return start, final, losses, norms, float(total / items)


def _loss_sum(module: LanguageModel, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    hidden, head = module.model(batch["tokens"]), module.model.head
    return linear_cross_entropy(hidden, head.weight, batch["targets"], loss="full"), (batch["targets"] != IGNORE).sum()


def deviation(cell: Divided, result: dict[str, Any], made_on: str = "cpu") -> dict[str, float]:
    """The largest relative deviations from the plain loop. Initial weights are equal to the bit.

    A run that went on from a checkpoint has the losses and norms of its own steps alone.
    """
    start, final, losses, norms, validation = reference(
        cell.precision, cell.optimizer, cell.tied, cell.clip, cell.layers, made_on
    )
    ran = len(result["losses"])
    if ran == len(losses):
        for name, tensor in start.items():
            assert torch.equal(result["start"][name], tensor), f"{cell} starts elsewhere: {name}"
    return {
        "update": max(update_deviation(start, result["final"], final).values()),
        "loss": largest(result["losses"], losses[-ran:]),
        "gradient_norm": largest(result["norms"], norms[-ran:]),
        "validation": largest([result["validation"]["validation/loss"]], [validation]),
    }
