"""Train a LightningModule: `python train.py strategy=fsdp precision=bf16 devices=8`; `--help` says what else.

argv → RunConfig (compose) → Plan (make_plan) → processes (launch) → Trainer.fit (rank.run).
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from shardwise.errors import needs_packages

with needs_packages():
    from shardwise.cli import train
    from shardwise.launch.worker import leave

if __name__ == "__main__":
    leave(train(sys.argv[1:]))
