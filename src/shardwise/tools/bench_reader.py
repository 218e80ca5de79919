"""Reads the data of each rank of a node in a process of its own, all at the same time, for bench_data.py."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from shardwise.data.bench import Row, time_batches
from shardwise.errors import ConfigError, count
from shardwise.launch.local import rank_environment
from shardwise.plan import Plan
from shardwise.process.parent import die_with_parent
from shardwise.run_dir.files import write_whole

_START_SECONDS = 300  # for the first batch of every loader


def measure(plan: Plan, workers: int, seconds: float) -> tuple[Row, dict[str, Any]]:
    """Read the data of every rank of one node at the same time; the row, and what rank 0 has found out.

    Raises:
        ConfigError: a loader cannot be read, or has no batch for too long.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardwise-bench-")))
        environment = rank_environment(plan.topology.devices, _free_port())
        loaders = [
            stack.enter_context(_Loader(plan, rank, seconds, folder, environment))
            for rank in range(plan.topology.devices)
        ]
        deadline = time.monotonic() + _START_SECONDS
        starts = [loader.wait_for("ready", deadline) for loader in loaders]
        for loader in loaders:
            loader.go()
        deadline = time.monotonic() + 4 * seconds + _START_SECONDS
        results = [loader.wait_for("result", deadline) for loader in loaders]
    batches = sum(result["batches"] / result["seconds"] for result in results)
    samples = batches * plan.micro_batch_size
    first = starts[0]
    weight = None if first["weight_per_sample"] == 1 else first["weight_per_sample"]  # samples stand in the table
    row = Row(
        workers=workers,
        startup_seconds=max(start["startup_seconds"] for start in starts),
        batches_per_second=batches,
        samples_per_second=samples,
        weights_per_second=None if weight is None else weight * samples,
    )
    return row, first


class _Loader:
    """A process that reads the data of one rank. It leaves its findings as files in `folder`."""

    def __init__(self, plan: Plan, rank: int, seconds: float, folder: Path, environment: dict[str, str]) -> None:
        self.rank, self.folder = rank, folder
        self.log = (folder / f"log-{rank}").open("w+")
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardwise.tools.bench_reader", str(folder), str(seconds)], env=environment | ranks,
            stdin=subprocess.PIPE, stdout=self.log, stderr=self.log, text=True,
        )  # fmt: skip
        self._tell(json.dumps(plan.to_json()))

    def __enter__(self) -> _Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # its workers end with it
        self.process.wait()
        self.log.close()

    def go(self) -> None:
        self._tell("go")

    def wait_for(self, name: str, deadline: float) -> dict[str, Any]:
        path = self.folder / f"{name}-{self.rank}"
        while not path.exists():
            if (code := self.process.poll()) is not None and not path.exists():
                self.log.seek(0)
                lines = [line for line in self.log.read().splitlines() if line.strip()]
                refused = [line for line in lines if line.startswith("error: ")]
                if refused:
                    raise ConfigError(refused[-1].removeprefix("error: "))
                last = lines[-1] if lines else "it printed nothing"
                raise ConfigError(f"the data of rank {self.rank} cannot be read (exit code {code}): {last}")
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"the data of rank {self.rank} gave no batch within {_START_SECONDS} s: look whether a worker "
                    f"waits for a disk or a network"
                )
            time.sleep(0.02)
        return dict(json.loads(path.read_text()))

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and wait_for says why


def _free_port() -> int:
    """For a data set that opens a process group of its own."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def read_here(folder: Path, seconds: float) -> None:
    """In a process of its own: read this rank's data, and leave what was measured in `folder`."""
    import torch

    from shardwise.data.loaders import TrainLoader
    from shardwise.data.loss_weight import weigher_of
    from shardwise.protocols import flops_of, loss_weight_unit_of
    from shardwise.trainer import build_data, build_module

    plan, rank = Plan.from_json(json.loads(sys.stdin.readline())), int(os.environ["RANK"])
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
    write_whole(folder / f"ready-{rank}", json.dumps(found))
    sys.stdin.readline()
    ready = getattr(given, "num_workers", 0) * (getattr(given, "prefetch_factor", None) or 0)
    number, passed = time_batches(_Continued(batches, loader), seconds, ready)
    write_whole(folder / f"result-{rank}", json.dumps({"batches": number, "seconds": passed}))


class _Continued:
    """An iterator that has begun, and behind its end the loader anew."""

    def __init__(self, begun: Any, loader: Any) -> None:
        self.begun, self.loader = begun, loader

    def __iter__(self) -> Any:
        begun, self.begun = self.begun, None
        return iter(self.loader) if begun is None else begun


if __name__ == "__main__":
    die_with_parent()
    try:
        read_here(Path(sys.argv[1]), float(sys.argv[2]))
    except ConfigError as error:
        sys.exit(f"error: {error}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the workers end with this process
