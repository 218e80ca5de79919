"""What a crash leaves of a program that is recorded, and whether it comes to the same end from there."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.harness import storage
from shardwise.checkpoint.files import changed
from shardwise.run_dir.checkpoints import best_whole, damage, give_name_again, newest_whole, step_of
from shardwise.run_dir.files import BEST, CHECKPOINTS, CONFIG, METRICS, PARTIAL, PLAN, RANKS, STARTS
from tests.harness.chaos import contents, rows
from tests.harness.commands import check, run

Wrongs = Callable[[Path, storage.Tree, int], list[str]]


@dataclass
class Recorded:
    """What a program has done to a folder, and how to do it again."""

    home: Path
    folder: Path  # within home
    operations: list[storage.Operation]
    written: bytes
    begins: int  # the number of the first operation that is its own
    again: Callable[[Path], Any]  # starts the program once more, in a home like this one

    def killed(self, before: int) -> storage.Tree:
        return storage.tree(self.operations, self.written, storage.killed(before))

    def before(self, number: int) -> str:
        return str(self.operations[number]) if number < len(self.operations) else "the end"

    def first(self, kind: str, name: str) -> int:
        """The number of its first operation of this kind on, or to, a path with this name in it."""
        return next(
            number
            for number, one in enumerate(self.operations)
            if number >= self.begins and one.kind == kind and name in f"{one.path} {one.to}"
        )


def record(
    home: Path, folder: Path, words: list[str], library: Path, *,
    there: storage.Tree | None = None, **how: Any,
) -> Recorded:  # fmt: skip
    """Run the program and record what it does to `folder`, which holds `there`. `how`: FAULT_*, and the `program`.

    Raises:
        SystemExit: what was recorded does not give the folder, or strace has counted other operations.
    """
    log, trace, options = home / "log", home / "trace", {key: how.pop(key) for key in ("program",) if key in how}
    shutil.rmtree(log, ignore_errors=True)
    if there is not None:
        storage.write(there, folder)
    command = None
    if shutil.which("strace"):
        command = [*storage.STRACE, "-o", str(trace), sys.executable]
    check(run(home, *words, anew=True, command=command, **options, **storage.recording(library, folder, log, **how)))
    operations, written = storage.read(log, there)
    begins = sum(one.durable == storage.BEFORE for one in operations)
    found = storage.of_disk(folder)
    own = Counter(one.kind for one in operations[begins:] if one.kind != "write" or not one.path.startswith("/logs/"))
    again_made = storage.tree(operations, written, storage.killed(len(operations)))
    if unlike := sorted(
        name
        for name in found.keys() | again_made.keys()
        if found.get(name, 0) != again_made.get(name, 0) and not name.startswith("logs/")
    ):
        raise SystemExit(f"error: the operations that were recorded do not give the folder: {', '.join(unlike)}")
    if command is None:
        print("strace is not installed: nothing has counted the operations a second time", flush=True)
    elif (counted := storage.counted(trace, folder, there)) != own:
        raise SystemExit(f"error: strace has counted {dict(counted)}, and {dict(own)} were recorded")
    return Recorded(
        home, folder, operations, written, begins,
        lambda other: run(other, *words, **options),
    )  # fmt: skip


def look_at(run_dir: Path) -> dict[str, Any]:
    """What a run has come to."""
    folder = run_dir / CHECKPOINTS
    whole = {path.name: contents(path) for path in folder.glob("*.ckpt") if damage(path) is None}
    return {
        "names": sorted(path.name for path in folder.iterdir()),
        "left": sorted(path.name for path in run_dir.rglob(f"*{PARTIAL}")),
        "rows": rows(run_dir),
        "best": json.loads((folder / BEST).read_text()),
        "tensors": whole,
        "damaged": damaged(folder),
    }


def damaged(folder: Path) -> dict[str, str]:
    """The checkpoints that have their names and are not whole: name → what is wrong."""
    return {path.name: found for path in folder.glob("*.ckpt") if (found := damage(path) or changed(path, 0, 1))}


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """In what two runs differ, in words."""
    found = [
        f"{key}: {ours[key]} and not {theirs[key]}"
        for key in ("names", "left", "rows", "best", "damaged")
        if ours[key] != theirs[key]
    ]
    for name in ours["tensors"].keys() & theirs["tensors"].keys():
        own, other = ours["tensors"][name], theirs["tensors"][name]
        unlike = [
            key
            for key in own.keys() | other.keys()
            if key not in own or key not in other or not torch.equal(own[key], other[key])
        ]
        found += [f"{name}: not the same bits: {unlike}"] if unlike else []
    return found


def kill_states(recorded: Recorded, below: str | None = None) -> Iterator[tuple[int, Any]]:
    """Each distinct folder that a kill leaves, with the number of the operation before which it is killed. `below`:
    only those that differ in the names in this inner folder."""
    seen = set()
    for number in range(recorded.begins, len(recorded.operations) + 1):
        left = recorded.killed(number)
        part = left if below is None else {path: None for path in left if path.startswith(below)}
        if (digest := storage.digest(part)) not in seen:
            seen.add(digest)
            yield number, left


def try_kills(
    recorded: Recorded, states: list[tuple[int, storage.Tree]], look: Callable[[Path], dict[str, Any]],
    unlike: Callable[[dict[str, Any], dict[str, Any]], list[str]], wrongs: Wrongs, jobs: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Go on from what a kill leaves, `jobs` at a time."""
    expected, place = look(recorded.folder), recorded.folder.relative_to(recorded.home)
    homes: SimpleQueue[Path] = SimpleQueue()
    for number in range(jobs):
        home = recorded.home.with_name(f"{recorded.home.name}-{number}")
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(recorded.home, home, ignore=lambda folder, names: {"log", "trace", recorded.folder.name})
        homes.put(home)

    def try_one(state: tuple[int, storage.Tree]) -> dict[str, Any] | None:
        number, left = state
        home = homes.get()
        try:
            storage.write(left, home / place)
            said = wrongs(home / place, left, promised_before(recorded, number, killed=True))
            storage.write(left, home / place)
            done = recorded.again(home)
            said += [f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"] if done.returncode else []
            said = said or unlike(look(home / place), expected)
        except Exception as error:
            said = [f"{type(error).__name__}: {error}"[-600:]]
        finally:
            homes.put(home)
        if not said:
            return None
        tqdm.write(f"{number}, before {recorded.before(number)}: {'; '.join(said)[:400]}")
        return {"number": number, "before": recorded.before(number), "said": said}

    with ThreadPoolExecutor(jobs) as pool:
        tried = list(tqdm(pool.map(try_one, states), total=len(states), desc="kills", disable=None))
    return {"states": len(states), "wrong": [one for one in tried if one is not None]}


def promised_before(recorded: Recorded, number: int, killed: bool) -> int:
    """The newest step whose checkpoint has been published: by its name, and for a loss of power on the disk."""
    steps = [
        step_of(one.to)
        for one in recorded.operations[:number]
        if one.kind == "rename" and one.to_name.startswith("step-") and (killed or one.durable < number)
    ]
    return max(steps, default=-1)


def try_power(folder: Path, recorded: Recorded, wrongs: Wrongs) -> dict[str, Any]:
    """Look at what a loss of power before each operation may leave."""
    operations = recorded.operations
    for number, one in enumerate(operations):
        if one.kind == "mkdir" and one.name == CHECKPOINTS:
            one.durable = min(number, one.durable)  # all that we could lose with it is a first save
    seen: set[tuple[str, int]] = set()
    found: Counter[str] = Counter()
    first: dict[str, str] = {}
    states = 0
    for number in tqdm(range(recorded.begins, len(operations) + 1), desc="losses of power", disable=None):
        promised = promised_before(recorded, number, killed=False)
        for what, keeps in storage.without_power(operations, number):
            states += 1
            left = storage.tree(operations, recorded.written, keeps)
            if (key := (storage.digest(left), promised)) in seen:
                continue
            seen.add(key)
            storage.write(left, folder)
            for one_wrong in wrongs(folder, left, promised):
                found[one_wrong] += 1
                first.setdefault(one_wrong, f"before {recorded.before(number)}: {what}")
    return {
        "states": states,
        "distinct": len(seen),
        "wrong": [{"what": w, "states": n, "first": first[w]} for w, n in found.items()],
    }


def wrongs_of_run(run_dir: Path, left: storage.Tree, promised: int) -> list[str]:
    """What is wrong with a run's folder, by kinds."""
    folder, found = run_dir / CHECKPOINTS, []
    give_name_again(run_dir)  # as a start does
    newest = newest_whole(run_dir)
    step = -1 if newest is None else step_of(newest)
    if step < promised:
        found.append("a checkpoint that was published is lost")
    for name, said in damaged(folder).items():
        found.append(f"{name[:4]}-….ckpt has its name and is damaged: {re.sub(r'[0-9]+', 'N', said)}")
    best = left.get(f"{CHECKPOINTS}/{BEST}")
    if best is not None and best_whole(run_dir) is None:
        found.append(f"{BEST} does not name a whole checkpoint")
    logged = {line.split(b",")[0] for line in (left.get(METRICS) or b"").splitlines()}
    if any(str(number).encode() not in logged for number in range(1, step)):
        found.append(f"{METRICS} lacks a row of before the newest checkpoint")
    return found + [f"{name} is empty" for name in (CONFIG, PLAN, STARTS, RANKS) if left.get(name) == b""]


def try_real(recorded: Recorded, words: list[str], library: Path, numbers: list[int]) -> dict[str, Any]:
    """Kill the run for real before these operations: the names that it leaves are those of the model."""
    wrong = []
    for number in numbers:
        log = recorded.home / "log"
        shutil.rmtree(log)
        shutil.rmtree(recorded.folder)
        fault = {"FAULT_KILL": str(number)}
        done = run(recorded.home, *words, anew=True, **storage.recording(library, recorded.folder, log, **fault))
        operations, written = storage.read(log)
        there, model = storage.of_disk(recorded.folder), recorded.killed(number)
        said = [] if done.returncode == -9 else [f"exit code {done.returncode}"]
        if storage.tree(operations, written, storage.killed(len(operations))) != there:
            said.append("the operations that were recorded do not give the folder")
        if there.keys() != model.keys():
            said.append(f"other names than the model's: {sorted(there.keys() ^ model.keys())}")
        wrong += [{"number": number, "before": recorded.before(number), "said": said}] if said else []
    return {"states": len(numbers), "wrong": wrong}
