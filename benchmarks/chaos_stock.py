"""What stock Lightning does where `make chaos` interrupts this repository's runs: the second table of
docs/reliability.md.

    python benchmarks/chaos_stock.py            DDP on two CPU ranks, a ModelCheckpoint every five steps
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402

from shardwise.environment import describe_environment  # noqa: E402
from tests.distributed.chaos import SUBJECT  # noqa: E402

PATIENCE = 60.0  # seconds
PROGRAM = """
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from subject import Data, Subject

class Tell(Callback):
    def on_train_batch_end(self, trainer, *_):
        print("step", trainer.global_step, flush=True)

if __name__ == "__main__":
    seed_everything(0)
    saving = ModelCheckpoint("saved", save_last=True, every_n_train_steps=5, save_top_k=0)
    Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=2000, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[saving, Tell()],
    ).fit(Subject(), Data(2))
"""


def ranks_of(launcher: int, mark: str) -> list[int]:
    """The launcher is rank 0; rank 1 is its child that runs the same program."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if (
                parent == launcher
                and b"stock.py" in words
                and f"MARK={mark}".encode() in (folder / "environ").read_bytes()
                and b"LOCAL_RANK=1" in (folder / "environ").read_bytes()
            ):
                found.append(int(folder.name))
        except OSError:
            continue
    return [launcher, *found[:1]]


def alive(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (
                f"MARK={mark}".encode() in (folder / "environ").read_bytes()
                and ") Z " not in (folder / "stat").read_text()
            ):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def skewed(ranks: list[int]) -> None:
    for pid in ranks:
        os.kill(pid, signal.SIGTERM)
        time.sleep(1)


FAULTS: dict[str, Callable[[list[int]], None]] = {
    "SIGTERM to one rank": lambda ranks: os.kill(ranks[1], signal.SIGTERM),
    "SIGTERM to all ranks, skewed": skewed,
    "SIGKILL of one rank": lambda ranks: os.kill(ranks[1], signal.SIGKILL),
    "SIGKILL of the launcher": lambda ranks: os.kill(ranks[0], signal.SIGKILL),
    "SIGSTOP of one rank": lambda ranks: os.kill(ranks[1], signal.SIGSTOP),
}


def meet(fault: str) -> str:
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        (home / "subject.py").write_text(SUBJECT)
        (home / "stock.py").write_text(PROGRAM)
        mark = re.sub(r"\W", "-", fault)
        log = home / "log"
        with log.open("w") as out:
            launcher = subprocess.Popen(
                [sys.executable, "stock.py"], cwd=home, stdout=out, stderr=out, start_new_session=True,
                env={**os.environ, "MARK": mark, "PAUSE": "0.05", "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        deadline = time.monotonic() + 3 * PATIENCE
        while "step 33\n" not in log.read_text():
            assert launcher.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        FAULTS[fault](ranks_of(launcher.pid, mark))
        try:
            code: int | None = launcher.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = None
        time.sleep(10)
        left = [pid for pid in alive(mark) if pid != launcher.pid]
        step = int(re.findall(r"step (\d+)", log.read_text())[-1])
        for pid in alive(mark):
            os.kill(pid, signal.SIGKILL)
        launcher.wait()
        how = f"hangs: after {PATIENCE:.0f} s nothing has ended" if code is None else f"ends with exit code {code}"
        others = f", and {len(left)} of its processes stay" if left and code is not None else ""
        if not (saved := home / "saved" / "last.ckpt").exists():
            return f"{how}{others}; nothing is saved"
        try:
            behind = step - int(torch.load(saved, map_location="cpu", weights_only=True)["global_step"])
        except Exception as error:  # whatever a file that is cut short may raise
            return f"{how}{others}; its checkpoint cannot be loaded ({type(error).__name__})"
        return f"{how}{others}; {f'{behind} steps are lost' if behind else 'no step is lost'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "chaos-stock-cpu.json")
    arguments = parser.parse_args()
    environment = describe_environment()
    del environment["hostname"]
    rows: list[dict[str, Any]] = []
    for fault in FAULTS:
        rows.append({"fault": fault, "outcome": meet(fault)})
        print(rows[-1], flush=True)
    result = {"command": "python benchmarks/chaos_stock.py", "environment": environment, "stock": rows}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
