"""A save that fails costs that save; what is damaged is named and passed over; no rank ever holds the whole state."""

from __future__ import annotations

import contextlib
import io
import json
import re
import resource
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shardwise.callbacks.saving import Saving
from shardwise.checkpoint import writer as saving
from shardwise.checkpoint.files import verify_resume
from shardwise.config.compose import compose
from shardwise.errors import CheckpointError, ConfigError
from shardwise.plan import Host
from shardwise.plan.resolve import make_plan
from shardwise.run_dir.checkpoints import damage, list_checkpoints, newest_whole
from shardwise.run_dir.resume import resolve_resume
from tests.harness.cells import fit
from tests.harness.commands import RECIPE, Running, check, make_home, metrics, run
from tests.harness.exact_resume import BATCH, Dropping, Noise, NoiseData, plan_for
from tests.harness.patience import slowness, wait_until
from tests.harness.processes import spawn

WIDE = 1536  # 9 MB a layer, 28 MB with what AdamW keeps


# Failures


def until_written(trainer: Any) -> None:
    (saver,) = (one for one in trainer.callbacks if isinstance(one, Saving))
    while saver.writer is not None and saver.writer.busy:
        time.sleep(0.01)


class Full(Callback):
    """While these steps are made rank 1's files may have no more than some bytes, as on a disk that is nearly full."""

    def __init__(self, steps: range) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        until_written(trainer)  # its disk is that of the step it was begun in
        if dist.get_rank() == 1:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            soft = 4096 if trainer.global_step + 1 in self.steps else hard
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def failing(folder: Path, *words: str) -> dict[str, Any]:
    """In each rank: saves after steps 2, 4 and 6, of which that after step 4 fails."""
    found: dict[str, Any] = {}
    for name, more, full in (("goes-on", [], range(4, 6)), ("stops", ["checkpoint.max_failures=0"], range(4, 8))):
        plan = plan_for(folder / name, 2, 6, "strategy=fsdp", *words, *more)
        plan = replace(plan, checkpoint=replace(plan.checkpoint, save_every_n_steps=2, keep_last=9))
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            try:
                fit(plan, Full(full))
                found[name] = None
            except CheckpointError as error:
                found[name] = str(error)
            finally:
                _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        found[f"{name} said"] = out.getvalue()
    return found


@pytest.mark.parametrize("words", [("checkpoint.asynchronous=false",), ("checkpoint=async",)], ids=lambda w: w[0])
def test_a_save_that_fails_on_one_rank_costs_that_save(tmp_path: Path, words: tuple[str, ...]) -> None:
    found = spawn(2, failing, tmp_path, *words)
    assert found[0]["goes-on"] is found[1]["goes-on"] is None
    steps = [path.name[5:13] for path in list_checkpoints(tmp_path / "goes-on")]
    assert steps == ["00000002", "00000006"] and not list(tmp_path.glob("*/checkpoints/*.partial"))
    said = found[0]["goes-on said"]
    assert re.search(r"step-00000004\.ckpt could not be written: rank 1: .*; the run goes on, and tries again", said)
    assert metrics(tmp_path / "goes-on", "checkpoint/failures") == {4: [1.0]}  # at once, not at the next save
    at_once = "the run stops at the next save" in found[0]["stops said"]
    assert at_once == (words == ("checkpoint=async",)) and "goes on" not in found[0]["stops said"]
    for told in (found[0]["stops"], found[1]["stops"]):
        assert "step-00000004.ckpt could not be written: rank 1:" in told
        assert "resume=auto goes on from the last" in told
    assert newest_whole(tmp_path / "stops") == tmp_path / "stops" / "checkpoints" / "step-00000002.ckpt"


def busy(folder: Path) -> str:
    """A save after every step, the first of which is held up until step 3 is over."""
    go = threading.Event()
    real = saving.publish

    def held_up(*args: Any) -> int:
        assert go.wait(60 * slowness())
        return real(*args)

    class Release(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 3:
                go.set()

    plan = plan_for(folder / "busy", 1, 4, "strategy=ddp", "checkpoint=async", "checkpoint.when_busy=skip")
    plan = replace(plan, checkpoint=replace(plan.checkpoint, save_every_n_steps=1, keep_last=9))
    out = io.StringIO()
    with contextlib.redirect_stdout(out), patch.object(saving, "publish", held_up):
        fit(plan, Release())
    return out.getvalue()


def test_a_save_is_left_out_while_one_is_being_written(tmp_path: Path) -> None:
    """The last is not: it waits."""
    [said] = spawn(1, busy, tmp_path)
    assert [path.name for path in list_checkpoints(tmp_path / "busy")] == ["step-00000001.ckpt", "step-00000004.ckpt"]
    assert re.findall(r"checkpoint (step-\d+)\.ckpt is left out", said) == ["step-00000002", "step-00000003"]


# The best


class Scored(Dropping):
    """Of which validation says what the test has written down for a step."""

    scores: ClassVar[list[float]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.scores[self.global_step - 1])


class ScoredData(NoiseData):
    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Noise(), batch_size=5 * BATCH)


class Obstacle(Callback):
    """In the way of one save, from the first step on; each validation begins when nothing is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.path.parent.mkdir(exist_ok=True)
        self.path.with_name(self.path.name + ".partial").touch()

    def on_validation_start(self, trainer: Any, *args: Any) -> None:
        until_written(trainer)


class HeldUp(Obstacle):
    """What is being written, until the third validation."""

    go: ClassVar[threading.Event] = threading.Event()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        pass

    def on_validation_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            self.go.set()
            super().on_validation_start(trainer, *args)


class Unnamed(Obstacle):
    """In the way of best.json, until a step."""

    def __init__(self, path: Path, until: int) -> None:
        super().__init__(path)
        self.until = until

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        until_written(trainer)
        partial = self.path / "best.json.partial"
        if trainer.global_step < self.until:
            partial.mkdir(parents=True, exist_ok=True)
        elif partial.exists():
            partial.rmdir()


def scored(folder: Path) -> dict[str, list[str]]:
    found = {}
    real = saving.publish

    def held_up(*args: Any) -> int:
        assert HeldUp.go.wait(60 * slowness())
        return real(*args)

    for name, in_the_way, Scored.scores in (
        ("best-fails", "best-00000001.ckpt", [5.0, 6.0, 7.0, 7.0]),
        ("another-fails", "step-00000002.ckpt", [5.0, 6.0, 4.0, 4.5]),
        ("left-out", None, [5.0, 4.0, 6.0, 6.0]),
        ("named-later", Unnamed(folder / "named-later" / "checkpoints", 3), [5.0, 6.0, 7.0, 8.0]),
        ("never-named", Unnamed(folder / "never-named" / "checkpoints", 9), [5.0, 6.0, 7.0, 4.0]),
    ):
        plan = plan_for(folder / name, 1, 4, "strategy=ddp", "checkpoint=async")
        plan = replace(
            plan,
            module={**plan.module, "_target_": "tests.distributed.test_saving.Scored"},
            data={**plan.data, "_target_": "tests.distributed.test_saving.ScoredData"},
            validate_every_n_steps=1,
            checkpoint=replace(
                plan.checkpoint, monitor="score", keep_last=9, when_busy="wait" if in_the_way else "skip",
                save_every_n_steps=2 if name == "another-fails" else None,
            ),
        )  # fmt: skip
        (folder / name / "summary.json").mkdir(parents=True)  # it cannot be written: that ends no run
        checkpoints = folder / name / "checkpoints"
        watch = HeldUp(checkpoints) if in_the_way is None else in_the_way
        watch = Obstacle(checkpoints / watch) if isinstance(watch, str) else watch
        with patch.object(saving, "publish", real if in_the_way else held_up):
            fit(plan, watch)
        named = checkpoints / "best.json"
        best = [json.loads(named.read_text())["checkpoint"]] if named.exists() else []
        found[name] = best + sorted(path.name for path in checkpoints.glob("best-*.ckpt"))
    return found


def test_what_could_not_be_written_is_not_the_best(tmp_path: Path) -> None:
    [found] = spawn(1, scored, tmp_path)
    assert found == {
        "best-fails": ["best-00000002.ckpt"] * 2,
        "another-fails": ["best-00000003.ckpt"] * 2,
        "left-out": ["best-00000001.ckpt"] * 2,
        "named-later": ["best-00000001.ckpt"] * 2,  # by the next save
        "never-named": ["best-00000001.ckpt", "best-00000004.ckpt"],  # which ends no run
    }


# Damage


def damaged(folder: Path) -> dict[str, Any]:
    """In each rank: three checkpoints, and every kind of damage to the last one or two."""
    plan = plan_for(folder / "run", 2, 6, "strategy=fsdp", "checkpoint.asynchronous=false")
    fit(replace(plan, checkpoint=replace(plan.checkpoint, save_every_n_steps=2, keep_last=9)))
    found = {}
    for name, change in CHANGES.items():
        copy = folder / name
        if dist.get_rank() == 0:
            shutil.copytree(folder / "run", copy)
            change(copy / "checkpoints" / "step-00000006.ckpt")
        dist.barrier()
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            seen = newest_whole(copy)
            auto = verify_resume(replace(plan, run_dir=str(copy), resume=str(seen), may_fall_back=True)).resume
        try:
            path = str(copy / "checkpoints" / "step-00000006.ckpt")
            named = verify_resume(replace(plan, run_dir=str(copy), resume=path, may_fall_back=False)).resume
        except ConfigError as error:
            named = str(error)
        found[name] = {"auto": auto, "named": named, "out": out.getvalue(), "seen": seen, "after": newest_whole(copy)}
    return found


def shard(folder: Path) -> Path:
    return folder / "__1_0_0.distcp"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


CHANGES = {
    "truncated": lambda folder: shard(folder).write_bytes(shard(folder).read_bytes()[:-1]),
    "flipped": lambda folder: flip(shard(folder)),
    "missing": lambda folder: shard(folder).unlink(),
    "metadata": lambda folder: flip(folder / ".metadata"),
    "manifest": lambda folder: (folder / "manifest.json").write_text("{"),
    "unsealed": lambda folder: (folder / "manifest.json").unlink(),
    "two": lambda folder: (flip(shard(folder)), flip(shard(folder.with_name("step-00000004.ckpt")))),
}
SAID = {
    "truncated": r"__1_0_0\.distcp has \d+ bytes, and manifest\.json says \d+",
    "flipped": r"__1_0_0\.distcp is not what was written",
    "missing": r"__1_0_0\.distcp is missing",
    "metadata": r"\.metadata is not what was written",
    "manifest": r"manifest\.json cannot be read",
    "unsealed": r"manifest\.json cannot be read",
    "two": r"__1_0_0\.distcp is not what was written",
}


def test_what_is_damaged_is_named_and_passed_over(tmp_path: Path) -> None:
    for rank, found in enumerate(spawn(2, damaged, tmp_path)):
        for name, seen in found.items():
            before = "step-00000002.ckpt" if name == "two" else "step-00000004.ckpt"
            assert Path(seen["auto"]).name == before, name
            assert seen["after"].name == before, name  # what checksums have found is noted
            assert re.search(rf"step-00000006\.ckpt is damaged: {SAID[name]}", seen["named"]), seen["named"]
            looked = name in ("flipped", "metadata", "two")  # what names and sizes do not tell
            assert (Path(seen["seen"]).name == "step-00000006.ckpt") == looked
            if looked and rank == 0:
                assert re.search(rf"is damaged: {SAID[name]}.*; going on from step-00000004\.ckpt", seen["out"])


def test_damage_is_said_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "run" / "checkpoints" / "step-00000002.ckpt"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps({"format": 1, "files": {"a": {"bytes": 3, "sha256": ""}}}))
    assert damage(path) == "a is missing"
    with pytest.raises(ConfigError, match=r"no checkpoint of .* is whole \(step-00000002\.ckpt: a is missing\)"):
        resolve_resume("auto", tmp_path / "run", "fit")
    with pytest.raises(ConfigError, match=r"is damaged: a is missing; give another$"):
        resolve_resume(str(path), tmp_path / "other", "fit")
    (path / "manifest.json").write_text(json.dumps({"format": 3, "files": {}}))
    assert damage(path) == "manifest.json is of format 3, and this version reads 1 and 2"


def test_a_checkpoint_is_no_run(tmp_path: Path) -> None:
    """Although it has a run's plan in it."""
    path = tmp_path / "run" / "checkpoints" / "step-00000002.ckpt"
    path.mkdir(parents=True)
    for folder in (path, tmp_path / "run"):
        (folder / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match="run is a run's folder: it holds no checkpoint that is whole; give another"):
        resolve_resume(str(tmp_path / "run"), tmp_path / "other", "fit")
    with pytest.raises(ConfigError, match=r"without a manifest\.json it is no complete checkpoint; give another"):
        resolve_resume(str(path), tmp_path / "other", "fit")
    (path / "manifest.json").write_text(json.dumps({"format": 1, "files": {}}))
    assert resolve_resume(str(path), tmp_path / "other", "fit") == str(path)
    with pytest.raises(
        ConfigError, match=rf"run is a run's folder: name=run resume=auto goes on .*resume={path} takes"
    ):
        resolve_resume(str(tmp_path / "run"), tmp_path / "other", "fit")


class Draws(LightningModule):
    """Draws in its steps and in its validation, and logs one metric on rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("own/loss", self.net(batch + torch.rand(8)).square().mean(), sync_dist=True)
        if self.global_rank == 0:
            self.log("own/alone", 1.0, rank_zero_only=True)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)), batch_size=4)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.ones(8, 8), batch_size=4)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def monitored(folder: Path) -> dict[str, Any]:
    """In each rank: runs that validate after each step, undisturbed, and ended by a monitor and gone on with."""
    words = ["recipe=custom", f"module._target_={__name__}.Draws", "micro_batch_size=4", "global_batch_size=8",
             "accelerator=cpu", "devices=2", "strategy=ddp", "max_steps=4", "validate_every_n_steps=1",
             "log_every_n_steps=1", "checkpoint.save_every_n_steps=100", f"runs_dir={folder}",
             "checkpoint.mode=min"]  # fmt: skip
    found: dict[str, Any] = {}

    def train(name: str, *more: str) -> None:
        plan = make_plan(compose([*words, f"name={name}", *more]).jobs[0].config, Host(cuda_devices=0))
        Path(plan.run_dir).mkdir(exist_ok=True)
        plan = plan.going_on_from(resolve_resume(plan.resume, plan.run_dir, "fit", may_be_taken=False))
        try:
            found[name] = fit(plan)["losses"]
        except ConfigError as error:
            found[f"{name} said"] = str(error)

    train("straight")
    for monitor in ("nope", "own/alone"):
        name = monitor[-5:]
        train(name, f"checkpoint.monitor={monitor}")
        train(name, "checkpoint.monitor=own/loss", "resume=auto")
    return found


def test_a_monitor_that_nothing_logs_loses_no_step(tmp_path: Path) -> None:
    for rank, found in enumerate(spawn(2, monitored, tmp_path)):
        saved = r"; step 1 is saved as .*{}.*step-00000001\.ckpt$"
        assert re.search("checkpoint.monitor=nope: validation logs .*own/loss.*; monitor one of these, or give "
                         "checkpoint.monitor=null" + saved.format("nope"), found["nope said"])  # fmt: skip
        why = ("does not log it on every rank", "logs own/loss; ")[rank]
        assert f"checkpoint.monitor=own/alone: validation {why}" in found["alone said"]
        if rank == 0:
            assert len(found["straight"]) == 4
            assert found["nope"] == found["alone"] == found["straight"]


def test_killed_while_it_saves_a_run_goes_on(tmp_path: Path) -> None:
    home = make_home(tmp_path)
    words = [*RECIPE, "strategy=fsdp", "devices=2", "checkpoint=async", "checkpoint.save_every_n_steps=2",
             "checkpoint.monitor=null", "checkpoint.keep_last=9"]  # fmt: skip
    with Running(home, "killed", *words, "name=killed", "max_steps=1000") as killed:
        partial = home / "runs" / "killed" / "checkpoints" / "step-00000006.ckpt.partial"
        wait_until(lambda: partial.exists() or partial.with_suffix("").exists(), "a save", 100, pause=0.001)
        killed.process.kill()
        killed.process.wait()
    killed.wait_until_gone()  # its ranks die with it
    assert newest_whole(home / "runs" / "killed") is not None
    check(run(home, *words, "name=killed", "max_steps=10", "resume=auto"))
    check(run(home, *words, "name=straight", "max_steps=10"))
    columns = ("train/loss", "train/gradient_norm", "train/samples")
    assert metrics(home / "runs" / "killed", *columns) == metrics(home / "runs" / "straight", *columns)
    assert not list((home / "runs" / "killed" / "checkpoints").glob("*.partial"))


# Memory


class Wide(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()) for _ in range(6)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out: Tensor = self.layers(batch[0][:, :1].expand(-1, WIDE)).square().mean()
        return out

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def resident_bytes(which: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{which}:")]
    return int(line.split()[1]) * 1024


class Peak:
    """How much more memory a rank had, at most, while it saved; and while it loaded."""

    def __init__(self) -> None:
        self.grown: dict[str, float] = {}

    @contextlib.contextmanager
    def watching(self, what: str) -> Any:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        before = resident_bytes("VmRSS")
        yield
        self.grown[what] = resident_bytes("VmHWM") - before


def grown(folder: Path, words: list[str]) -> dict[str, float]:
    peak = Peak()
    wide = ["module._target_=tests.distributed.test_saving.Wide", "checkpoint.save_at_end=false"]
    plan = plan_for(folder / "run", 2, 2, *wide, *words)
    plan = replace(plan, checkpoint=replace(plan.checkpoint, save_every_n_steps=1))
    real = saving.publish

    def published(*args: Any) -> int:
        with peak.watching("save"):
            return real(*args)

    with patch.object(saving, "publish", published):
        fit(plan)
    from shardwise.strategies import sharded_state

    restore = sharded_state.restore

    def restored(*args: Any, **kwargs: Any) -> None:
        with peak.watching("load"):
            restore(*args, **kwargs)

    [saved] = list_checkpoints(plan.run_dir)[-1:]
    again = plan_for(folder / "again", 2, 3, *wide, *words, f"resume={saved}")
    with patch.object(sharded_state, "restore", restored), patch("shardwise.strategies.zero.state.restore", restored):
        fit(again)
    return peak.grown


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_no_rank_ever_holds_the_whole_state(tmp_path: Path, strategy: str) -> None:
    whole = 3 * 4 * 6 * (WIDE + 1) * WIDE  # parameters and two moments, fp32: 170 MB
    for rank in spawn(2, grown, tmp_path, [f"strategy={strategy}", "checkpoint.asynchronous=false"]):
        assert set(rank) == {"save", "load"}
        # A rank holds half of it anyway. Beside that: a tensor at a time, on its way; loading makes the moments.
        assert rank["save"] < 0.25 * whole and rank["load"] < 0.25 * whole + 2 / 3 * whole / 2, rank
