"""Starts the ranks of a preflight on one node, or is one of them: `shardwise preflight`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress

from shardwise.config.compose import compose
from shardwise.config.schema import RunConfig
from shardwise.devices import count_cuda_devices
from shardwise.errors import ConfigError, ExitCode
from shardwise.launch.local import local_store, rank_environment
from shardwise.launch.slurm import read_task
from shardwise.preflight import rank
from shardwise.preflight.place import Limits
from shardwise.process.signals import PARENT, die_with_parent

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

_CPU_PROCESSES = 2
_SILENCE_SECONDS = 15.0  # rank 0 gets this time to report whose process is gone


def run(words: list[str], limits: Limits = Limits()) -> int:  # noqa: B008
    """Run a preflight, and return its exit code, which all ranks share. If this process is a rank, it ends here.

    Raises:
        ConfigError: a word is wrong, or asks for more than the one node that this is started on.
    """
    command = compose(words)
    if command.print is not None:
        print(command.print)
        return 0
    config = command.jobs[0].config
    if (task := read_task()) is not None:
        os.environ |= task.environment()
    if config.preflight is False:
        if os.environ.get("RANK", "0") == "0":
            print("preflight=false: nothing is looked at", flush=True)
        return 0
    if "RANK" not in os.environ:
        return run_alone(words, config)
    if PARENT in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    for word, value in config.cluster.environment.items():  # this has to come before torch, and NCCL with it
        os.environ.setdefault(word, value)
    code = int(ExitCode.crash)
    try:
        code = rank.run(config, limits)
    except Exception:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread that hangs in a device must not keep the process alive


def run_alone(words: list[str], config: RunConfig) -> int:
    """Start a rank for each device of this node, and end them together."""
    visible = count_cuda_devices()
    if config.accelerator == "cuda" and not visible:
        raise ConfigError("accelerator=cuda: this process sees 0 CUDA devices; use accelerator=cpu")
    if config.nodes is not None and config.nodes > 1:
        raise ConfigError(
            f"nodes={config.nodes}: started alone, preflight looks at this one node; leave nodes out, or start it on "
            f"every node: srun … or torchrun … -m shardwise preflight …"
        )
    if config.devices is not None and config.devices < 1:
        raise ConfigError(f"devices={config.devices}: must be at least 1")
    ranks = config.devices or (0 if config.accelerator == "cpu" else visible) or _CPU_PROCESSES
    store = local_store()  # in this process, which outlives every rank
    environment = rank_environment(ranks, store.port)
    command = [sys.executable, "-m", "shardwise", "preflight", *words]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(ranks):
            own = environment | {"RANK": str(number), "LOCAL_RANK": str(number)}
            started.append(subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL))
        return _first_code(started)
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                process.kill()
        del store


def _first_code(started: list[subprocess.Popen[bytes]]) -> int:
    """Rank 0's exit code, which is all ranks'; another rank's if that one ends and rank 0 does not react."""
    silent_since: float | None = None
    while (code := started[0].poll()) is None:
        ended = [number for number, process in enumerate(started) if process.poll() is not None]
        if ended and silent_since is None:
            silent_since = time.monotonic()
        if silent_since is not None and time.monotonic() - silent_since > _SILENCE_SECONDS:
            other = int(started[ended[0]].returncode)
            sys.stderr.write(f"preflight: rank {ended[0]} ended with {other}; the other ranks are stopped\n")
            return other if other > 0 else int(ExitCode.crash)
        time.sleep(0.05)
    if code < 0:
        sys.stderr.write(f"preflight: rank 0 was killed by signal {-code}; the other ranks are stopped\n")
    return code if code >= 0 else 128 - code
