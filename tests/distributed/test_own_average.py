"""A moving average that the module keeps itself, in `on_train_batch_end`: in a second network, a buffer and a dict."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shardwise import gathered_weights
from shardwise.config.compose import compose
from shardwise.errors import ConfigError
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.run_dir.files import checkpoint_path
from tests.harness.cells import fit
from tests.harness.processes import spawn

STOP, STEPS = 3, 5
CELLS = {
    "ddp": ["strategy=ddp"],
    "fsdp": ["strategy=fsdp", "checkpoint=async"],
    "fsdp-bf16": ["strategy=fsdp", "precision=bf16"],
    "zero3": ["strategy=zero3"],
}


class Averaging(LightningModule):
    whole_weights_in: tuple[str, ...] = ("on_train_batch_end",)

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1))
        self.average = deepcopy(self.net).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(7, 4))
        self.shadow: dict[str, Tensor] = {}
        self.writes = writes

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).float().pow(2).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for mine, other in zip(self.average.parameters(), self.net.parameters(), strict=True):
                mine.lerp_(other, 0.1)
            self.mean.lerp_(self.net[0].weight.float(), 0.1)
            for name, p in self.net.named_parameters():
                self.shadow[name] = torch.lerp(self.shadow.get(name, torch.zeros_like(p)), p, 0.1)
            if self.writes:
                self.net[0].weight.clamp_(-0.1, 0.1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["shadow"] = self.shadow

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.shadow = checkpoint["shadow"]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), 0.05)


class Early(Averaging):
    """Averages between the forward and the backward pass, also in an object that was made before there were shards."""

    whole_weights_in = ("on_before_zero_grad",)

    def __init__(self) -> None:
        super().__init__()
        self.object = Shadow(self.net.parameters())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def on_before_zero_grad(self, optimizer: Any) -> None:
        Averaging.on_train_batch_end(self, None, None, 0)
        self.object.update(self.net.parameters())
        self.shadow["object"] = self.object.kept[0]


class Shadow:
    """As in many repositories: a list of averages, which is put into the weights by way of `p.data`."""

    def __init__(self, parameters: Any) -> None:
        self.kept = [p.detach().clone() for p in parameters]

    def update(self, parameters: Any) -> None:
        for mine, p in zip(self.kept, parameters, strict=True):
            mine.mul_(0.5).add_(p.detach(), alpha=0.5)

    def swap(self, parameters: Any) -> None:
        for mine, p in zip(self.kept, parameters, strict=True):
            mine_now, p_now = p.detach().clone(), mine.clone()
            p.data.copy_(p_now)
            mine.copy_(mine_now)


class Swapping(Averaging):
    """Validates with an average that an object keeps."""

    whole_weights_in = ("on_fit_start", "on_train_batch_end", "on_validation_start", "on_validation_end")

    def on_fit_start(self) -> None:
        self.object = Shadow(self.net.parameters())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.object.update(list(self.net.parameters()))

    def on_validation_start(self) -> None:
        self.object.swap(list(self.net.parameters()))

    on_validation_end = on_validation_start

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation/loss", self.training_step(batch, batch_idx), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...


class Plain(LightningModule):
    """The same network without an average."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Averaging().net

    training_step, validation_step = Averaging.training_step, Swapping.validation_step
    configure_optimizers = Averaging.configure_optimizers


class Keeps(Callback):
    """A second whole model, in `state_dict`. It makes weights whole by itself in the hook of each batch."""

    shadow: dict[str, Tensor] | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.shadow is None:
            self.shadow = {name: value.clone() for name, value in pl_module.state_dict().items()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.shadow is not None
        with gathered_weights(pl_module):
            for name, value in pl_module.state_dict().items():
                self.shadow[name].mul_(0.5).add_(value, alpha=0.5)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.back = {name: value.clone() for name, value in pl_module.state_dict().items()}
        pl_module.load_state_dict(self.shadow)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.load_state_dict(self.back)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.shadow = state_dict["shadow"]


class Data(LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(rows, batch_size=self.batch_size)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Any]:
        rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(rows, batch_size=self.batch_size)  # type: ignore[arg-type]


class Look(Callback):
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.shadow = {name: tensor.clone() for name, tensor in pl_module.shadow.items()}


def plan_for(run_dir: Path, *words: str) -> Plan:
    run_dir.mkdir(parents=True, exist_ok=True)
    argv = [
        "recipe=custom", f"module._target_={__name__}.Averaging", f"data._target_={__name__}.Data", "units=[]",
        "+data.batch_size=${micro_batch_size}", f"runs_dir={run_dir.parent}", f"name={run_dir.name}", "accelerator=cpu",
        "devices=2", "global_batch_size=8", "micro_batch_size=2", "checkpoint.monitor=null", f"max_steps={STEPS}",
        f"checkpoint.save_every_n_steps={STOP}", *words,
    ]  # fmt: skip
    return make_plan(compose(argv).jobs[0].config, Host(cuda_devices=0))


def averages(run_dir: Path, *words: str) -> dict[str, Tensor]:
    look = Look()
    found = fit(plan_for(run_dir, *words), look)
    dist.barrier()
    return {**found["final"], **found["buffers"], **{f"shadow.{name}": t for name, t in look.shadow.items()}}


def all_cells(folder: Path) -> dict[str, Any]:
    """In each rank."""
    found: dict[str, Any] = {}
    for name, words in CELLS.items():
        straight = averages(folder / name / "straight", *words)
        resume = f"resume={checkpoint_path(folder / name / 'straight', STOP)}"
        found[name] = straight, averages(folder / name / "resumed", *words, resume)
    for name in ("ddp", "fsdp", "zero3"):
        try:
            found[f"{name} writes"] = averages(folder / name / "writes", *CELLS[name], "module.writes=true")
        except ConfigError as error:
            found[f"{name} writes"] = str(error)
        early = averages(folder / name / "early", *CELLS[name], f"module._target_={__name__}.Early")
        found[f"{name} early"] = early
    return found


def swap_all(folder: Path) -> dict[tuple[str, str], Any]:
    """In each rank: what validation finds, and weights, straight and resumed."""
    found: dict[tuple[str, str], Any] = {}
    for kind, own in (
        ("Swapping", [f"module._target_={__name__}.Swapping"]),
        ("Keeps", [f"module._target_={__name__}.Plain", f"callbacks.mine._target_={__name__}.Keeps"]),
    ):
        for strategy in ("ddp", "fsdp", "zero2", "zero3"):
            words = [*own, "validate_every_n_steps=1", f"strategy={strategy}"]
            found[kind, strategy] = [fit(plan_for(folder / f"{kind}-{strategy}", *words))]
            dist.barrier()
            if kind == "Keeps":
                resume = f"resume={checkpoint_path(folder / f'{kind}-{strategy}', STOP)}"
                found[kind, strategy].append(fit(plan_for(folder / f"{kind}-{strategy}-on", *words, resume)))
    return found


def test_an_average_is_put_into_the_weights_for_validation(tmp_path: Path) -> None:
    found = spawn(2, swap_all, tmp_path)[0]
    expected = {kind: found[kind, "ddp"][0] for kind in ("Swapping", "Keeps")}
    losses = {kind: run["validation"]["validation/loss"] for kind, run in expected.items()}
    assert losses["Swapping"] == pytest.approx(losses["Keeps"])
    for (kind, strategy), runs in found.items():
        for run in runs:
            assert run["validation"]["validation/loss"] == pytest.approx(losses[kind]), (kind, strategy)
            for name, value in expected[kind]["final"].items():
                torch.testing.assert_close(run["final"][name], value, msg=f"{kind} {strategy} {name}")


def test_an_average_of_the_modules_own_goes_on_as_it_was(tmp_path: Path) -> None:
    for rank in spawn(2, all_cells, tmp_path):
        whole = rank["ddp"][0]
        assert {"average.0.weight", "mean", "shadow.2.bias"} <= whole.keys()
        for name in CELLS:
            straight, resumed = rank[name]
            assert straight.keys() == whole.keys()
            assert [key for key in straight if not torch.equal(straight[key], resumed[key])] == [], name
            if "bf16" not in name:
                for key, value in whole.items():
                    torch.testing.assert_close(straight[key].view_as(value), value, msg=f"{name} {key}")
        assert rank["ddp writes"]["net.0.weight"].abs().max() <= 0.1
        for key, value in rank["ddp writes"].items():
            torch.testing.assert_close(rank["fsdp writes"][key], value, msg=key)
        for name in ("fsdp", "zero3"):
            for key, value in rank["ddp early"].items():
                torch.testing.assert_close(rank[f"{name} early"][key].view_as(value), value, msg=f"{name} early {key}")
        assert "writes into net.0.weight in on_train_batch_end" in rank["zero3 writes"]
