"""How a run ends that is told to, that crashes and that hangs: what is said, where the rest is, and the exit code."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.harness.chaos import Life
from tests.harness.commands import OWN, RECIPE, check, make_home, run
from tests.harness.patience import slowness
from tests.unit.test_loggers import history

WORDS = [*RECIPE, "max_steps=100000", "devices=2", "checkpoint.monitor=null", "strategy=fsdp"]
# Rank 1 does in its third step what a test asks for.
ODD = """
import os, time
import torch
from lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, Dataset

class Module(LightningModule):
    def __init__(self, does):
        super().__init__()
        self.does, self.net = does, torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        if self.global_step == 2 and os.environ["RANK"] == "1":
            if self.does == "raises":
                raise ValueError("broken by hand")
            while self.does == "waits":
                time.sleep(0.1)
        return self.net(batch).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Samples(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        while os.environ["RANK"] == "1" and index > 20:
            time.sleep(0.1)
        return torch.ones(4)

class Data(LightningDataModule):
    def __init__(self, worker_waits=False):
        super().__init__()
        self.worker_waits = worker_waits
    def train_dataloader(self):
        if self.worker_waits:
            return DataLoader(Samples(), batch_size=2, num_workers=1)
        return DataLoader(torch.randn(64, 4), batch_size=2)
"""
BROKEN = [*OWN, "module._target_=odd.Module", "data._target_=odd.Data", "max_steps=9", "checkpoint.monitor=null",
          "checkpoint.save_every_n_steps=1"]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = make_home(tmp_path_factory.mktemp("home"))
    (home / "odd.py").write_text(ODD)
    return home


def log(home: Path, name: str, rank: int) -> str:
    return (home / "runs" / name / "logs" / f"rank-{rank:05d}.log").read_text()


def test_the_second_ctrl_c_does_not_wait_and_sigquit_shows_where_everybody_is(home: Path) -> None:
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # as a script's `train.py … &` has it
    try:
        life = Life(home, "twice", 0, WORDS, 0)
    finally:
        signal.signal(signal.SIGQUIT, before)
    try:
        life.running.wait_for("step 5/")
        life.process.send_signal(signal.SIGQUIT)
        life.wait(lambda: all("most recent call first" in log(home, "twice", rank) for rank in range(2)), "all stacks")
        life.running.wait_for(f"step {life.step() + 10}/")  # and goes on
        for pid in life.ranks().values():
            os.kill(pid, signal.SIGSTOP)  # so that nobody can save
        for _ in range(2):
            life.process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert life.end() == 130
    finally:
        life.running.__exit__()
    assert life.text().endswith("shardwise: stopped by Ctrl-C\n")


@pytest.mark.parametrize("devices", [1, 2])
def test_a_single_signal_saves_and_leaves(home: Path, devices: int) -> None:
    """One rank lives in the launcher's own process."""
    name = f"left-{devices}"
    life = Life(home, name, 0, [*WORDS, f"devices={devices}"], 0)
    try:
        life.running.wait_for("step 5/")
        life.process.send_signal(signal.SIGUSR1)
        life.running.wait_for("asked by a signal: step ")
        life.process.send_signal(signal.SIGINT)
        assert life.end() == 5
    finally:
        life.running.__exit__()
    saved = sorted(path.name for path in (home / "runs" / name / "checkpoints").iterdir())
    assert len(saved) == 2, saved
    assert f"shardwise: stopped by Ctrl-C: step {int(saved[-1][5:13])} is saved as " in life.text()
    assert life.text().endswith(f"; name={name} resume=auto goes on\n")


def test_a_tracker_that_is_gone_does_not_take_its_run_along(home: Path) -> None:
    """A signal to a whole job ends W&B's own process at once."""
    words = [*WORDS, "devices=1", "logger=wandb", "logger.mode=offline"]
    life = Life(home, "tracked", 0, words, 0)
    try:
        life.running.wait_for("step 5/")
        (tracker,) = (pid for pid in life.running.alive() if "wandb-core" in Path(f"/proc/{pid}/comm").read_text())
        os.kill(tracker, signal.SIGTERM)
        life.running.wait_for("W&B is gone")
        life.running.wait_for(f"step {life.step() + 5}/")
        life.process.send_signal(signal.SIGTERM)
        assert life.end() == 5, life.text()
    finally:
        life.running.__exit__()
    saved = max(int(path.name[5:13]) for path in (home / "runs/tracked/checkpoints").iterdir())
    check(run(home, *words, "name=tracked", "resume=auto", f"max_steps={saved + 2}"))
    records = sorted((home / "runs/tracked").glob("wandb/offline-run-*-tracked/run-tracked.wandb"))
    rows = [row for record in records for row in history(record) if "train/loss" in row]
    steps = [int(row["trainer/global_step"]) for row in rows]  # but what W&B had not written yet when it was ended
    assert steps == list(range(steps[0], saved + 3)) and steps[0] <= saved


def test_what_broke_is_said_once_and_the_rest_is_in_files(home: Path) -> None:
    done = check(run(home, *BROKEN, "+module.does=raises", "name=raised"), 1)
    said = 'error: ValueError: broken by hand\n  in training_step, odd.py line 14: raise ValueError("broken by hand")\n'
    said += "  name=raised resume=auto goes on from step-00000002.ckpt\n"
    assert done.stderr == said + "  the whole traceback is in runs/raised/logs/rank-00001.log\n"
    assert "Traceback (most recent call last)" in log(home, "raised", 1)


def test_a_rank_that_does_not_arrive_is_named(home: Path) -> None:
    seconds = round(12 * slowness())  # a busy machine must not be taken for a rank that hangs
    done = check(run(home, *BROKEN, "+module.does=waits", "name=hung", f"strategy.timeout_minutes={seconds / 60}"), 6)
    assert done.stderr.startswith(f"error: no progress for {seconds} s (strategy.timeout_minutes): ")
    assert "rank 1 did not arrive: it is at step 3, micro-batch 1 of 1, in training_step (odd.py:" in done.stderr
    assert "; the others are at step 3, micro-batch 1 of 1, in " in done.stderr
    assert done.stderr.count("\n") == 1
    assert "in training_step" in log(home, "hung", 1) and "in training_step" not in log(home, "hung", 0)


def test_a_data_worker_that_hangs_is_named_and_shows_where_it_is(home: Path) -> None:
    words = ["+module.does=nothing", "+data.worker_waits=true", f"strategy.timeout_minutes={12 * slowness() / 60}"]
    done = check(run(home, *BROKEN, *words, "name=starved"), 6)
    assert "rank 1 did not arrive: it is at " in done.stderr and "), waiting for its data worker; the" in done.stderr
    assert "in __getitem__" in log(home, "starved", 1) and "in __getitem__" not in log(home, "starved", 0)


def test_restarts_end_when_they_get_nowhere(home: Path) -> None:
    done = check(run(home, *BROKEN, "+module.does=raises", "name=again", "max_restarts=9"), 1)
    assert [line for line in done.stdout.splitlines() if "restart" in line] == [
        f"shardwise: restart {n} of 9, from step 2" for n in (1, 2)
    ]
    assert done.stderr.count("ValueError: broken by hand") == 3
    assert done.stderr.endswith("shardwise: 2 restarts in a row have saved nothing new: no further one\n")


def test_a_users_mistake_is_not_tried_again(home: Path) -> None:
    done = check(run(home, *OWN, "+data.rank_1=is_odd", "max_restarts=9", "name=mistake"), 2)
    assert "restart" not in done.stdout
