"""A run of the language model that is saved under one layout and goes on under another, with divided layers or
sequences among them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from shardwise.checkpoint.chunks import whole
from shardwise.checkpoint.dcp import TensorWriter, read_tensors
from shardwise.checkpoint.metadata import read_metadata
from shardwise.checkpoint.state import gather
from shardwise.plan import Plan
from shardwise.run_dir.files import checkpoint_path
from tests.harness.cells import cell_plan, fit
from tests.harness.divided import CLIP, STEPS, Divided, reference
from tests.harness.parity import largest
from tests.harness.reference import update_deviation

SAVED = 2  # steps, of STEPS
TENSOR_2 = ("strategy=fsdp", "strategy.tensor_parallel_size=2")
CONTEXT_2 = ("strategy=fsdp", "strategy.context_parallel_size=2")
# A name → ranks, those that read other samples, and words
LAYOUTS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "one": (1, 1, ("strategy=ddp",)),
    "ddp": (2, 2, ("strategy=ddp",)),
    "fsdp": (2, 2, ("strategy=fsdp",)),
    "zero2": (2, 2, ("strategy=zero2",)),
    "tensor 2": (2, 1, TENSOR_2),
    "tensor 4": (4, 1, ("strategy=fsdp", "strategy.tensor_parallel_size=4")),
    "tensor 2, shard 2": (4, 2, TENSOR_2),
    "tensor 2, copies": (4, 2, ("strategy=fsdp_hybrid", "strategy.shard_size=1", "strategy.tensor_parallel_size=2")),
    "context 2": (2, 1, (*CONTEXT_2, "strategy.context_parallel_method=keys")),
    "context 2, by heads": (2, 1, (*CONTEXT_2, "strategy.context_parallel_method=heads")),
    "context 2, shard 2": (4, 2, (*CONTEXT_2, "strategy.context_parallel_method=heads")),
}


@dataclass(frozen=True)
class Pair:
    saved: str
    resumed: str
    tied: bool = True

    def __str__(self) -> str:
        return f"{self.saved} → {self.resumed}, {'tied' if self.tied else 'untied'}"


def layout_plan(folder: Path, layout: str, tied: bool, *words: str, precision: str = "fp32") -> Plan:
    ranks, data_ranks, own = LAYOUTS[layout]
    cell = Divided(own, data_ranks, precision=precision, tied=tied)
    keeps = ("checkpoint=default", "checkpoint.monitor=null", "checkpoint.save_every_n_steps=null")
    plan = cell_plan(folder, ranks, *cell.words(), *keeps, *words)
    (folder / "plan.json").write_text(plan.to_json())  # the launcher does
    return plan


def folder_of(folder: Path, layout: str, tied: bool) -> Path:
    return folder / f"{layout.replace(', ', '-').replace(' ', '-')}-{'tied' if tied else 'untied'}"


def save_layouts(folder: Path, cells: Sequence[tuple[str, bool]]) -> None:
    """In each rank: the first steps under each layout, and a checkpoint after them."""
    for layout, tied in cells:
        fit(layout_plan(folder_of(folder, layout, tied), layout, tied, f"max_steps={SAVED}"))


class Again(Callback):
    """Writes what a resumed run begins with, as the next checkpoint would have it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        TensorWriter(strategy.file_group()).write(self.folder, gather(strategy.sharded, pl_module, training=True))


def go_on(folder: Path, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """In each rank: the further steps of each pair."""
    found = []
    for number, pair in enumerate(pairs):
        saved = checkpoint_path(folder_of(folder, pair.saved, pair.tied), SAVED)
        to = folder / f"{LAYOUTS[pair.resumed][0]}-{number}"
        again = folder / f"{to.name}-again"
        words = (f"resume={saved}", "checkpoint.save_at_end=false")
        result = fit(layout_plan(to, pair.resumed, pair.tied, *words), Again(again))
        found.append({"losses": result["losses"], "final": result["final"], "saved": saved, "again": again})
    return found


def in_checkpoint(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole."""
    metadata = read_metadata(folder)
    known: dict[str, Any] = metadata.state_dict_metadata
    found = {name: torch.empty(of.size, dtype=of.properties.dtype) for name, of in known.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        read_tensors(folder, {name: whole(tensor) for name, tensor in found.items()}, None, metadata)
    return found


def unlike_saved(result: dict[str, Any]) -> list[str]:
    """The tensors, of the optimizer as well, that a resumed run has not taken up to the bit."""
    saved, again = in_checkpoint(result["saved"]), in_checkpoint(result["again"])
    assert any(name.endswith("exp_avg_sq") for name in saved)
    different = {name for name in saved.keys() & again.keys() if not torch.equal(saved[name], again[name])}
    return sorted((saved.keys() ^ again.keys()) | different)


def off_the_plain_loop(pair: Pair, result: dict[str, Any]) -> float:
    """The largest deviation of a run that went on from a plain loop that never stopped."""
    start, final, losses, _, _ = reference("fp32", "adamw", pair.tied, CLIP, Divided.layers)
    assert len(result["losses"]) == STEPS - SAVED
    return max(largest(result["losses"], losses[SAVED:]), *update_deviation(start, result["final"], final).values())
