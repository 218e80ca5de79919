"""`shardwise submit nodes=4 cluster=dgx_h100 recipe=…`: the Plan, then sbatch. What cannot work never queues."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.cli import find_checkpoint, headline
from shardwise.compose import ROOT, Job, compose
from shardwise.errors import ConfigError
from shardwise.plan import Host, Plan, make_plan
from shardwise.schema import Accelerator, bind

HELP = """\
usage: shardwise submit nodes=N cluster=NAME [time=24:00:00 …] [--dry-run] [what train.py takes]

Checks that the run can work, prints the sbatch command and runs it, with slurm/NAME.sbatch, or generic.sbatch.

  nodes=N                   of the job
  devices=N                 ranks and GPUs a node; the cluster's own number when left out
  cluster=NAME              a file of conf/cluster/
  time=HH:MM:SS  partition=NAME  account=NAME  qos=NAME  reservation=NAME  job_name=NAME      sbatch's own
  container=IMAGE           run in it (pyxis)
  array_limit=N             of a sweep's runs (-m), how many at a time
  follow=true               show the log until the job is over
  --dry-run                 print the command only

  shardwise submit nodes=4 cluster=dgx_h100 recipe=language_modeling model=llama3_8b strategy=fsdp_hybrid
  shardwise submit nodes=1 cluster=dgx_h100 -m optimizer.lr=1e-4,3e-4      a job array, one run a member
"""


@dataclass
class Options:
    nodes: int = 1
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    job_name: str | None = None
    container: str | None = None
    array_limit: int | None = None
    follow: bool = False


_SBATCH = ("time", "partition", "account", "qos", "reservation", "job_name")
_TRUTH = {"true": True, "false": False}


def run(words: list[str]) -> int:
    """Raises:
    ConfigError: what train.py would say on the nodes, or no sbatch here.
    """
    dry_run = "--dry-run" in words
    options, overrides = _split([word for word in words if word != "--dry-run"])
    command, plans = make_command(options, overrides)
    for plan in plans:
        print(headline(plan))
    print(shlex.join(command), flush=True)
    if dry_run:
        return 0
    if shutil.which("sbatch") is None:
        raise ConfigError("there is no sbatch here: submit from a login node of the cluster, or --dry-run")
    environment = os.environ | {"SHARDWISE_HOME": str(ROOT)}
    if options.container is not None:
        environment["CONTAINER"] = options.container
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"sbatch refuses the job (exit code {done.returncode}); its own words are above")
    job = done.stdout.strip().split(";")[0]
    print(f"job {job}; its log is {Path.cwd() / f'slurm-{job}.log'}, of an array one a member", flush=True)
    if options.follow:
        return _follow(job)
    return 0


def make_command(options: Options, overrides: Sequence[str]) -> tuple[list[str], list[Plan]]:
    """The sbatch command, and the Plans that its jobs will make on the nodes."""
    train = [word for word in overrides if not word.startswith("devices=")]  # Slurm says it
    command = compose(list(overrides))
    if command.print is not None:
        raise ConfigError("--cfg and --help are train.py's: python train.py …")
    jobs = command.jobs
    plans = [_plan(options, job, number, len(jobs)) for number, job in enumerate(jobs)]
    devices, cluster = plans[0].topology.devices, jobs[0].config.cluster
    if any(plan.topology.devices != devices or job.config.cluster != cluster for plan, job in zip(plans, jobs)):  # noqa: B905
        raise ConfigError("an array's members are alike: devices= and cluster= have one value each")
    if len(jobs) > 1 and options.follow:
        raise ConfigError(f"follow=true shows the log of one job, and this array has {len(jobs)}: leave it out")
    template = ROOT / "slurm" / f"{cluster.name}.sbatch"
    if not template.exists():
        template = ROOT / "slurm" / "generic.sbatch"
    words = ["sbatch", "--parsable", f"--nodes={options.nodes}"]
    if devices != cluster.devices_per_node:
        words.append(f"--ntasks-per-node={devices}")
        if plans[0].accelerator == "cuda":
            words.append(f"--gpus-per-node={devices}")
    words += [f"--{key.replace('_', '-')}={value}" for key in _SBATCH if (value := getattr(options, key)) is not None]
    if len(jobs) > 1:
        limit = "" if options.array_limit is None else f"%{options.array_limit}"
        words.append(f"--array=0-{len(jobs) - 1}{limit}")
    return [*words, str(template), *train], plans


def _plan(options: Options, job: Job, number: int, jobs: int) -> Plan:
    config = job.config
    devices = config.devices if config.devices is not None else config.cluster.devices_per_node or 1
    cpu = config.accelerator is Accelerator.cpu
    # An array's members have their number in their name
    run_id = config.name if config.name is None or jobs == 1 else f"{config.name}-{number}"
    config.name = run_id
    host = Host(
        cuda_devices=0 if cpu else devices, launcher="slurm", nodes=options.nodes, devices=devices, run_id="slurm-JOB",
        gpu=None if cpu else config.cluster.gpu,
    )  # fmt: skip
    plan = make_plan(config, host, job.clusters)
    return plan if run_id is None else find_checkpoint(plan, Host(0))


def _split(words: list[str]) -> tuple[Options, list[str]]:
    values: dict[str, object] = {}
    rest = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in Options.__dataclass_fields__:
            rest.append(word)
        elif key in values:
            raise ConfigError(f"{word}: {key}={values[key]} is given already; give it once")
        else:
            values[key] = _TRUTH.get(value, value) if key == "follow" else value
    options: Options = bind(Options, values)
    for key in ("nodes", "array_limit"):
        if (number := getattr(options, key)) is not None and number < 1:
            raise ConfigError(f"{key}={number}: must be at least 1")
    return options, rest


def _follow(job: str) -> int:
    """The log as it grows, over requeues, until Slurm knows the job no more. Ctrl-C leaves the job alone."""
    log, done = Path(f"slurm-{job}.log"), Path("runs/jobs") / f"slurm-{job}" / "done"
    place = 0
    while True:
        asked = ["squeue", "--noheader", f"--jobs={job}", "--format=%T"]
        alive = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        if log.exists():
            with log.open("rb") as file:
                file.seek(place)
                said = file.read()
                place += len(said)
                print(said.decode(errors="replace"), end="", flush=True)
        if not alive:
            return 0 if done.exists() else 1
        time.sleep(1)
