"""`precision=fp64` has weights and buffers in fp64 as Lightning's 64-true has, whatever made them, and wherever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader

from shardwise.config.compose import compose
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.run_dir.files import checkpoint_path
from tests.harness.cells import fit
from tests.harness.processes import spawn

STEPS, BATCH = 4, 4


class Net(LightningModule):
    """Its layers are made in fp32, as those of a model that was loaded in that dtype."""

    late: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = spectral_norm(nn.Linear(4, 4, dtype=torch.float32))
        self.norm = nn.BatchNorm1d(4, dtype=torch.float32)
        self.register_buffer("shift", torch.full((4,), 0.1, dtype=torch.float32), persistent=False)
        self.register_buffer("phase", torch.ones(4, dtype=torch.complex64))

    def configure_model(self) -> None:
        if not hasattr(self, "late"):
            torch.manual_seed(1)
            self.late = nn.Linear(4, 1, dtype=torch.float32)
            self.late.register_buffer("shift", torch.full((1,), 0.2, dtype=torch.float32))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = torch.addmm(self.shift, self.norm(self.inner(batch)), torch.eye(4, dtype=batch.dtype))
        hidden = hidden * torch.view_as_real(self.phase * 1j)[:, 1]
        loss: Tensor = (self.late(hidden) + self.late.shift).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(LightningDataModule):
    def __init__(self, batch_size: int = BATCH) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Tensor]:
        rows = torch.randn(STEPS * BATCH, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
        return DataLoader(list(rows), batch_size=self.batch_size)  # type: ignore[arg-type]


def plan_of(folder: Path, ranks: int, name: str, *words: str) -> Plan:
    (folder / name).mkdir(parents=True, exist_ok=True)
    argv = [
        "recipe=custom", f"module._target_={__name__}.Net", f"data._target_={__name__}.Data",
        "data.batch_size=${micro_batch_size}", f"runs_dir={folder}", f"name={name}", "accelerator=cpu",
        f"devices={ranks}", f"global_batch_size={BATCH}", f"micro_batch_size={BATCH // ranks}", "precision=fp64",
        "checkpoint.monitor=null", "checkpoint.save_every_n_steps=2", *words,
    ]  # fmt: skip
    return make_plan(compose(argv).jobs[0].config, Host(cuda_devices=0))


def run_all(folder: Path, ranks: int) -> dict[str, dict[str, Any]]:
    """For each strategy a run in one piece, and one that goes on from its middle."""
    found: dict[str, dict[str, Any]] = {}
    for strategy in ("ddp", "fsdp"):
        to_the_end = [f"strategy={strategy}", f"max_steps={STEPS}"]
        found[strategy] = fit(plan_of(folder, ranks, strategy, *to_the_end))
        resume = f"resume={checkpoint_path(folder / strategy, 2)}"
        found[f"{strategy}-resumed"] = fit(plan_of(folder, ranks, f"{strategy}-resumed", *to_the_end, resume))
    return found


def stock() -> dict[str, Tensor]:
    """What Lightning's own Trainer has in the end."""
    module = Net()
    trainer = Trainer(max_steps=STEPS, precision="64-true", accelerator="cpu", logger=False, barebones=True)
    trainer.fit(module, datamodule=Data())
    return {name: tensor.detach() for name, tensor in [*module.named_parameters(), *module.named_buffers()]}


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_and_buffers_are_those_of_lightning(tmp_path: Path, ranks: int) -> None:
    expected: dict[str, Tensor] = spawn(1, stock)[0]
    for result in spawn(ranks, run_all, tmp_path, ranks):
        for run, found in result.items():
            end = found["final"] | found["buffers"]
            assert {name: end[name].dtype for name in expected} == {n: t.dtype for n, t in expected.items()}, run
            for name, tensor in expected.items():
                if ranks == 1:  # several ranks have statistics of their own batches
                    torch.testing.assert_close(end[name], tensor, rtol=1e-12, atol=1e-14)
            whole = result[run.partition("-")[0]]
            assert all(torch.equal(end[name], (whole["final"] | whole["buffers"])[name]) for name in expected), run
