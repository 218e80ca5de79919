"""Makes the Plan of a run, then submits it by sbatch: `shardwise submit nodes=4 cluster=dgx_h100 recipe=…`.

Values that cannot work never wait in the queue.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.config.bind import bind
from shardwise.config.compose import Job, compose
from shardwise.config.paths import ROOT
from shardwise.config.translate import translate
from shardwise.errors import ConfigError
from shardwise.launch.host import planned_host
from shardwise.plan import Host, Plan, make_plan
from shardwise.plan.context_parallel import explain_context
from shardwise.plan.location import number_run
from shardwise.plan.plan import headline
from shardwise.run_dir.resume import find_checkpoint
from shardwise.tools import take_options
from shardwise.weights.safetensors import check_weights

HELP = """\
usage: shardwise submit nodes=N cluster=NAME [time=24:00:00 …] [--dry-run] [what train.py takes]

Makes the Plan: values that cannot work never queue (classes and data are looked at on the nodes). Prints the sbatch
command and runs it, with slurm/NAME.sbatch, or generic.sbatch.

  nodes=N                   of the job
  devices=N                 ranks and GPUs a node; the cluster's own number when left out
  cluster=NAME              a file of conf/cluster/
  time=HH:MM:SS  partition=NAME  account=NAME  qos=NAME  reservation=NAME  job_name=NAME      sbatch's own
  container=IMAGE           run in it (pyxis)
  array_limit=N             of a sweep's runs (-m), how many at a time
  follow=true               show the log until the job is over, and end with the run's exit code
  --dry-run                 print the command only

  shardwise submit nodes=4 cluster=dgx_h100 model=llama3_8b strategy=fsdp_hybrid global_batch_size=128
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
_SIGNAL_SECONDS = 300  # slurm/*.sbatch ask by --signal for a signal this long before the end
_CLOCKS_SECONDS = 60  # by which the clocks of a file server and of this machine may differ
_TRUTH = {"true": True, "false": False}


def run(words: list[str]) -> int:
    """Submit a run as `words` say, and return the exit code.

    Raises:
        ConfigError: train.py would refuse the run on the nodes, or there is no sbatch here.
    """
    dry_run = "--dry-run" in words
    ours = translate([word for word in words if word != "--dry-run"])
    options, overrides = _split(ours.overrides)
    command, plans = make_command(options, overrides)
    for line in ours.messages:
        print(line)
    for number, plan in enumerate(plans):
        member = f"[{number}] " if len(plans) > 1 else ""
        print("\n".join([member + headline(plan), *explain_context(plan)]))
    more = {"SHARDWISE_HOME": str(ROOT)} | ({} if options.container is None else {"CONTAINER": options.container})
    print(" ".join([*(f"{key}={shlex.quote(value)}" for key, value in more.items()), shlex.join(command)]), flush=True)
    if dry_run:
        return 0
    if shutil.which("sbatch") is None:
        raise ConfigError("there is no sbatch here: submit from a login node of the cluster, or --dry-run")
    begin = time.time()
    done = subprocess.run(command, env=os.environ | more, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"sbatch refuses the job (exit code {done.returncode}); its own words are above")
    job = done.stdout.strip().split(";")[0]
    log = f"slurm-{job}_<member>.log" if len(plans) > 1 else f"slurm-{job}.log"
    print(f"job {job}; its log is {Path.cwd() / log}", flush=True)
    if options.follow:
        return _follow(job, begin)
    return 0


def make_command(options: Options, overrides: Sequence[str]) -> tuple[list[str], list[Plan]]:
    """The sbatch command, and the Plans that its jobs will make on the nodes."""
    train = [word for word in overrides if not word.startswith("devices=")]  # on the nodes Slurm's variables say it
    command = compose(list(overrides))
    if command.print is not None:
        raise ConfigError("--cfg and --help are train.py's: python train.py …")
    jobs = command.jobs
    plans = [_plan(options, job, number, len(jobs)) for number, job in enumerate(jobs)]
    devices, cluster = plans[0].topology.devices, jobs[0].config.cluster
    if any(plan.topology.devices != devices for plan in plans) or any(job.config.cluster != cluster for job in jobs):
        raise ConfigError("an array's members are alike: devices= and cluster= have one value each")
    if any(job.config.dry_run for job in jobs):
        raise ConfigError("dry_run=true: the job would wait in the queue to print a Plan; give --dry-run")
    if len(jobs) > 1 and options.follow:
        raise ConfigError(f"follow=true shows the log of one job, and this array has {len(jobs)}: leave it out")
    template = ROOT / "slurm" / f"{cluster.name}.sbatch"
    if not template.exists():
        template = ROOT / "slurm" / "generic.sbatch"
    minutes = 2 * _SIGNAL_SECONDS // 60
    if options.time is not None and (seconds := _seconds(options.time)) is not None and seconds <= minutes * 60:
        raise ConfigError(
            f"time={options.time}: the templates ask for the signal to leave {_SIGNAL_SECONDS} s before the end, and "
            f"it may come a minute earlier: give more than {minutes} minutes, or sbatch --signal=USR2@60 …"
        )
    words = ["sbatch", "--parsable", f"--nodes={options.nodes}"]
    if devices != cluster.devices_per_node or template.stem == "generic":
        words.append(f"--ntasks-per-node={devices}")
        if plans[0].accelerator in ("cuda", "xpu"):
            words.append(f"--gpus-per-node={devices}")
    if template.stem == "generic" and cluster.cpu_cores is not None:  # the other templates say it for their machine
        share = max(devices, cluster.devices_per_node or 1)  # who takes some of the GPUs leaves others their CPUs
        words.append(f"--cpus-per-task={max(1, cluster.cpu_cores // share)}")
    words += [f"--{key.replace('_', '-')}={value}" for key in _SBATCH if (value := getattr(options, key)) is not None]
    if len(jobs) > 1:
        limit = "" if options.array_limit is None else f"%{options.array_limit}"
        words += [f"--array=0-{len(jobs) - 1}{limit}", "--output=slurm-%A_%a.log"]
    elif options.array_limit is not None:
        raise ConfigError(f"array_limit={options.array_limit}: this is one run, and no array; a sweep has -m")
    return [*words, str(template), *train], plans


def _plan(options: Options, job: Job, number: int, jobs: int) -> Plan:
    config = job.config
    plan = make_plan(config, planned_host(config, Host(cuda_devices=1), options.nodes), job.clusters)
    if jobs > 1 and config.name is not None:
        plan = number_run(plan, number)
    plan = find_checkpoint(plan, Host(0))
    check_weights(plan)
    return plan


def _split(words: list[str]) -> tuple[Options, list[str]]:
    rest, given = take_options(words, Options.__dataclass_fields__.__contains__)
    values = {key: _TRUTH.get(value, value) if key == "follow" else value for key, value in given.items()}
    options: Options = bind(Options, values)
    for key in ("nodes", "array_limit"):
        if (number := getattr(options, key)) is not None and number < 1:
            raise ConfigError(f"{key}={number}: must be at least 1")
    return options, rest


def _seconds(time_limit: str) -> int | None:
    """Seconds of a time limit: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time_limit)
    if found is None:
        return None  # sbatch reports what is wrong with it
    days, *rest = (int(number or 0) for number in found.groups())
    if found[1] is None and found[4] is None:
        return rest[0] * 60 + rest[1]
    return ((days * 24 + rest[0]) * 60 + rest[1]) * 60 + rest[2]


def _follow(job: str, since: float) -> int:
    """Print the log while it grows, over requeues, until the job is over; returns its exit code.

    Ctrl-C ends this, not the job. Files from before `since` are those of an earlier job with the same number.
    """
    log, done = Path(f"slurm-{job}.log"), Path("runs/jobs") / f"slurm-{job}" / "done"
    first = offset = 0 if _is_newer(log, since) or not log.exists() else log.stat().st_size
    while True:
        queue = subprocess.run(
            ["squeue", "--noheader", f"--jobs={job}", "--format=%T"], capture_output=True, text=True, check=False
        )
        if log.exists():
            with log.open("rb") as file:
                file.seek(offset)
                content = file.read()
                offset += len(content)
                print(content.decode(errors="replace"), end="", flush=True)
        # If the controller does not answer, that does not mean that the job has ended
        if "Invalid job id" in queue.stderr or (queue.returncode == 0 and not queue.stdout.strip()):
            text = log.read_bytes()[first:].decode(errors="replace") if log.exists() else ""
            ended = re.findall(r"exit code (\d+)", text)
            return 0 if _is_newer(done, since) else int((ended or ["1"])[-1])
        time.sleep(1)


def _is_newer(path: Path, since: float) -> bool:
    """Whether a file is there and was written after `since`. A file server's clock may be a little behind."""
    return path.exists() and path.stat().st_mtime > since - _CLOCKS_SECONDS
