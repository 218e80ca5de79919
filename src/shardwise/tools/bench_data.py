"""Measures a run's data over numbers of workers: `shardwise bench-data <words of train.py>`."""

from __future__ import annotations

import dataclasses
import inspect
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config.bind import bind
from shardwise.config.compose import Job, compose
from shardwise.data.bench import Appetite, Row, best_row, draw, table, verdict
from shardwise.devices import count_granted_cpus
from shardwise.errors import ConfigError, count
from shardwise.launch.host import inspect_host
from shardwise.plan import Plan
from shardwise.plan.hardware import known_peak
from shardwise.plan.location import runs_folder
from shardwise.plan.resolve import make_plan
from shardwise.run_dir.files import PLAN, SUMMARY
from shardwise.run_dir.reading import read_json, read_text
from shardwise.tools import take_options
from shardwise.tools.bench_reader import measure

HELP = """\
usage: shardwise bench-data [what train.py takes] [workers=0,1,2,4,8] [seconds=5] [mfu=0.5] [run=runs/ID]

Reads the run's training data with several numbers of workers, each time in new processes. It says how fast that is,
which setting is best (the fewest workers at which the model does not wait, with half as much again in reserve), and
how that compares with what the model eats. A table here; the same as bench-data.json and bench-data.png in
runs/bench-data-<time>/.

  workers=0,1,2,4,8   the numbers of workers (data.num_workers) that are tried
  seconds=5           how long each is read, behind its start
  mfu=0.5             the share of the GPU's peak at which the model is assumed to train, with cluster=
  run=runs/ID         instead: what this run has trained, as its summary.json says
  devices=N           reads N loaders at the same time, as the ranks of a node do

  shardwise bench-data model=llama3_1b precision=bf16 cluster=dgx_h100 devices=8 data=token_shards data.directory=tokens
  shardwise bench-data recipe=image_classification data=image_folder data.directory=/data/images model=resnet50
"""


@dataclass
class Options:
    workers: str = "0,1,2,4,8"
    seconds: float = 5.0
    mfu: float = 0.5
    run: str | None = None

    def numbers(self) -> list[int]:
        """Raises `ConfigError` for what is no list of numbers of workers."""
        words = self.workers.split(",")
        if not all(word.strip().isdigit() for word in words):
            raise ConfigError(f"workers={self.workers}: must be numbers of at least 0, e.g. workers=0,1,2,4")
        return sorted({int(word) for word in words})

    def check(self) -> None:
        if not 0 < self.seconds <= 3600:
            raise ConfigError(f"seconds={self.seconds:g}: must be above 0 and at most 3600")
        if not 0 < self.mfu <= 1:
            raise ConfigError(f"mfu={self.mfu:g}: must be above 0 and at most 1, a share of the GPU's peak")


def run(words: list[str]) -> int:
    """Measure, and print what came out.

    Raises:
        ConfigError: a word is wrong, or the data cannot be read.
    """
    options, rest = _split(words)
    numbers = options.numbers()
    options.check()
    job, plan = _plan(rest)
    measured = None if options.run is None else appetite_of(Path(options.run))
    _check_data(plan)
    print(
        f"{count(plan.topology.devices, 'loader')} on {count(count_granted_cpus(), 'CPU')}, batches of "
        f"{count(plan.micro_batch_size, 'sample')}: {options.seconds:g} s with each number of workers",
        flush=True,
    )
    rows: list[Row] = []
    found: dict[str, Any] = {}
    for workers in numbers:
        row, found = measure(_with_workers(plan, workers), workers, options.seconds)
        rows.append(row)
    appetite = measured or _assumed_appetite(options, job, plan, found.get("flops_per_sample"))
    best = best_row(rows, appetite, plan.topology.devices)
    folder = _save(job, rows, appetite)
    print(table(rows, found["unit"]))
    print(f"best: data.num_workers={best.workers}")
    print(verdict(best, appetite, plan.topology.devices))
    print(f"picture: {folder / 'bench-data.png'}")
    return 0


def _split(words: list[str]) -> tuple[Options, list[str]]:
    rest, given = take_options(words, Options.__dataclass_fields__.__contains__)
    values = {key: value if key in ("workers", "run") else _number(key, value) for key, value in given.items()}
    options: Options = bind(Options, values)
    return options, rest


def _number(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"{key}={value}: must be a number") from None


def _plan(words: list[str]) -> tuple[Job, Plan]:
    command = compose(words)
    if command.print is not None:
        raise ConfigError("--cfg and --help are train.py's: python train.py …")
    if len(command.jobs) > 1:
        raise ConfigError(f"bench-data measures the data of one run, and -m makes {len(command.jobs)}: leave it out")
    [job] = command.jobs
    plan = make_plan(job.config, inspect_host(), job.clusters)
    if plan.stage != "fit":
        raise ConfigError(f"stage={plan.stage}: bench-data reads the data of training; leave stage out")
    return job, plan


def _check_data(plan: Plan) -> None:
    """Refuse data without a training loader, or whose number of workers cannot be set; prepare them otherwise."""
    from lightning.pytorch import LightningDataModule
    from lightning.pytorch.utilities.model_helpers import is_overridden

    from shardwise.config.targets import check, locate
    from shardwise.protocols import optional
    from shardwise.trainer import build_data

    if plan.data is None:
        raise ConfigError(
            "bench-data reads the training loader of a LightningDataModule, and here the module has its own loaders: "
            "give data._target_=package.Data"
        )
    check(plan.data, "data", LightningDataModule)
    target, name = locate(plan.data["_target_"], "data"), plan.data["_target_"]
    parameters = inspect.signature(target).parameters.values()
    if not any(p.name == "num_workers" or p.kind is p.VAR_KEYWORD for p in parameters):
        raise ConfigError(
            f"{name} takes no num_workers, so that no other number of workers can be tried: give its constructor that "
            f"argument, and hand it to the DataLoader"
        )
    data = build_data(plan)
    assert data is not None
    if not is_overridden("train_dataloader", data, LightningDataModule):
        raise ConfigError(f"{name} has no train_dataloader, so there is nothing to measure: define it")
    if (look := optional(data, "check")) is not None:
        look()
    data.prepare_data()


def _with_workers(plan: Plan, workers: int) -> Plan:
    return dataclasses.replace(plan, data={**(plan.data or {}), "num_workers": workers})


def _assumed_appetite(options: Options, job: Job, plan: Plan, flops_per_sample: float | None) -> Appetite | None:
    cluster = job.config.cluster
    host = inspect_host()
    peak = known_peak(job.config, cluster.gpu or host.gpu, job.clusters)
    if peak is None or not flops_per_sample:
        return None
    name = cluster.gpu or (host.gpu or "GPU").replace("NVIDIA ", "")
    return Appetite(
        samples_per_second=options.mfu * peak * 1e12 / flops_per_sample,
        device=name,
        devices=cluster.devices_per_node or plan.topology.devices,
        source=f"at {options.mfu:.0%} of the peak of {peak:g} TFLOP/s in {plan.precision.name}",
    )


def appetite_of(run_dir: Path) -> Appetite:
    """What one rank of a run that has ended consumed, as its summary says."""
    try:
        summary = read_json(run_dir / SUMMARY)
        plan = Plan.from_json(read_text(run_dir / PLAN))
        rate, unit = float(summary["samples_per_second"] or 0.0), plan.topology.world_size
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"run={run_dir}: its {SUMMARY} does not say how fast it was ({type(error).__name__}: {error}); name the "
            f"folder of a run that has ended"
        ) from error
    if not rate > 0:
        raise ConfigError(f"run={run_dir} has measured {rate:g} samples/s: name a run that has trained some steps")
    device = "GPU of that run" if plan.accelerator == "cuda" else "rank of that run"
    return Appetite(rate / unit, device, plan.topology.devices, f"as {run_dir} has measured")


def _save(job: Job, rows: list[Row], appetite: Appetite | None) -> Path:
    folder = runs_folder(job.config) / f"bench-data-{time.strftime('%Y%m%d-%H%M%S')}"
    record = {
        "words": list(job.overrides),
        "cpus": count_granted_cpus(),
        "rows": [dataclasses.asdict(row) for row in rows],
        "model": None if appetite is None else dataclasses.asdict(appetite),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench-data.json").write_text(json.dumps(record, indent=2) + "\n")
        draw(rows, appetite, folder / "bench-data.png")
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}; give another runs_dir=") from None
    return folder
