"""Checks machines before a run: are they what the cluster file says, and do they work together?"""

from __future__ import annotations

from shardwise.preflight.run import run

__all__ = ["HELP", "run"]

HELP = """\
usage: shardwise preflight [key=value …]

Takes the words of a run (python train.py …) and looks at the machines that would run it: GPUs, ECC, clocks, disks,
clocks of the day, versions, NVLink, a sum that is checked, bandwidth inside each node and between nodes. A table, and
preflight.json and preflight.png in runs/preflight-<time>/, or in the job's folder under Slurm.

  shardwise preflight cluster=dgx_h100            this node, all its GPUs
  shardwise preflight devices=2 accelerator=cpu   two CPU processes
  srun … python -m shardwise preflight "$@"       the nodes of a Slurm job, one task a GPU
  torchrun … -m shardwise preflight …             the same under torchrun

Exit code: 0 all is well; 2 a mistake in the words; 7 a bad node, which is named. docs/preflight.md has the thresholds.
"""
