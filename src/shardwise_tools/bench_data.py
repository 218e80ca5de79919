"""Measures a run's data over numbers of workers: `shardwise bench-data <words of train.py>`.

The data of each rank of a node are timed in a process of its own, all at the same time.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from shardwise.config.compose import Job, compose
from shardwise.config.schema import bind, take_options
from shardwise.devices import count_granted_cpus
from shardwise.errors import ConfigError, count
from shardwise.launch.host import inspect_host
from shardwise.launch.local import rank_environment
from shardwise.plan import Plan
from shardwise.plan.hardware import known_peak
from shardwise.plan.resolve import make_plan, runs_folder
from shardwise.process.signals import die_with_parent
from shardwise.run_dir.files import PLAN, SUMMARY, read_json, read_text

_BAR = 30  # characters of the longest bar
_ALIKE = 0.95  # a setting with fewer workers is as good if it reaches this share of the best
_RESERVE = 1.5  # times what the model consumes, since a disk is not always as fast


@dataclass(frozen=True)
class Row:
    """What was measured with one number of workers, of all loaders together."""

    workers: int
    startup_seconds: float  # until the slowest loader had its first batch
    batches_per_second: float
    samples_per_second: float
    weights_per_second: float | None  # tokens, say; None: the module does not weigh its batches


@dataclass(frozen=True)
class Appetite:
    """What one device consumes."""

    samples_per_second: float
    device: str  # "H100", say
    devices: int  # of a node
    source: str  # where the number comes from, in words


def time_batches(batches: Iterable[Any], seconds: float, skip: int) -> tuple[int, float]:
    """Read for about `seconds`, over the end of an epoch too: (number of batches, seconds).

    The first `skip` are not counted: they lay ready. At least one batch is counted.
    """
    endless = _endless(batches)
    until = time.perf_counter() + seconds
    for _ in range(skip):
        next(endless)
        if time.perf_counter() > until:  # too slow for anything to have lain ready
            break
    begin, number = time.perf_counter(), 0
    while True:
        next(endless)
        number += 1
        if (passed := time.perf_counter() - begin) >= seconds:
            return number, passed


def _endless(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from batches


def best_row(rows: list[Row], appetite: Appetite | None, loaders: int) -> Row:
    """The row with the fewest workers among those that are about as good as the best.

    `loaders`: how many were read at the same time, one for each device. If it is known what these consume, more than
    that, with a reserve, makes a row no better. If not, the fastest is the best.
    """
    scores = [_score(row, appetite, loaders) for row in rows]
    good = [row for row, score in zip(rows, scores, strict=True) if score >= _ALIKE * max(scores)]
    return min(good, key=lambda row: row.workers)


def _score(row: Row, appetite: Appetite | None, loaders: int) -> float:
    if appetite is None:
        return row.samples_per_second
    share = row.samples_per_second / (loaders * appetite.samples_per_second)
    if row.workers == 0:  # the rank reads by itself, while its device waits
        return share / (1 + share)
    return min(1.0, share / _RESERVE)


def table(rows: list[Row], unit: str) -> str:
    """A line for each row, with a bar; `unit`: what `weights_per_second` counts."""
    weighed = rows[0].weights_per_second is not None
    head = ["workers", "samples/s", *([f"{unit}/s"] if weighed else []), "batches/s", "start-up s", ""]
    most = max(row.samples_per_second for row in rows)
    lines = [head]
    for row in rows:
        weights = [f"{row.weights_per_second:,.0f}"] if row.weights_per_second is not None else []
        bar = "█" * max(1, round(_BAR * row.samples_per_second / most))
        lines.append([f"{row.workers}", _digits(row.samples_per_second), *weights, _digits(row.batches_per_second),
                      f"{row.startup_seconds:.1f}", bar])  # fmt: skip
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join([*(cell.rjust(width) for cell, width in zip(line[:-1], widths, strict=False)), line[-1]]).rstrip()
        for line in lines
    )


def verdict(row: Row, appetite: Appetite | None, loaders: int) -> str:
    """Whether the model would wait for its data, in a sentence."""
    if appetite is None:
        return (
            "what the model eats is not known here: give cluster=dgx_h100 (or another of conf/cluster/, with the run's "
            "precision) or run=runs/<id>"
        )
    eaten = appetite.devices * appetite.samples_per_second
    times = row.samples_per_second / eaten
    feeds = int(row.samples_per_second / appetite.samples_per_second)
    devices = f"{appetite.devices} × {appetite.device}" if appetite.devices > 1 else f"one {appetite.device}"
    text = (
        f"with {count(row.workers, 'worker')} the data give {_digits(row.samples_per_second)} samples/s here, and "
        f"{devices} would eat {_digits(eaten)} ({appetite.source}): "
    )
    if times >= 1:
        text += f"the data are {times:,.1f} times as fast and can feed {feeds:,} of them, so the model does not wait"
    else:
        could = f"can feed {feeds:,} of them" if feeds else "cannot feed one of them"
        text += f"the data {could}, so the model would wait for {100 * (1 - times):.3g}% of the time"
    if row.workers == 0:
        share = 1 / (1 + row.samples_per_second / loaders / appetite.samples_per_second)
        text += f"; without workers reading takes {share:.1%} of each rank's time"
    if loaders < appetite.devices:
        text += f". {count(loaders, 'loader')} read here; devices={appetite.devices} reads as many as a node does"
    return text


def draw(rows: list[Row], appetite: Appetite | None, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.bar([f"{row.workers}" for row in rows], [row.samples_per_second for row in rows])
    if appetite is not None:
        eaten = appetite.devices * appetite.samples_per_second
        axes.axhline(eaten, linestyle="--", color="black", label=f"{appetite.devices} × {appetite.device}")
        axes.legend()
    axes.set_xlabel("data.num_workers")
    axes.set_ylabel("samples/s")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_START_SECONDS = 300  # for the first batch of every loader


def measure(plan: Plan, workers: int, seconds: float) -> tuple[Row, dict[str, Any]]:
    """Read the data of every rank of one node at the same time; the row, and what rank 0 has found out.

    Raises:
        ConfigError: a loader cannot be read, or has no batch for too long.
    """
    results = _read_all(plan, seconds)
    batches = sum(result["batches"] / result["seconds"] for result in results)
    samples = batches * plan.micro_batch_size
    weight = results[0]["weight_per_sample"]
    row = Row(
        workers=workers,
        startup_seconds=max(result["startup_seconds"] for result in results),
        batches_per_second=batches,
        samples_per_second=samples,
        weights_per_second=None if weight in (None, 1) else weight * samples,  # samples stand in the table
    )
    return row, results[0]


def _read_all(plan: Plan, seconds: float) -> list[dict[str, Any]]:
    """What the process of each rank has measured."""
    ranks = plan.topology.devices
    context = get_context("spawn")
    barrier, environment = context.Barrier(ranks), rank_environment(ranks, _free_port())
    processes, waiting, results = [], dict[Any, int](), dict[int, dict[str, Any]]()
    try:
        for rank in range(ranks):
            answer, send = context.Pipe(duplex=False)
            given = (plan.to_json(), rank, seconds, environment, barrier, send)
            processes.append(context.Process(target=_answer, args=given))
            processes[-1].start()
            send.close()  # so that the end of the process is the end of the pipe
            waiting[answer] = rank
        limit = 4 * seconds + 2 * _START_SECONDS
        deadline = time.monotonic() + limit
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ConfigError(
                    f"the data were not read within {limit:.0f} s: look whether a worker waits for a disk or a network"
                )
            for answered in ready:
                rank = waiting.pop(answered)
                results[rank] = _received(answered, rank)
    finally:
        for process in processes:
            process.kill()  # its workers end with it
            process.join()
    return [results[rank] for rank in range(ranks)]


def _received(answer: Any, rank: int) -> dict[str, Any]:
    try:
        found = answer.recv()
    except EOFError:
        found = f"the data of rank {rank} cannot be read: its process was killed"
    if isinstance(found, str):
        raise ConfigError(found)
    return dict(found)


def _free_port() -> int:
    """For a data set that opens a process group of its own."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def _answer(plan: str, rank: int, seconds: float, environment: dict[str, str], barrier: Any, send: Any) -> None:
    """In a process of its own: send what was measured, or what is wrong as text."""
    os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    die_with_parent()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # what the user's code prints
    os.dup2(nowhere, 2)
    try:
        send.send(_measured(Plan.from_json(plan), rank, seconds, barrier))
    except ConfigError as error:
        send.send(str(error))
    except Exception as error:
        send.send(f"the data of rank {rank} cannot be read: {type(error).__name__}: {error}")
    os._exit(0)  # the workers end with this process


def _measured(plan: Plan, rank: int, seconds: float, barrier: Any) -> dict[str, Any]:
    import torch

    from shardwise.data.loaders import TrainLoader, weigher_of
    from shardwise.protocols import flops_of, loss_weight_unit_of
    from shardwise.trainer import build_data, build_module

    # Only one process builds the module, which may be large, and only for what it says about a batch.
    module = build_module(plan) if rank == 0 else None
    begin = time.perf_counter()
    data = build_data(plan)
    assert data is not None
    data.setup("fit")
    given = data.train_dataloader()
    if isinstance(given, list | tuple | dict):
        raise ConfigError(f"train_dataloader gives {count(len(given), 'loader')}, and bench-data reads one")
    loader = TrainLoader(given, plan, rank, torch.device("cpu"), None)
    batches = iter(loader)
    first = next(batches)
    found: dict[str, Any] = {"startup_seconds": time.perf_counter() - begin, "weight_per_sample": None, "unit": ""}
    if module is not None:
        weigh, flops = weigher_of(module), flops_of(module)
        found["unit"] = loss_weight_unit_of(module)
        found["weight_per_sample"] = weigh(first) / plan.micro_batch_size if weigh else None
        found["flops_per_sample"] = flops(first) / plan.micro_batch_size if flops else None
    barrier.wait()
    ready = getattr(given, "num_workers", 0) * (getattr(given, "prefetch_factor", None) or 0)
    found["batches"], found["seconds"] = time_batches(_Continued(batches, loader), seconds, ready)
    return found


class _Continued:
    """An iterator that has begun, and behind its end the loader anew."""

    def __init__(self, begun: Any, loader: Any) -> None:
        self.begun, self.loader = begun, loader

    def __iter__(self) -> Any:
        begun, self.begun = self.begun, None
        return iter(self.loader) if begun is None else begun


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
