"""Runs one rank of a preflight. A thread inspects and measures; rank 0's main thread judges.

The main threads never wait for a device or for a collective. They talk over a store, so that a rank that is missing or
hangs is noticed and named.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from shardwise.config.schema import RunConfig
from shardwise.errors import ExitCode
from shardwise.preflight.judge import PINGS, Judge
from shardwise.preflight.node_report import host_name, inspect_node
from shardwise.preflight.pairs import make_rounds
from shardwise.preflight.place import Limits, Place, connect, left
from shardwise.process.signals import PARENT
from shardwise.run_dir.events import claim_exit_code

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_BEAT_SECONDS = 0.25


def run(config: RunConfig, limits: Limits) -> int:
    """Run this process's part. The exit code is the same for all ranks; a thread may still hang afterwards."""
    place = Place.read()
    # Even a main thread may hang, for instance when a file system is gone: this ends the process then
    last = threading.Timer(left(limits.total + 4 * limits.grace), lambda: os._exit(ExitCode.hang))
    last.daemon = True
    last.start()
    try:
        # This imports torch, as all ranks of a node do at the same time
        store, own = connect(place, limits.arrive), connect(place, limits.arrive)
    except Exception as error:
        return _report_no_connection(place, limits, error)
    own.set_timeout(timedelta(seconds=left(limits.total)))  # this is long, since rank 0 waits for other ranks first
    store.set(f"here/{place.rank}", host_name())
    worker = threading.Thread(target=_work, args=(own, place, config, limits), daemon=True)
    worker.start()
    if place.rank:
        return _wait_for_verdict(store, place, limits)
    return Judge(store, place, config, limits).run()


def _report_no_connection(place: Place, limits: Limits, error: Exception) -> int:
    """Report, once a node, that this rank has no torch or cannot reach rank 0, which then finds it missing."""
    master = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if isinstance(error, ImportError):
        text = f"{host_name()}: rank {place.rank} cannot begin: {type(error).__name__}: {error}"
    else:
        text = f"{host_name()}: rank {place.rank} cannot reach rank 0 at {master}: {str(error).splitlines()[0]}"
    if place.local_rank == 0 and (place.rank == 0 or claim_exit_code(ExitCode.bad_node, text)):
        sys.stderr.write(f"preflight: {text}\n")
        sys.stderr.flush()
    if PARENT not in os.environ and place.rank:
        # The first rank to end may end the whole job step, so it waits until rank 0 has judged
        time.sleep(left(limits.arrive + limits.grace))
    return ExitCode.bad_node


def _wait_for_verdict(store: Store, place: Place, limits: Limits) -> int:
    """Wait for rank 0's verdict, and show rank 0 in the meantime that this process is alive."""
    beats = 0
    deadline = limits.total + 3 * limits.grace
    try:
        while not store.check(["verdict"]):
            if left(deadline) <= 0.01:
                break
            beats += 1
            store.set(f"beat/{place.rank}", str(beats))
            time.sleep(_BEAT_SECONDS)
        else:
            code = int(store.get("verdict"))
            store.add("gone", 1)
            return code
        text = "has said nothing"
    except Exception as error:
        text = f"is gone: {str(error).splitlines()[0]}"
    if place.local_rank == 0 and claim_exit_code(ExitCode.crash, f"rank 0 {text}"):
        sys.stderr.write(f"preflight: {host_name()}: rank 0, on {os.environ['MASTER_ADDR']}, {text}\n")
    return ExitCode.crash


def _work(store: Store, place: Place, config: RunConfig, limits: Limits) -> None:
    """Inspect and measure. An error is reported and does not end the process: rank 0 decides."""
    steps = [0]

    def at(words: str) -> None:
        steps[0] += 1
        store.set(f"at/{place.rank}", json.dumps([steps[0], words]))

    try:
        at("looking at its node")
        if place.local_rank == 0:
            found = inspect_node(config.runs_dir, config.accelerator != "cpu")
            store.set(f"look/{place.node}", json.dumps(asdict(found)))
        at("waiting to begin")
        if place.local_rank == 0 and place.rank:
            _answer_clock_questions(store, place)
        if (device := store.get("begin").decode()) == "nothing":
            return
        measured = _measure(store, place, device, limits, config.seed, at)
        at("the end")
        store.set(f"measured/{place.rank}", json.dumps(measured))
    except Exception as error:
        trace = traceback.format_exception(error)
        text = f"rank {place.rank}: {' '.join(str(error).split())[:500] or 'no message'} ({type(error).__name__})"
        store.set(f"failed/{place.rank}", json.dumps([store.add("failures", 1), text, "".join(trace)]))
        store.set("failed", "")


def _answer_clock_questions(store: Store, place: Place) -> None:
    for ping in range(PINGS):
        store.get(f"ping/{place.node}/{ping}")
        store.set(f"pong/{place.node}/{ping}", repr(time.time()))


def _measure(
    store: Store, place: Place, kind: str, limits: Limits, seed: int, at: Callable[[str], None]
) -> dict[str, Any]:
    from torch._C._distributed_c10d import PrefixStore

    from shardwise import accelerator
    from shardwise.preflight.measure import Measures

    device = accelerator.device_of_rank(kind, place.local_rank)
    accelerator.set_device(device)  # for this thread
    at("the first use of its device")
    measures = Measures(place.rank, place.devices, device)
    measured: dict[str, Any] = {"in_node": None, "wrong": [], "pairs": {}}
    seconds = left(limits.total + 2 * limits.grace)  # groups give up after rank 0 has judged, which names who hangs
    first, names = place.node * place.devices, json.loads(store.get("names"))
    # Each node is measured by itself first, so that a node with trouble inside is named
    if place.devices > 1:
        at("a process group of its node")
        with measures.group(PrefixStore(f"node/{place.node}", store), place.local_rank, place.devices, seconds):
            at("a sum inside its node")
            measured["wrong"].append(measures.check_sum(range(first, first + place.devices)))
            at("all-reduces inside its node")
            measured["in_node"] = measures.all_reduce_bandwidth()
            if place.nodes == 1:
                names = [f"rank {rank}" for rank in range(place.world)]
                measured["pairs"] = measures.pairs(make_rounds(place.world, seed), place.rank, 1, at, names)
    if place.nodes > 1:
        at("a process group of all ranks")
        with measures.group(PrefixStore("all", store), place.rank, place.world, seconds):
            at("a sum over all ranks")
            measured["wrong"].append(measures.check_sum(range(place.world)))
            rounds = make_rounds(place.nodes, seed)
            measured["pairs"] = measures.pairs(rounds, place.node, place.devices, at, names)
    return measured
