"""A foreign module here, in ranks that exist already, and under stock Lightning in one process."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from shardwise.config.compose import compose
from shardwise.data.order import GlobalOrder
from shardwise.errors import ConfigError
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.trainer import build_data, build_module
from tests.foreign_packages.cases import STRATEGIES, Case
from tests.foreign_packages.demos import write_mnist, write_wikitext
from tests.harness.cells import fit

RANKS, STEPS, SAVED = 2, 6, 3


def plan_for(folder: Path, case: Case, strategy: str, *words: str) -> Plan:
    folder.mkdir(parents=True, exist_ok=True)
    argv = [
        *case.argv(), f"strategy={strategy}", f"runs_dir={folder.parent}", f"name={folder.name}", "accelerator=cpu",
        f"devices={RANKS}", f"max_steps={STEPS}", "log_every_n_steps=1", f"checkpoint.save_every_n_steps={SAVED}",
        "validate_every_n_steps=1000", *words,
    ]  # fmt: skip
    return make_plan(compose(argv).jobs[0].config, Host(cuda_devices=0))


def start_in(folder: Path) -> None:
    """The folder that a user would start in, with the demos' data."""
    os.environ["PL_USE_MOCKED_MNIST"] = "1"  # what the demos read where there is no torchvision
    os.chdir(folder)


def make_home(folder: Path) -> None:
    write_wikitext(folder)
    write_mnist(folder)


def folder_of(home: Path, case: Case, strategy: str) -> Path:
    return home / "runs" / f"{case.package}-{case.name}-{strategy}".replace(", ", "-")


def train_all(home: Path, cases: list[Case]) -> dict[tuple[str, str], Any]:
    """In each rank: every case under every strategy, saved in the middle; what came out, or what the refusal said."""
    start_in(home)
    found: dict[tuple[str, str], Any] = {}
    for case in cases:
        for strategy in STRATEGIES:
            try:
                found[case.name, strategy] = fit(plan_for(folder_of(home, case, strategy), case, strategy))
            except ConfigError as error:
                found[case.name, strategy] = str(error)
    return found


def resume_all(home: Path, cases: list[Case]) -> dict[tuple[str, str], Any]:
    """In each rank, in new processes: from the checkpoint in the middle to the end."""
    start_in(home)
    found = {}
    for case in cases:
        for strategy in STRATEGIES:
            if strategy not in case.refused:
                folder = folder_of(home, case, strategy)
                plan = plan_for(folder, case, strategy)
                resume = str(folder / "checkpoints" / f"step-{SAVED:08d}.ckpt")
                found[case.name, strategy] = fit(dataclasses.replace(plan, resume=resume))
    return found


def train_under_stock(home: Path, cases: list[Case]) -> dict[str, Any]:
    """In one process without shardwise's Trainer: the same global batches, one after the other."""
    start_in(home)
    return {case.name: _stock(home, case) for case in cases}


def _stock(home: Path, case: Case) -> dict[str, Any]:
    plan = plan_for(home / "stock", case, "ddp")
    module = build_module(plan)  # from the seed: its weights are those of rank 0
    data = build_data(plan) if case.data else None
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    losses = Losses()
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=STEPS, max_epochs=-1, logger=False, callbacks=[losses], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0,
        accumulate_grad_batches=RANKS if case.accumulates else 1, default_root_dir=home,
    )  # fmt: skip
    source: Any = module if data is None else data
    own = source.train_dataloader
    source.train_dataloader = lambda: in_our_order(own(), plan, case)
    trainer.fit(module, datamodule=data)
    per_step = torch.tensor(losses.seen).reshape(STEPS, -1).sum(1).tolist()
    return {"start": start, "losses": per_step}


class Losses(pl.Callback):
    """Of every batch; Lightning has divided them by the number that it accumulates."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))


def in_our_order(loader: DataLoader[Any], plan: Plan, case: Case) -> DataLoader[Any]:
    """The user's own loader with the global batches of a run here, or with the micro-batches of its ranks."""
    order = GlobalOrder(
        samples=len(loader.dataset), global_batch_size=plan.global_batch_size,  # type: ignore[arg-type]
        shuffle=isinstance(loader.sampler, RandomSampler), seed=plan.seed,
    )  # fmt: skip
    size = plan.global_batch_size
    batches = [
        [
            order.micro_batches(step * size, size, rank, RANKS, case.micro_batch_size)[0].tolist()
            for rank in range(RANKS)
        ]
        for step in range(STEPS)
    ]
    flat = (
        [part for step in batches for part in step] if case.accumulates else [[*one, *other] for one, other in batches]
    )
    per_epoch = order.steps_per_epoch * (RANKS if case.accumulates else 1)
    return DataLoader(loader.dataset, batch_sampler=Batches(flat, per_epoch), collate_fn=loader.collate_fn)


class Batches:
    """Every pass hands over the next epoch."""

    def __init__(self, batches: list[list[int]], per_epoch: int) -> None:
        self.batches, self.per_epoch, self.passed = batches, per_epoch, 0

    def __iter__(self) -> Iterator[list[int]]:
        start, self.passed = self.passed, self.passed + self.per_epoch
        yield from self.batches[start : self.passed]

    def __len__(self) -> int:
        return self.per_epoch


def is_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], p) for name, p in expected.items())
