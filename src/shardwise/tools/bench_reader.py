"""Times the data of each rank of a node in a process of its own, all at the same time, for bench_data.py."""

from __future__ import annotations

import os
import socket
import time
from multiprocessing import get_context
from multiprocessing.connection import wait
from typing import Any

from shardwise.data.bench import Row, time_batches
from shardwise.errors import ConfigError, count
from shardwise.launch.local import rank_environment
from shardwise.plan import Plan
from shardwise.process.parent import die_with_parent

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

    from shardwise.data.loaders import TrainLoader
    from shardwise.data.loss_weight import weigher_of
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
