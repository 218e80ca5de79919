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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from shardwise.config.compose import Command, Job, compose
from shardwise.config.help import config_groups
from shardwise.config.paths import CONF, ROOT
from shardwise.config.schema import RunConfig, bind, take_options
from shardwise.config.translate import translate
from shardwise.errors import ConfigError, count, did_you_mean
from shardwise.launch.host import planned_host
from shardwise.launch.sbatch import SbatchOptions, batch_environment, explain_mounts, merge_options
from shardwise.plan import Host, Plan
from shardwise.plan.parallel_axes import explain_context
from shardwise.plan.parallel_costs import explain_memory
from shardwise.plan.plan import headline
from shardwise.plan.resolve import make_plan, number_run
from shardwise.run_dir.resume import find_checkpoint
from shardwise.run_dir.sweep import report_sweep, swept
from shardwise.weights.safetensors import check_weights

HELP = """\
usage: shardwise submit nodes=N cluster=NAME [time=24:00:00 …] [--dry-run] [what train.py takes]

Makes the Plan: values that cannot work never queue (classes and data are looked at on the nodes). Prints the sbatch
command and runs it: with slurm/NAME.sbatch for whole nodes of cluster=NAME, else with slurm/generic.sbatch.

  nodes=N                   of the job
  devices=N                 ranks and GPUs a node; the cluster's own number when left out
  cluster=NAME              a file of conf/cluster/, or of yours; its sbatch:, mounts:, modules:, prolog: are defaults
  time=24:00:00             in Slurm's forms, or 24h, 90m, 1d12h
  partition=NAME  account=NAME  qos=NAME  reservation=NAME  job_name=NAME
  sbatch.OPTION=VALUE       any other option of sbatch, e.g. sbatch.constraint=ib 'sbatch.exclude=node[1-3]';
                            true gives a flag, and null leaves out what the cluster's file says
  container=IMAGE           run in it (pyxis)
  mounts=/data,/a:/b        folders that the container sees besides the repository and this folder
  modules=[cuda/12.4]       environment modules that the batch script loads
  prolog='source /etc/x.sh' a line of shell that the batch script runs before the run: it is code
  array_limit=N             of a sweep's runs (-m), how many at a time
  follow=true               show the log until the job is over, and end with the run's exit code; of a sweep, its table
  --dry-run                 print the command only; it can be pasted into a shell

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
    mounts: str | None = None
    modules: str | None = None
    prolog: str | None = None
    array_limit: int | None = None
    follow: bool = False


@dataclass(frozen=True)
class Submission:
    """What is given to Slurm, and what is said of it."""

    command: list[str]
    environment: dict[str, str]  # what the batch script reads, besides Slurm's
    jobs: tuple[Job, ...]
    plans: list[Plan]
    notices: list[str]


_NAMED = ("time", "partition", "account", "qos", "reservation", "job_name")
_FLAGS = ("--dry-run", "--config-dir", "-cd", "--multirun", "-m", "--cfg", "-c", "--help", "-h")
_CLOCKS_SECONDS = 60  # by which the clocks of a file server and of this machine may differ
_TRUTH = {"true": True, "false": False}


def run(words: list[str]) -> int:
    """Submit a run as `words` say, and return the exit code.

    Raises:
        ConfigError: train.py would refuse the run on the nodes, or there is no sbatch here.
    """
    dry_run = "--dry-run" in words
    _check_flags(words)
    ours = translate([word for word in words if word != "--dry-run"])
    options, sbatch, overrides = _split(ours.overrides)
    submission = make_submission(options, sbatch, overrides)
    command, more, plans = submission.command, submission.environment, submission.plans
    for line in [*ours.messages, *submission.notices]:
        print(line)
    for number, (plan, values) in enumerate(zip(plans, labels(submission), strict=True)):
        member = f"[{number}] {values}: " if len(plans) > 1 else ""
        lines = [*explain_context(plan), *explain_memory(plan, submission.jobs[0].config.cluster)]
        print("\n".join([member + headline(plan), *lines]))
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
    log = _output(command).replace("%j", job).replace("%A", job).replace("%a", "<member>")
    print(f"job {job}; its log is {Path.cwd() / log}", flush=True)
    if len(plans) > 1:
        print("each member that ends writes the table of the sweep so far to its log, and the curves beside the runs")
    if not options.follow:
        return 0
    return _follow(job, begin) if len(plans) == 1 else _follow_array(job, begin, submission)


def labels(submission: Submission) -> list[str]:
    """What is different in each run of a sweep: `seed=2`."""
    swept_values = swept([job.overrides for job in submission.jobs])
    return [" ".join(f"{key}={value}" for key, value in values.items()) for values in swept_values]


def make_submission(options: Options, sbatch: Mapping[str, str], overrides: Sequence[str]) -> Submission:
    """The sbatch command, and the Plans that its jobs will make on the nodes. `sbatch`: its options as typed."""
    train = [word for word in overrides if not word.startswith("devices=")]  # on the nodes Slurm's variables say it
    command = _compose(overrides)
    if command.print is not None:
        raise ConfigError("--cfg and --help are train.py's: python train.py …")
    jobs = command.jobs
    plans = [_plan(options, job, number, len(jobs)) for number, job in enumerate(jobs)]
    devices, cluster = plans[0].topology.devices, jobs[0].config.cluster
    kinds = {(plan.topology.devices, plan.accelerator) for plan in plans}
    if len(kinds) > 1 or any(job.config.cluster != cluster for job in jobs):
        raise ConfigError("an array's members are alike: devices=, accelerator= and cluster= have one value each")
    if any(job.config.dry_run for job in jobs):
        raise ConfigError("dry_run=true: the job would wait in the queue to print a Plan; give --dry-run")
    if options.follow and (set(sbatch) & {"output", "error"}):
        raise ConfigError("follow=true reads the log where the templates write it: leave sbatch.output and .error out")
    gpus = devices if plans[0].accelerator == "cuda" else 0
    is_whole = gpus > 0 and gpus == cluster.devices_per_node
    template = ROOT / "slurm" / f"{cluster.name}.sbatch"
    if not is_whole or not template.exists():  # the templates of machines take all of a node
        template = ROOT / "slurm" / "generic.sbatch"
    wanted: SbatchOptions = {"nodes": str(options.nodes)}
    if template.stem == "generic":
        wanted |= {"ntasks-per-node": str(devices)} | ({"gpus-per-node": str(gpus)} if gpus else {})
        if cluster.cpu_cores is not None:  # the other templates say it for their machine
            share = max(devices, cluster.devices_per_node or 1)  # who takes some of the GPUs leaves others their CPUs
            wanted["cpus-per-task"] = str(max(1, cluster.cpu_cores // share))
    named = {key: value for key in _NAMED if (value := getattr(options, key)) is not None}
    merged, notices = merge_options(cluster, sbatch, named, gpus)
    wanted |= merged
    if len(jobs) > 1:
        limit = "" if options.array_limit is None else f"%{options.array_limit}"
        wanted["array"] = f"0-{len(jobs) - 1}{limit}"
        wanted.setdefault("output", "slurm-%A_%a.log")
    elif options.array_limit is not None:
        raise ConfigError(f"array_limit={options.array_limit}: this is one run, and no array; a sweep has -m")
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in wanted.items() if value]
    if cluster.devices_per_node is None:
        notices.append(_explain_unknown(cluster.name, devices, gpus, wanted))
    if any(job.config.resume == "auto" and job.config.name is None for job in jobs):
        unnamed = "resume=auto without name=: a new job is a new run, which starts from the seed; give name= of the run"
        notices.append(f"{unnamed} to go on with (a job that is requeued goes on by itself)")
    environment = batch_environment(cluster, options.container, options.mounts, options.modules, options.prolog)
    notices += explain_mounts(plans[0], environment)
    return Submission(["sbatch", "--parsable", *words, str(template), *train], environment, jobs, plans, notices)


def _explain_unknown(cluster: str, devices: int, gpus: int, wanted: SbatchOptions) -> str:
    cpus = "" if "cpus-per-task" in wanted else ", each with one CPU (sbatch.cpus-per-task=N gives more)"
    unsaid = "no cluster= is given, so" if cluster == "local" else f"cluster={cluster} has no devices_per_node:, so"
    return (
        f"{unsaid} it is not known what a node has: the job asks for {count(devices, 'task')} and "
        f"{count(gpus, 'GPU')} a node{cpus}; give cluster=NAME (conf/cluster/, or a file of yours) or devices=N"
    )


def _compose(overrides: Sequence[str]) -> Command:
    if wrong := next((word for word in overrides if re.match(r"module=[^{]", word)), None):
        raise ConfigError(f"{wrong}: module is the LightningModule; environment modules are modules=[cuda/12.4,…]")
    try:
        return compose(list(overrides))
    except ConfigError as error:  # it knows the words of a run, and neither ours nor sbatch's
        found = re.match(r"(([a-z]+(?:[-_][a-z]+)*)=.*): there is no \2(?: \(did you mean (\w+)\?\))?;", str(error))
        if found is None:
            raise
        line, word, of_run = found.groups(default="")
        near = did_you_mean(word, [*Options.__dataclass_fields__, of_run])
        if of_run not in Options.__dataclass_fields__ and f" {of_run}?" in near:
            raise
        sbatch = f"an option of sbatch is written sbatch.{word}=…"
        raise ConfigError(f"{line}: there is no {word}{near}; --help lists what there is; {sbatch}") from None


def _check_flags(words: Sequence[str]) -> None:
    """Name the word for an option of sbatch that was typed as sbatch takes it."""
    known = {f.name for f in fields(RunConfig)} | set(config_groups([CONF]))
    for word, behind in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if not word.startswith("-") or flag in _FLAGS:
            continue
        name = flag.lstrip("-").replace("-", "_")
        if not word.startswith("--"):
            raise ConfigError(f"{word}: options of sbatch are written as words, in full, e.g. sbatch.constraint=ib")
        value = value if equals else behind if behind and not behind.startswith("-") and "=" not in behind else "true"
        if name in Options.__dataclass_fields__:
            raise ConfigError(f"{word}: write {name}={value}, without --")
        if name.partition(".")[0] not in known:
            raise ConfigError(f"{word}: an option of sbatch is written sbatch.{flag.lstrip('-')}={value}, without --")


def _plan(options: Options, job: Job, number: int, jobs: int) -> Plan:
    config = job.config
    plan = make_plan(config, planned_host(config, Host(cuda_devices=1), options.nodes), job.clusters)
    if jobs > 1:
        plan = number_run(plan, number, in_array=config.name is None)
    plan = find_checkpoint(plan, Host(0))
    check_weights(plan)
    return plan


def _split(words: list[str]) -> tuple[Options, dict[str, str], list[str]]:
    """Our options, those of sbatch, and what train.py takes."""
    rest, given = take_options(words, lambda key: key in Options.__dataclass_fields__ or key.startswith("sbatch."))
    sbatch = {key.removeprefix("sbatch."): given.pop(key) for key in list(given) if key.startswith("sbatch.")}
    values = {key: _TRUTH.get(value, value) if key == "follow" else value for key, value in given.items()}
    options: Options = bind(Options, values)
    for key in ("nodes", "array_limit"):
        if (number := getattr(options, key)) is not None and number < 1:
            raise ConfigError(f"{key}={number}: must be at least 1")
    return options, sbatch, rest


def _output(command: Sequence[str]) -> str:
    """Where a job's log is, in the words of sbatch."""
    given = [word.partition("=")[2] for word in command if word.startswith("--output=")]
    return given[0] if given else "slurm-%j.log"


def _follow(job: str, since: float) -> int:
    """Print the log while it grows, over requeues, until the job is over; returns its exit code.

    Ctrl-C ends this, not the job. Files from before `since` are those of an earlier job with the same number.
    """
    log = Path(f"slurm-{job}.log")
    first = offset = 0 if _is_newer(log, since) or not log.exists() else log.stat().st_size
    while True:
        is_over = _is_over(job)
        if log.exists():
            with log.open("rb") as file:
                file.seek(offset)
                content = file.read()
                offset += len(content)
                print(content.decode(errors="replace"), end="", flush=True)
        if is_over:
            return _exit_code(job, since, first)
        time.sleep(1)


def _follow_array(job: str, since: float, submission: Submission) -> int:
    """Wait until all members of an array are over, print the sweep's table, and return the highest exit code."""
    while not _is_over(job):
        time.sleep(5)
    codes, plans = [], []
    for number, (one, plan) in enumerate(zip(submission.jobs, submission.plans, strict=True)):
        codes.append(_exit_code(f"{job}_{number}", since, 0))
        if one.config.name is None:
            run_dir = Path(plan.run_dir).parent / f"slurm-{job}_{number}"
            plan = replace(plan, run_id=run_dir.name, run_dir=str(run_dir))
        plans.append(plan)
    print(report_sweep([one.overrides for one in submission.jobs], plans, codes), flush=True)
    return max(codes)


def _is_over(job: str) -> bool:
    """Whether Slurm has forgotten a job. If the controller does not answer, that does not mean that it has ended."""
    queue = subprocess.run(
        ["squeue", "--noheader", f"--jobs={job}", "--format=%T"], capture_output=True, text=True, check=False
    )
    return "Invalid job id" in queue.stderr or (queue.returncode == 0 and not queue.stdout.strip())


def _exit_code(job: str, since: float, first: int) -> int:
    """How a job that is over has ended, by its folder and by what its log has from byte `first` on."""
    if _is_newer(Path("runs/jobs") / f"slurm-{job}" / "done", since):
        return 0
    log = Path(f"slurm-{job}.log")
    text = log.read_bytes()[first:].decode(errors="replace") if log.exists() else ""
    return int((re.findall(r"exit code (\d+)", text) or ["1"])[-1])


def _is_newer(path: Path, since: float) -> bool:
    """Whether a file is there and was written after `since`. A file server's clock may be a little behind."""
    return path.exists() and path.stat().st_mtime > since - _CLOCKS_SECONDS
