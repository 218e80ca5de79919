"""A sampler's order is dealt out over the ranks, or refused; and the data draws other random numbers on each rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from shardwise.config.compose import compose
from shardwise.data.evaluation import EvaluationLoader
from shardwise.data.loaders import TrainLoader
from shardwise.errors import ConfigError
from shardwise.plan import Host
from shardwise.plan.resolve import make_plan
from tests.harness.cells import fit
from tests.harness.processes import spawn


class OwnSamples(Sampler[int]):
    def __init__(self, first: int, each: int) -> None:
        self.first, self.each = first, each

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, 16, self.each))

    def __len__(self) -> int:
        return len(range(self.first, 16, self.each))


def deal_out() -> None:
    """In each rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    words = ["micro_batch_size=2", "global_batch_size=4", "accelerator=cpu", "devices=2"]
    plan = make_plan(compose(words).jobs[0].config, Host(cuda_devices=0, run_id="x"))

    def loader(sampler: Sampler[int]) -> DataLoader[Any]:
        return DataLoader(list(range(16)), batch_size=2, sampler=sampler)  # type: ignore[arg-type]

    def group() -> dist.ProcessGroup | None:
        return dist.group.WORLD

    with pytest.raises(ConfigError, match="the training loader's OwnSamples gives ranks different samples"):
        TrainLoader(loader(OwnSamples(rank, 2)), plan, rank, torch.device("cpu"), None, None, group)
    with pytest.raises(ConfigError, match="validation, test or prediction loader's OwnSamples gives ranks different"):
        EvaluationLoader(loader(OwnSamples(rank, 2)), plan, rank, deque().append, None, group)
    evaluation = EvaluationLoader(loader(OwnSamples(0, 2)), plan, rank, deque().append, None, group)
    assert torch.cat(list(evaluation)).tolist() == [[0, 2, 8, 10], [4, 6, 12, 14]][rank]
    dist.destroy_process_group()


def test_a_sampler_gives_every_rank_the_same_order(tmp_path: Path) -> None:
    spawn(2, deal_out)


class Diffusion(LightningModule):
    """Its data draws the time steps and the noise when it collates a batch."""

    seen: list[float] = []  # of all steps

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        clean, time, noise = batch
        self.seen.extend(time.flatten().tolist())
        return nn.functional.mse_loss(self.net(torch.cat([clean + time * noise, time], 1)), noise)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def with_times(samples: list[Tensor]) -> list[Tensor]:
    clean = torch.stack(samples)
    return [clean, torch.rand(len(clean), 1), torch.randn_like(clean)]


class DiffusionData(LightningDataModule):
    def __init__(self, num_workers: int) -> None:
        super().__init__()
        self.num_workers = num_workers

    def train_dataloader(self) -> DataLoader[Any]:
        rows: Any = torch.arange(64.0).reshape(16, 4) / 64
        return DataLoader(rows, 2, shuffle=True, num_workers=self.num_workers, collate_fn=with_times)


def diffuse(folder: Path, *strategies: str) -> list[tuple[str, list[float], list[float]]]:
    """In each rank: the time steps without a stop, and those of a resume that has other workers."""
    found = []
    for strategy in strategies:
        seen = []
        words = [
            "recipe=custom", f"module._target_={__name__}.Diffusion", f"data._target_={__name__}.DiffusionData",
            f"runs_dir={folder}", "accelerator=cpu", "devices=2", f"strategy={strategy}", "max_steps=6",
            "global_batch_size=4", "micro_batch_size=2", "checkpoint.save_every_n_steps=2", "checkpoint.keep_last=9",
        ]  # fmt: skip
        checkpoint = folder / strategy / "checkpoints" / "step-00000002.ckpt"
        for more in (
            [f"name={strategy}", "data.num_workers=0"],
            [f"name={strategy}-resumed", "data.num_workers=2", f"resume={checkpoint}"],
        ):
            (folder / more[0].removeprefix("name=")).mkdir(exist_ok=True)
            Diffusion.seen.clear()
            fit(make_plan(compose([*words, *more]).jobs[0].config, Host(cuda_devices=0)))
            seen.append([*Diffusion.seen])
        found.append((strategy, *seen))
    return found


def test_a_diffusion_model_draws_other_time_steps_on_each_rank(tmp_path: Path) -> None:
    """The same under every strategy, and with other workers in a resume."""
    zero, one = spawn(2, diffuse, tmp_path, "ddp", "fsdp", "zero2")
    for (strategy, first, resumed), (_, second, other) in zip(zero, one, strict=True):
        assert len({*first, *second}) == 24, strategy
        assert (resumed, other) == (first[4:], second[4:]), strategy
        assert (first, second) == (zero[0][1], one[0][1]), strategy
