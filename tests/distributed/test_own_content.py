"""What a module, its data and a callback put into a checkpoint themselves: saved, resumed, with trust and without."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shardwise.config.compose import compose
from shardwise.errors import ConfigError
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.run_dir.files import checkpoint_path
from tests.harness.cells import fit
from tests.harness.processes import spawn


class Stage(enum.Enum):
    early = "early"
    late = "late"


@dataclasses.dataclass(frozen=True)
class Settings:
    scale: Any
    since: datetime.date
    stage: Stage


class Normalizer:
    """As packages have them: no plain data, and pickled without trouble."""

    def __init__(self, mean: float) -> None:
        self.mean = mean


class Plain(LightningModule):
    """Keeps what is plain data; a step counts with it."""

    def __init__(self, width: int = 4, kind: type = nn.Linear) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = kind(width, 1)
        self.settings = Settings(np.float32(0), datetime.date(2026, 1, 2), Stage.early)
        self.seen: dict[Any, Any] = {}
        self.hooks: list[str] = []
        self.resumed: dict[str, Any] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.settings = dataclasses.replace(self.settings, scale=self.settings.scale + 1, stage=Stage.late)
        self.seen[self.settings.stage] = [np.arange(batch_idx + 1), batch.mean()]
        return self.net(batch).pow(2).mean() * float(self.settings.scale)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.hooks.append("save")
        checkpoint["settings"], checkpoint["seen"] = self.settings, self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.settings, self.seen = checkpoint["settings"], checkpoint["seen"]
        self.resumed = {"settings": self.settings, "hyper_parameters": checkpoint["hyper_parameters"]}


class Foreign(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.normalizer = Normalizer(0.0)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["normalizer"] = {"mean": 0.5, "of": Normalizer(0.5)}
        checkpoint["hook"] = lambda: None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.normalizer = checkpoint["normalizer"]["of"]


class Late(Plain):
    """Has what it saves only once it has trained."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.last = 1.0
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["last"] = self.last


class Wrong(Plain):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        raise KeyError("mistake")


class Data(LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size, self.day = batch_size, datetime.datetime(2026, 1, 1)

    def train_dataloader(self) -> DataLoader[Any]:
        rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(rows, batch_size=self.batch_size)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        return {"day": self.day + datetime.timedelta(days=1)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.day = state_dict["day"]
        Data.loaded = self.day


class Keeping(Callback):
    def __init__(self) -> None:
        self.taken: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"path": Path("a/b"), "thing": Normalizer(1.5)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.taken += [state_dict["path"], state_dict.get("thing")]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["of a callback"] = (np.float64(1.5), {Stage.early: 1})

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.taken.append(checkpoint["of a callback"])
        self.taken.append(pl_module.resumed)


def plan_for(folder: Path, name: str, steps: int, *words: str) -> Plan:
    run_dir = folder / name
    run_dir.mkdir(parents=True, exist_ok=True)
    argv = [
        "recipe=custom", f"module._target_={__name__}.{name}", f"data._target_={__name__}.Data", "units=[]",
        "+data.batch_size=${micro_batch_size}", f"runs_dir={folder}", f"name={name}", "accelerator=cpu", "devices=2",
        "global_batch_size=4", "micro_batch_size=2", f"max_steps={steps}", "checkpoint.save_every_n_steps=2",
        "checkpoint.monitor=null", "validate_every_n_steps=1000", *words,
    ]  # fmt: skip
    return make_plan(compose(argv).jobs[0].config, Host(cuda_devices=0))


def run(folder: Path, name: str, steps: int, *words: str) -> dict[str, Any]:
    printed, keeping = io.StringIO(), Keeping()
    found: dict[str, Any] = {}
    with contextlib.redirect_stdout(printed):
        try:
            found = fit(plan_for(folder, name, steps, *words), keeping)
        except (ConfigError, KeyError) as error:
            found["error"] = f"{type(error).__name__}: {error}"
    dist.barrier()
    lines = [line for line in printed.getvalue().splitlines() if line.startswith(("checkpoints: ", "resume: "))]
    return {**found, "lines": lines, "taken": keeping.taken, "day": getattr(Data, "loaded", None)}


def all_runs(folder: Path) -> dict[str, Any]:
    """In each rank."""
    found = {}
    for name in ("Plain", "Foreign"):
        found[f"{name} straight"] = run(folder / "straight", name, 4)
        found[f"{name} saved"] = run(folder, name, 2, "strategy=fsdp" if name == "Plain" else "checkpoint=async")
        resume = f"resume={checkpoint_path(folder / name, 2)}"
        found[f"{name} resumed"] = run(folder, name, 4, resume)
        found[f"{name} trusted"] = run(folder, name, 4, resume, "trust=true")
    found["Late"] = run(folder, "Late", 2)
    found["Wrong"] = run(folder, "Wrong", 4)
    return found


def test_what_is_put_into_a_checkpoint_is_there_again(tmp_path: Path) -> None:
    ranks = spawn(2, all_runs, tmp_path)
    first = ranks[0]
    settings = {"settings": Settings(np.float32(2), datetime.date(2026, 1, 2), Stage.late),
                "hyper_parameters": {"width": 4}}  # fmt: skip
    for rank in ranks:
        for name in ("Plain resumed", "Plain trusted", "Foreign trusted"):
            found, straight = rank[name], rank[f"{name.split()[0]} straight"]
            assert all(torch.equal(found["final"][key], straight["final"][key]) for key in straight["final"]), name
            assert found["day"] == datetime.datetime(2026, 1, 2)
            of_callback, resumed, path, thing = found["taken"]
            assert of_callback == (np.float64(1.5), {Stage.early: 1}) and type(of_callback[0]) is np.float64
            assert resumed == settings and type(resumed["settings"].scale) is np.float32
            assert path == Path("a/b")
            assert thing.mean == 1.5 if "trusted" in name else thing is None
        error = rank["Foreign resumed"]["error"]
        assert error.startswith("ConfigError: ") and "KeyError: 'normalizer'" in error and "trust=true" in error
        assert "came without callbacks.Keeping.thing, normalizer, hook" in error
        assert "error" not in rank["Late"] and rank["Wrong"]["error"] == "KeyError: 'mistake'"
        assert all(not rank[name]["lines"] for name in rank if rank is not first)
    thing = f"{__name__}.Normalizer"
    (said,) = first["Foreign saved"]["lines"]
    assert f"callbacks.Keeping.thing ({thing}), normalizer ({thing}): not plain data, so it is kept" in said
    assert "hook (function): not plain data, and it cannot be pickled: it is left out" in said
    (said,) = first["Plain resumed"]["lines"][:1]
    assert f"callbacks.Keeping.thing ({thing})" in said and "trust=true reads them" in said
    for name in ("Late", "Wrong"):
        (said,) = [line for line in first[name]["lines"] if "before the first step nothing can be saved" in line]
        assert "in on_save_checkpoint)" in said
    manifest = json.loads((checkpoint_path(tmp_path / "Foreign", 2) / "manifest.json").read_text())
    assert "trainer.unsafe.pkl" in manifest["files"] and manifest["format"] == 2
    assert not list((tmp_path / "Wrong").rglob("*.ckpt")) and list((tmp_path / "Late").rglob("*.ckpt"))
