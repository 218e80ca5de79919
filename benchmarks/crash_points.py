"""Tries a crash at every operation of a run on its folder: the table of docs/reliability.md.

    make crash-points                                        one process: about half an hour on two cores
    make crash-points ARGS="--ranks 2"                       two processes
    make crash-points ARGS="--layouts ddp --power-only"      only looks at what a loss of power leaves: a minute

All that a run does to its folder is recorded (benchmarks/harness/storage.py), and strace must have counted the same.
From what a kill before each operation leaves, the run goes on to its end, and must come to what the undisturbed run
came to: exit code 0, the same rows, the same bits in every tensor, the same best checkpoint, the same names in the
folder of checkpoints. What a loss of power may leave is looked at: no checkpoint that was promised is lost, none that
has its name is damaged, and config.yaml, plan.json, starts.json and ranks.csv are not empty.

`ddp` makes six steps, saves twice and keeps one checkpoint. Its best one is written on its own, then replaced by one of
links, then by one of copies, since links are refused. Every state that differs is tried, and the run is killed for real
at some. The others make two steps, save after each, and replace a best one of links by one of copies; those states are
tried that differ in the names in the folder of checkpoints. They are a strategy, `pipeline` or `tensor`, and perhaps a
word: `short`; `asynchronous` saves; `late`, where the tensors of rank 1 come seconds after those of rank 0; `again`,
where the newest checkpoint is damaged and its step is saved once more over its name; `recovery`, where the run is
killed, goes on, and is killed in that. Besides there are `prepare` and `export`.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from benchmarks.harness import results, storage  # noqa: E402
from shardwise.checkpoint.verify import changed  # noqa: E402
from shardwise.devices import count_cpus  # noqa: E402
from shardwise.run_dir.checkpoints import best_whole, damage, give_name_again, newest_whole, step_of  # noqa: E402
from shardwise.run_dir.files import BEST, CHECKPOINTS, CONFIG, METRICS, PARTIAL, PLAN, RANKS, STARTS  # noqa: E402
from tests.harness.chaos import SUBJECT, contents, rows, words_for  # noqa: E402
from tests.harness.commands import check, run  # noqa: E402

STEPS = 6
WORDS = ["module._target_=subject.Scored", "name=subject", "validate_every_n_steps=2",
         "checkpoint.save_every_n_steps=4", "checkpoint.keep_last=1"]  # fmt: skip
MODULE = """
class Scored(Subject):
    def validation_step(self, batch, batch_idx):
        score = {2: 3.0, 4: 2.0, 6: 1.0}.get(self.trainer.global_step, 9.0)
        self.log("validation/loss", score + 0 * self.loss(batch) + 0 * torch.rand(()), sync_dist=True)
"""
SHORT = ["validate_every_n_steps=1", "checkpoint.save_every_n_steps=1"]
NO_LINKS = {"FAULT_KIND": "link", "FAULT_FIRST": "1", "FAULT_LAST": "99",
            "FAULT_ERRNO": "1"}  # fmt: skip
LATE = {"FAULT_KIND": "create,fsync", "FAULT_PATH": "/__1_0", "FAULT_FIRST": "1", "FAULT_LAST": "99",
        "FAULT_SECONDS": "2"}  # fmt: skip
LAYOUTS = {1: "ddp,ddp asynchronous,ddp again,ddp recovery,prepare,export",
           2: "fsdp,fsdp late,fsdp asynchronous,zero2,pipeline"}  # fmt: skip
MAIN = ROOT / "src" / "shardwise" / "__main__.py"
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


def make_home(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "subject.py").write_text(SUBJECT.replace("WIDTH = 96", "WIDTH = 8") + MODULE)
    return folder


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
    found, own = storage.of_disk(folder), Counter(one.kind for one in operations[begins:])
    again_made = storage.tree(operations, written, storage.killed(len(operations)))
    if unlike := sorted(
        name for name in found.keys() | again_made.keys() if found.get(name, 0) != again_made.get(name, 0)
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
        "damaged": {
            path.name: found for path in folder.glob("*.ckpt") if (found := damage(path) or changed(path, 0, 1))
        },
    }


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
    for path in folder.glob("*.ckpt"):
        if said := damage(path) or changed(path, 0, 1):
            found.append(f"{path.name[:4]}-….ckpt has its name and is damaged: {re.sub(r'[0-9]+', 'N', said)}")
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


def try_layout(name: str, ranks: int, folder: Path, library: Path, power_only: bool = False) -> dict[str, Any]:
    """A layout, and what else is done: see the head."""
    layout, *more = name.split()
    home = make_home(folder / name.replace(" ", "-"))
    every = name == "ddp"
    steps = STEPS if every else 2
    words = [*words_for(layout, "cpu", ranks, steps), *WORDS, *SHORT * (not every),
             f"checkpoint.asynchronous={str('asynchronous' in more).lower()}", "checkpoint.when_busy=wait"]  # fmt: skip
    words += ["checkpoint.keep_last=2"] * ("again" in more)
    run_dir = home / "runs" / "subject"
    recorded = record(
        home, run_dir, words, library, **(LATE if "late" in more else NO_LINKS | {"FAULT_PATH": f"best-{steps:08d}"})
    )
    found: dict[str, Any] = {"operations": dict(Counter(one.kind for one in recorded.operations))}

    def wrongs(run_dir: Path, left: storage.Tree, promised: int) -> list[str]:
        lacks = "rank-N.pt is missing" if "again" in more else "nothing"
        return [one for one in wrongs_of_run(run_dir, left, promised) if not one.endswith(lacks)]

    def kills(one: Recorded) -> dict[str, Any]:
        states = list(kill_states(one, None if every else CHECKPOINTS))
        return try_kills(one, states, look_at, differences, wrongs, max(1, count_cpus() // ranks))

    if "again" in more:
        damaged = f"{CHECKPOINTS}/step-{steps:08d}.ckpt/rank-00000.pt"
        there = {path: content for path, content in storage.of_disk(run_dir).items() if path != damaged}
        recorded = record(home, run_dir, words, library, there=there)
        assert any("old.partial" in str(one) for one in recorded.operations), "nothing was saved over its name"
        found["operations"] = dict(Counter(one.kind for one in recorded.operations[recorded.begins :]))
    if "recovery" in more:
        parts = []
        for number in (recorded.first("create", f"step-00000002.ckpt{PARTIAL}/manifest.json"),
                       recorded.first("unlink", "best-00000001.ckpt.removed"),
                       recorded.first("unlink", "step-00000001.ckpt.removed")):  # fmt: skip
            own = record(home, run_dir, words, library, there=recorded.killed(number))
            parts.append({"killed_before": recorded.before(number), **kills(own),
                          "operations": len(own.operations) - own.begins})  # fmt: skip
        found["operations"] = {"all": sum(part["operations"] for part in parts)}
        found["kills"] = {"states": sum(part["states"] for part in parts),
                          "wrong": [wrong for part in parts for wrong in part["wrong"]], "parts": parts}  # fmt: skip
        return found
    found["power"] = try_power(folder / "power", recorded, wrongs)
    if power_only:
        return found
    found["kills"] = kills(recorded)
    if every:
        real = [recorded.first("create", f"step-00000004.ckpt{PARTIAL}/.metadata"),
                recorded.first("rename", "step-00000004.ckpt"), recorded.first("rename", BEST),
                recorded.first("unlink", "removed")]  # fmt: skip
        found["real"] = try_real(recorded, words, library, real)
    return found


def try_tool(name: str, folder: Path, library: Path) -> dict[str, Any]:
    """`shardwise prepare` and `shardwise export`: the same command again gives the same folder, which is whole as soon
    as it has its name."""
    home = make_home(folder / name)
    made = home / "made"
    made.mkdir()
    if name == "prepare":
        texts = home / "texts"
        texts.mkdir()
        for number in range(12):
            (texts / f"{number}.txt").write_text(" ".join(str(n**3) for n in range(number, 300 + number)))
        words = ["prepare", "texts", "output=made/out", "processes=1", "vocab_size=300", "validation=0.2"]
    else:
        check(run(home, *words_for("ddp", "cpu", 1, 2), *WORDS, "checkpoint.monitor=null"))
        words = ["export", "runs/subject", "format=safetensors", "out=made/out"]
    recorded = record(home, made, words, library, there={}, program=MAIN)

    def plain(place: Path) -> dict[str, Any]:
        """All that is there, but for how long it took."""
        found = storage.of_disk(place)
        for path in [path for path in found if path.startswith("out/report.")]:
            report = json.loads(found[path] or b"") if path.endswith(".json") else {}
            found[path] = json.dumps({key: value for key, value in report.items() if key != "rate"}).encode()
        return found

    def unlike(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
        return sorted(path for path in ours.keys() | theirs.keys() if ours.get(path, 0) != theirs.get(path, 0))

    whole = storage.of_disk(made)

    def wrongs(place: Path, left: storage.Tree, promised: int) -> list[str]:
        out = {path: content for path, content in left.items() if path.startswith("out/")}
        lacking = sorted(path for path in whole if path.startswith("out/") and whole[path] != out.get(path, 0))
        found = [f"out/ has its name, and is not whole: {', '.join(lacking)}"] if out and lacking else []
        trained = left.get(".out.preparing/trained/tokenizer.json", 0)
        if not out and ".out.preparing/trained" in left and trained != whole.get("out/tokenizer/tokenizer.json"):
            found.append("the trained tokenizer has its name, and is not whole")
        return found

    # An export that is there is not written over
    states = [state for state in kill_states(recorded) if name == "prepare" or "out" not in state[1]]
    return {
        "operations": dict(Counter(one.kind for one in recorded.operations)),
        "power": try_power(folder / "power", recorded, wrongs),
        "kills": try_kills(recorded, states, plain, unlike, wrongs, count_cpus()),
    }


def main() -> int:
    parser = results.command_line(__doc__, accelerator=None)
    parser.add_argument("--layouts", help="separated by commas")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--power-only", action="store_true", help="train from no state")
    arguments = parser.parse_args()
    environment, _ = results.measured_on("cpu", arguments.commit)
    path = arguments.out / f"crash-points-cpu-x{arguments.ranks}.json"
    result: dict[str, Any] = {"command": results.command(), "environment": environment, "layouts": {}}
    if path.exists() and (earlier := json.loads(path.read_text()))["environment"] == environment:  # of the same commit
        commands = dict.fromkeys([*earlier["command"].split("; "), results.command()])
        result |= {"command": "; ".join(commands), "layouts": earlier["layouts"]}
    with tempfile.TemporaryDirectory() as folder:
        library = storage.build(Path(folder))
        for name in (arguments.layouts or LAYOUTS[arguments.ranks]).split(","):
            began = time.monotonic()
            if name in ("prepare", "export"):
                found = try_tool(name, Path(folder), library)
            else:
                found = try_layout(name, arguments.ranks, Path(folder), library, arguments.power_only)
            found["seconds"] = round(time.monotonic() - began)
            result["layouts"][name] = found
            results.write(path, result)
            print(f"{name}: {json.dumps(found, indent=1)}", flush=True)
    parts = [one.get(part, {}) for one in result["layouts"].values() for part in ("power", "kills", "real")]
    return 1 if any(part.get("wrong") for part in parts) else 0


if __name__ == "__main__":
    sys.exit(main())
