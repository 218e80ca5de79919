"""Tries a crash at every operation of a run on its folder: the table of docs/reliability.md.

    make crash-points                                        ddp on one process: about ten minutes on two cores
    make crash-points ARGS="--layouts fsdp --ranks 2"        two processes
    make crash-points ARGS="--power-only"                    only looks at what a loss of power leaves: a minute

A run of six steps saves twice, keeps one checkpoint, and its best one is written on its own, then replaced by links.
All that it does to its folder is recorded (benchmarks/harness/storage.py). From what a kill before each operation
leaves, the run goes on to its end, and must come to what the undisturbed run came to: exit code 0, the same rows, the
same bits in every tensor, the same best checkpoint, the same names in the folder of checkpoints. What a loss of power
may leave is looked at: no checkpoint that was promised is lost, none that has its name is damaged, and config.yaml,
plan.json, starts.json and ranks.csv are not empty.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from benchmarks.harness import results, storage  # noqa: E402
from shardwise.checkpoint.verify import changed  # noqa: E402
from shardwise.run_dir.checkpoints import best_whole, damage, newest_whole, step_of  # noqa: E402
from shardwise.run_dir.files import BEST, CHECKPOINTS, CONFIG, METRICS, PLAN, RANKS, STARTS  # noqa: E402
from tests.harness.chaos import SUBJECT, contents, rows, words_for  # noqa: E402
from tests.harness.commands import check, run  # noqa: E402

STEPS = 6
WORDS = ["module._target_=subject.Scored", "name=subject", "validate_every_n_steps=2",
         "checkpoint.save_every_n_steps=4", "checkpoint.keep_last=1"]  # fmt: skip
MODULE = """
class Scored(Subject):
    def validation_step(self, batch, batch_idx):
        score = {2: 3.0, 4: 1.0}.get(self.trainer.global_step, 9.0)  # the best: step 2, then step 4
        self.log("validation/loss", score + 0 * self.loss(batch) + 0 * torch.rand(()), sync_dist=True)
"""


def make_home(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "subject.py").write_text(SUBJECT.replace("WIDTH = 96", "WIDTH = 8") + MODULE)
    return folder


def look_at(run_dir: Path) -> dict[str, Any]:
    """What a run has come to."""
    folder = run_dir / CHECKPOINTS
    whole = {path.name: contents(path) for path in folder.glob("*.ckpt") if damage(path) is None}
    return {
        "names": sorted(path.name for path in folder.iterdir()),
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
        for key in ("names", "rows", "best", "damaged")
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


def try_kills(
    home: Path, words: list[str], operations: list[storage.Operation], written: bytes, expected: dict[str, Any]
) -> dict[str, Any]:
    """Go on from what a kill before each operation leaves."""
    seen: set[str] = set()
    wrong = []
    for number in tqdm(range(len(operations) + 1), desc="kills", disable=None):
        left = storage.tree(operations, written, storage.killed(number))
        if (digest := storage.digest(left)) in seen:
            continue
        seen.add(digest)
        run_dir = home / "runs" / "subject"
        storage.write(left, run_dir)
        done = run(home, *words)
        said = [f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"] if done.returncode else []
        if not said:
            said = differences(look_at(run_dir), expected)
        if said:
            before = str(operations[number]) if number < len(operations) else "the end"
            wrong.append({"number": number, "before": before, "said": said})
            tqdm.write(f"{number}, before {before}: {'; '.join(said)[:300]}")
    return {"states": len(seen), "wrong": wrong}


def try_power(folder: Path, operations: list[storage.Operation], written: bytes) -> dict[str, Any]:
    """Look at what a loss of power before each operation may leave."""
    made = next(number for number, one in enumerate(operations) if one.kind == "mkdir" and one.name == CHECKPOINTS)
    operations[made].durable = made  # the folder of checkpoints itself: all that we could lose with it is a first save
    seen: set[tuple[str, int]] = set()
    found: Counter[str] = Counter()
    first: dict[str, str] = {}
    states = 0
    for number in tqdm(range(len(operations) + 1), desc="losses of power", disable=None):
        promised = max(
            (step_of(one.to) for one in operations[:number]
             if one.kind == "rename" and one.to_name.startswith("step-") and one.durable < number),
            default=-1,
        )  # fmt: skip
        for what, keeps in storage.without_power(operations, number):
            states += 1
            left = storage.tree(operations, written, keeps)
            if (key := (storage.digest(left), promised)) in seen:
                continue
            seen.add(key)
            storage.write(left, folder)
            for one in wrongs(folder, left, promised):
                found[one] += 1
                first.setdefault(one, f"before {operations[number] if number < len(operations) else 'the end'}: {what}")
    return {
        "states": states,
        "distinct": len(seen),
        "wrong": [{"what": w, "states": n, "first": first[w]} for w, n in found.items()],
    }


def wrongs(run_dir: Path, left: storage.Tree, promised: int) -> list[str]:
    """What is wrong with a run's folder, by kinds."""
    folder, found = run_dir / CHECKPOINTS, []
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


def main() -> int:
    parser = results.command_line(__doc__, accelerator=None)
    parser.add_argument("--layouts", default="ddp", help="strategies, pipeline or tensor; separated by commas")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--power-only", action="store_true", help="train from no state")
    arguments = parser.parse_args()
    environment, _ = results.measured_on("cpu", arguments.commit)
    path = arguments.out / f"crash-points-cpu-x{arguments.ranks}.json"
    result: dict[str, Any] = {"command": results.command(), "environment": environment, "layouts": {}}
    with tempfile.TemporaryDirectory() as folder:
        library = storage.build(Path(folder))
        for layout in arguments.layouts.split(","):
            began, home = time.monotonic(), make_home(Path(folder) / layout)
            words = [*words_for(layout, "cpu", arguments.ranks, STEPS), *WORDS,
                     f"checkpoint.asynchronous={str(arguments.asynchronous).lower()}"]  # fmt: skip
            run_dir, log = home / "runs" / "subject", home / "log"
            check(run(home, *words, anew=True, **storage.recording(library, run_dir, log)))
            operations, written = storage.read(log)
            if (again := storage.tree(operations, written, storage.killed(len(operations)))) != (
                there := storage.of_disk(run_dir)
            ):
                unlike = sorted(
                    name for name in again.keys() | there.keys() if again.get(name, 0) != there.get(name, 0)
                )
                raise SystemExit(
                    f"error: the operations that were recorded do not give the folder: {', '.join(unlike)}"
                )
            found = {"operations": dict(Counter(one.kind for one in operations))}
            expected = look_at(run_dir)
            found["power"] = try_power(Path(folder) / "power", operations, written)
            if not arguments.power_only:
                found["kills"] = try_kills(home, words, operations, written, expected)
            found["seconds"] = round(time.monotonic() - began)
            result["layouts"][layout] = found
            results.write(path, result)
            print(f"{layout}: {json.dumps(found, indent=1)}", flush=True)
            shutil.rmtree(home)
    return (
        1
        if any(part.get("wrong") for one in result["layouts"].values() for part in (one["power"], one.get("kills", {})))
        else 0
    )


if __name__ == "__main__":
    sys.exit(main())
