"""train.py as a user starts it: real processes from a folder of one's own."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.tokens import write_token_shards
from tests.harness import forked
from tests.harness.patience import exit_code, run_patiently, wait_until
from tests.harness.processes import fork_server

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
TIMEOUT_SECONDS = 120.0  # on an idle machine, as all limits here: see tests/harness/patience.py
RECIPE = [
    "model.dim=32", "model.n_layers=2", "model.ffn_dim=64", "model.n_heads=2", "model.n_kv_heads=1",
    "model.max_seq_len=32", "module.sample_tokens=0", "data.sequence_length=32", "data.corpus=null",
    "data.directory=shards", "data.max_validation_sequences=7", "micro_batch_size=2", "global_batch_size=8",
    "schedule=none", "log_every_n_steps=1", "accelerator=cpu", "runs_dir=runs",
]  # fmt: skip
OWN = ["recipe=custom", "module._target_=mine.Module", "data._target_=mine.Data", "units=[]", "micro_batch_size=2",
       "global_batch_size=4", "max_steps=3", "accelerator=cpu", "runs_dir=runs", "devices=2"]  # fmt: skip
# A module and data of the user's own; the data fails in the ways that a test asks for.
MINE = """
import os
import torch
from lightning import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, default_collate

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Data(LightningDataModule):
    def __init__(self, rank_1=""):
        super().__init__()
        self.rank_1 = rank_1
    def collate(self, samples):
        if os.environ["RANK"] == "1" and self.rank_1 == "raises":
            raise ValueError("broken by hand")
        if os.environ["RANK"] == "1" and self.rank_1 == "is_killed":
            os.kill(os.getpid(), 9)
        return default_collate(samples)
    def train_dataloader(self):
        odd = os.environ["RANK"] == "1" and self.rank_1 == "is_odd"
        return DataLoader(torch.randn(64, 4), batch_size=3 if odd else 2, collate_fn=self.collate)
"""


def make_home(folder: Path, more: str = "") -> Path:
    """A user's folder: mine.py, with `more` in it, and token shards of 20 training and 7 validation sequences."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.py").write_text(MINE + more)
    tokens = np.random.default_rng(0).integers(97, 123, 2000)
    write_token_shards(
        folder / "shards",
        {"train": [tokens[: 20 * 32 + 1]], "validation": [tokens[700 : 700 + 7 * 32 + 1]]},
        vocab_size=256,
    )
    return folder


def environment(**more: str) -> dict[str, str]:
    ours = ("WANDB_", "RANK", "LOCAL_", "WORLD_", "MASTER_", "TORCHELASTIC_", "SHARDWISE_", "OMP_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def run(
    home: Path, *words: str, command: list[str] | None = None, timeout: float = TIMEOUT_SECONDS, anew: bool = False,
    program: Path = TRAIN, **more: str,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """`python train.py …` in `home`; fails the test when it hangs. Its processes are forks that have imported
    everything, unless they are to start `anew`, as a user's do."""
    if command is None and not anew and fork_server() is not None:
        return forked.start(program, list(words), home, environment(**more), timeout)
    command = [sys.executable] if command is None else command
    return run_patiently(
        [*command, str(program), *words], timeout, cwd=home, env=environment(**more), stdin=subprocess.DEVNULL
    )


def check(done: subprocess.CompletedProcess[str], code: int = 0) -> subprocess.CompletedProcess[str]:
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def metrics(run_dir: Path, *columns: str) -> dict[int, list[float]]:
    """Step → these columns, of the rows that have them."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found: dict[int, list[float]] = {}
    for row in rows:
        if all(row.get(column) for column in columns):
            assert int(row["step"]) not in found, f"step {row['step']} is there twice"
            found[int(row["step"])] = [float(row[column]) for column in columns]
    return found


class Running:
    """A run that goes on until it is told to stop; every process of it is known by a mark in its environment."""

    def __init__(self, home: Path, mark: str, *words: str, program: Path = TRAIN) -> None:
        self.mark, self.log = f"MARK={mark}", home / f"{mark}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(program), *words], cwd=home, env=environment(MARK=mark), stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: Any) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        exit_code(self.process, TIMEOUT_SECONDS)

    def pids(self) -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def ranks(self, variable: str = "RANK") -> dict[int, int]:
        """Rank → process id, of the launcher's children; not of the younger ones that stand by for a restart."""
        found: dict[int, int] = {}
        for pid in sorted(self.pids(), reverse=True):
            try:
                parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
                words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if parent == self.process.pid:
                found |= {int(word.partition("=")[2]): pid for word in words if word.startswith(f"{variable}=")}
        return found

    def alive(self) -> list[int]:
        return [pid for pid in self.pids() if not _is_zombie(pid)]

    def wait_for(self, text: str) -> None:
        def is_there() -> bool:
            if text in self.log.read_text():
                return True
            assert self.process.poll() is None, self.log.read_text()
            return False

        wait_until(is_there, repr(text), TIMEOUT_SECONDS, self.log.read_text)

    def wait_until_gone(self) -> None:
        wait_until(lambda: not self.alive(), "the end of every process", 60, lambda: f"still there: {self.alive()}")


def _is_zombie(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
