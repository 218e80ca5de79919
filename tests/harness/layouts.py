"""A run of the language model that is saved under one layout and goes on under another, with divided layers or
sequences among them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from shardwise.checkpoint.dcp import read_metadata, read_tensors, whole
from shardwise.plan import Plan
from shardwise.run_dir.files import checkpoint_path
from tests.harness.cells import cell_plan, fit
from tests.harness.divided import (
    CLIP,
    COPIES,
    HEADS,
    HYBRID,
    INTERLEAVED,
    KEYS,
    STEPS,
    Divided,
    axis_words,
    reference,
)
from tests.harness.exact_resume import unlike
from tests.harness.parity import BOUNDS, largest
from tests.harness.reference import update_deviation

SAVED = 2  # steps, of STEPS
BOUND = BOUNDS["fp32"]
LAYERS = 4  # of a run that goes on under another layout: so many can be interleaved
DEEP = (f"model.n_layers={LAYERS}", "deterministic=true")  # GPUs have the same bits twice with the second word alone


def _axes(words: tuple[str, ...], data_ranks: int = 1) -> tuple[int, int, tuple[str, ...]]:
    """A line of LAYOUTS for what divides layers, sequences or depth."""
    sizes = [int(word.rpartition("=")[2]) for word in words if "_parallel_size=" in word]
    return math.prod(sizes) * data_ranks, data_ranks, words


# A name → ranks, those that read other samples, and words
LAYOUTS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "one": (1, 1, ("strategy=ddp",)),
    "ddp": (2, 2, ("strategy=ddp",)),
    "fsdp": (2, 2, ("strategy=fsdp",)),
    "zero2": (2, 2, ("strategy=zero2",)),
    "tensor 2": _axes(axis_words(2)),
    "context 2": _axes(axis_words(1, 2, 1, KEYS)),
    "context 2, by heads": _axes(axis_words(1, 2, 1, HEADS)),
    "pipeline 2, gpipe": _axes(axis_words(1, 1, 2, "strategy.pipeline_schedule=gpipe")),
    "pipeline 2, 1f1b": _axes(axis_words(1, 1, 2)),
    "pipeline 2, interleaved": _axes(axis_words(1, 1, 2, *INTERLEAVED)),
    # Four ranks
    "tensor 4": _axes(axis_words(4)),
    "tensor 2, shard 2": _axes(axis_words(2), 2),
    "tensor 2, copies": _axes(axis_words(2, 1, 1, *COPIES), 2),
    "context 2, shard 2": _axes(axis_words(1, 2, 1, HEADS), 2),
    "context 2, copies": _axes(axis_words(1, 2, 1, KEYS, *COPIES), 2),
    "pipeline 4": _axes(axis_words(1, 1, 4)),
    "pipeline 2, shard 2": _axes(axis_words(1, 1, 2), 2),
    "pipeline 2, copies": _axes(axis_words(1, 1, 2, *COPIES), 2),
    "tensor 2, context 2": _axes(axis_words(2, 2, 1, KEYS)),
    "tensor 2, context 2, by heads": _axes(axis_words(2, 2, 1, HEADS)),
    "pipeline 2, tensor 2": _axes(axis_words(2, 1, 2)),
    "pipeline 2, interleaved, context 2": _axes(axis_words(1, 2, 2, HEADS, *INTERLEAVED)),
    # Eight ranks
    "tensor 2, copies 2, shard 2": _axes(axis_words(2, 1, 1, *HYBRID), 4),
    "tensor 2, context 2, shard 2": _axes(axis_words(2, 2, 1, HEADS), 2),
    "pipeline 2, tensor 4": _axes(axis_words(4, 1, 2)),
    "pipeline 2, interleaved, copies 2, shard 2": _axes(axis_words(1, 1, 2, *INTERLEAVED, *HYBRID), 4),
    "pipeline 2, shard 2, tensor 2": _axes(axis_words(2, 1, 2), 2),
    "pipeline 2, shard 2, context 2": _axes(axis_words(1, 2, 2, KEYS), 2),
    "pipeline 2, copies, tensor 2": _axes(axis_words(2, 1, 2, *COPIES), 2),
    "pipeline 2, tensor 2, context 2": _axes(axis_words(2, 2, 2, KEYS)),
}
WITHOUT_AXES = ["one", "ddp", "fsdp", "zero2"]
AXES = [name for name, (_, _, words) in LAYOUTS.items() if any("_parallel_size=" in word for word in words)]


@dataclass(frozen=True)
class Pair:
    saved: str
    resumed: str
    tied: bool = True

    def __str__(self) -> str:
        return f"{self.saved} → {self.resumed}, {'tied' if self.tied else 'untied'}"


def matrix_pairs(layouts: Sequence[str], ranks: Sequence[int]) -> list[Pair]:
    """What `make checkpoint-matrix` runs of these layouts, where both sides have one of these numbers of ranks: each
    with itself, both ways with every strategy without axes, and with two others of the list, one near and one far."""
    names, pairs = [name for name in layouts if LAYOUTS[name][0] in ranks], dict[Pair, None]()
    for number, name in enumerate(names):
        others = [names[(number + step) % len(names)] for step in (0, 1, len(names) // 2)]
        pairs |= dict.fromkeys(Pair(name, other) for other in (*others, *WITHOUT_AXES))
        pairs |= dict.fromkeys(Pair(other, name) for other in WITHOUT_AXES)
    return [pair for pair in pairs if {LAYOUTS[pair.saved][0], LAYOUTS[pair.resumed][0]} <= set(ranks)]


def layout_plan(
    folder: Path, layout: str, tied: bool, *words: str, precision: str = "fp32", accelerator: str = "cpu"
) -> Plan:
    ranks, data_ranks, own = LAYOUTS[layout]
    cell = Divided(own, data_ranks, precision=precision, tied=tied)
    keeps = ("checkpoint=default", "checkpoint.monitor=null", "checkpoint.save_every_n_steps=null")
    plan = cell_plan(folder, ranks, *cell.words(), *keeps, *words, accelerator=accelerator)
    (folder / "plan.json").write_text(plan.to_json())  # the launcher does
    return plan


def folder_of(folder: Path, layout: str, tied: bool) -> Path:
    return folder / f"{layout.replace(', ', '-').replace(' ', '-')}-{'tied' if tied else 'untied'}"


def save_layouts(
    folder: Path, cells: Sequence[tuple[str, bool]], accelerator: str = "cpu"
) -> dict[tuple[str, bool], dict[str, Any]]:
    """In each rank: a run under each layout that does not stop, and saves after its first steps."""
    saving = (f"checkpoint.save_every_n_steps={SAVED}", "checkpoint.save_at_end=false")
    return {
        (layout, tied): fit(
            layout_plan(folder_of(folder, layout, tied), layout, tied, *DEEP, *saving, accelerator=accelerator)
        )
        for layout, tied in cells
    }


class Again(Callback):
    """Saves what a resumed run begins with, in a hook that has whole weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.folder)


def go_on(folder: Path, pairs: Sequence[Pair], accelerator: str = "cpu") -> list[dict[str, Any]]:
    """In each rank: the further steps of each pair."""
    found = []
    for pair in pairs:
        before = folder_of(folder, pair.saved, pair.tied)
        to = folder / f"{before.name}-to-{folder_of(folder, pair.resumed, pair.tied).name}"
        saved, again = checkpoint_path(before, SAVED), folder / f"{to.name}-again"
        words = (*DEEP, f"resume={saved}", "checkpoint.save_at_end=false")
        result = fit(layout_plan(to, pair.resumed, pair.tied, *words, accelerator=accelerator), Again(again))
        found.append(result | {"saved": saved, "again": again})
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


def unlike_straight(straight: dict[str, Any], resumed: dict[str, Any]) -> list[str]:
    """What has other bits, in one rank, in a run that went on than in the one that did not stop."""
    further = {kind: straight[kind][SAVED:] for kind in ("losses", "norms", "rates")}
    return unlike(straight | further, resumed)


def off_the_plain_loop(pair: Pair, result: dict[str, Any], made_on: str = "cpu") -> float:
    """The largest deviation of a run that went on from a plain loop that never stopped."""
    start, final, losses, _, _ = reference("fp32", "adamw", pair.tied, CLIP, LAYERS, made_on)
    assert len(result["losses"]) == STEPS - SAVED
    return max(largest(result["losses"], losses[SAVED:]), *update_deviation(start, result["final"], final).values())
