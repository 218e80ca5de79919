"""What stock Lightning does with the faults of `make chaos`: the second table of docs/reliability.md.

python benchmarks/chaos_stock.py            DDP on two CPU ranks, a ModelCheckpoint every five steps
"""

from __future__ import annotations

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

from benchmarks.harness import results  # noqa: E402
from tests.harness.chaos import SUBJECT  # noqa: E402
from tests.harness.commands import Running  # noqa: E402

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
        with Running(home, re.sub(r"\W", "-", fault), program=home / "stock.py") as running:
            running.wait_for("step 33\n")
            FAULTS[fault]([running.process.pid, running.ranks("LOCAL_RANK")[1]])  # its launcher is its rank 0
            try:
                code: int | None = running.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                code = None
            time.sleep(10)
            left = [pid for pid in running.alive() if pid != running.process.pid]
        log = running.log
        step = int(re.findall(r"step (\d+)", log.read_text())[-1])
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
    arguments = results.command_line(__doc__, accelerator=None).parse_args()
    environment, device = results.measured_on("cpu", arguments.commit)
    rows: list[dict[str, Any]] = []
    os.environ["PAUSE"] = "0.05"  # seconds a micro-batch
    for fault in FAULTS:
        rows.append({"fault": fault, "outcome": meet(fault)})
        print(rows[-1], flush=True)
    result = {"command": "python benchmarks/chaos_stock.py", "environment": environment, "stock": rows}
    results.write(arguments.out / f"chaos-stock-{device}.json", result)


if __name__ == "__main__":
    main()
