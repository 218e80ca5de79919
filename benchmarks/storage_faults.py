"""Lets every operation of a run on its folder fail: the table of docs/reliability.md.

    make storage-faults                                       1,200 cases: an hour or two on two cores
    make storage-faults ARGS="--errors EIO --only best.json"  one error, of operations on paths with this text
    make storage-faults ARGS=--in-turn                        each operation and way with one of the errors: 230 cases

The run of benchmarks/crash_points.py trains under benchmarks/harness/storage_recorder.c. Each of its operations, by its
kind and the file that it is about, fails in three ways: the first time, every time, or the first time and with all that
comes after it. What must be: a run whose operation fails once ends as the undisturbed one, with exit code 0; where an
operation, or the disk, stays bad the run ends with exit code 0, its last checkpoint written and what is missing named,
or with exit code 1 and one message with the path, and `resume=auto` brings it to the undisturbed end once the fault is
gone. No way shows a traceback, loses a checkpoint that was there, or leaves a damaged one under its name.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tqdm import tqdm  # noqa: E402

from benchmarks.crash_points import STEPS, WORDS, make_home  # noqa: E402
from benchmarks.harness import results, storage  # noqa: E402
from benchmarks.harness.crashes import damaged, differences, look_at  # noqa: E402
from shardwise.run_dir.checkpoints import best_whole, newest_whole, step_of  # noqa: E402
from shardwise.run_dir.files import BEST, CHECKPOINTS  # noqa: E402
from tests.harness.chaos import words_for  # noqa: E402
from tests.harness.commands import check, run  # noqa: E402

ERRORS = ["ENOSPC", "EIO", "EDQUOT", "ESTALE", "EROFS", "short"]
WAYS = ["once", "always", "from then on"]
KINDS = "create,truncate,write,fsync,ftruncate,rename,link,unlink,rmdir,mkdir,symlink"
TAKES_ROOM = "create,write,fsync,link,mkdir,symlink"  # what a full disk refuses
SAID = re.compile(
    r"^(?:error: |shardwise: |checkpoint )?.*(?:could not|cannot|without|error:|tried again|lacks).*", re.M
)


@dataclass(frozen=True)
class Point:
    """An operation that fails."""

    kind: str
    path: str  # of its first time, below the run's folder
    like: str  # the same with * in place of numbers
    number: int  # its place among all operations of the run


def points(log: Path) -> list[Point]:
    """The first operation of each kind on each file.

    One stands for all files of a folder that is linked or removed, and of the best, which is written as a step's is.
    """
    found: dict[tuple[str, str], Point] = {}
    for number, line in enumerate(log.read_text().splitlines()):
        kind, path, to, *_ = line.split("\t")
        path = (to if to != "-" else path) or "/"
        like = re.sub(r"\d+", "*", path)
        if kind in ("link", "unlink") or "/best-*" in like:
            like = re.sub(r"(\.partial)/.*", r"\1/*", like)
        found.setdefault((kind, like), Point(kind, path, like, number))
    return list(found.values())


def fault(point: Point, error: str, way: str) -> dict[str, str]:
    """The environment in which the operation fails."""
    words = {"FAULT_KIND": point.kind, "FAULT_PATH": point.like if way == "always" else point.path, "FAULT_FIRST": "1"}
    words |= {} if way == "once" else {"FAULT_LAST": str(2**31)}
    if error == "short":
        return words | {"FAULT_SHORT": "1"} | ({"FAULT_THEN": "write"} if way == "from then on" else {})
    then = TAKES_ROOM if error in ("ENOSPC", "EDQUOT") else KINDS
    return words | {"FAULT_ERRNO": str(getattr(errno, error))} | ({"FAULT_THEN": then} if way == "from then on" else {})


class Trial:
    """Runs that train in one folder, one after another."""

    def __init__(self, folder: Path) -> None:
        self.home = make_home(folder / "home")
        subject = self.home / "subject.py"
        subject.write_text(subject.read_text().replace("num_workers=1", "num_workers=0"))  # most of a case's seconds
        self.run_dir, self.log = self.home / "runs" / "subject", folder / "log"
        recorder = storage.recording(storage.build(folder), self.run_dir, self.log)
        del recorder["STORAGE_BYTES"]
        os.environ |= recorder  # the fork server, which starts with the first run, gives it to all its forks
        self.words = [*words_for("ddp", "cpu", 1, STEPS), *WORDS]
        check(run(self.home, *self.words))
        self.expected = look_at(self.run_dir)
        self.points = points(self.log / "log")
        lines = (self.log / "log").read_text().splitlines()
        named = [number for number, line in enumerate(lines) if line.startswith("fsync\t/checkpoints\t")]
        renamed = [line.startswith("rename") and line.split("\t")[2].endswith("-00000004.ckpt") for line in lines]
        self.step_saved = next(n for n in named if n > renamed.index(True))
        best = next(n for n, line in enumerate(lines) if line.startswith("rename") and f"/{BEST}\t" in line)
        self.best_saved = next(n for n in named if n > best)

    def unlike(self) -> list[str]:
        """In what the run's end differs from the undisturbed one."""
        try:
            return differences(look_at(self.run_dir), self.expected)
        except (OSError, ValueError) as error:  # no checkpoints, no best.json, no rows
            return [str(error)]

    def run(self, point: Point, error: str, way: str) -> dict[str, Any]:
        shutil.rmtree(self.run_dir, ignore_errors=True)
        with (self.log / "shared").open("r+b") as shared:
            shared.write(bytes(8))  # no fault so far
        done = run(self.home, *self.words, **fault(point, error, way))
        happened = int.from_bytes((self.log / "shared").read_bytes()[:8], sys.byteorder)
        text = done.stdout + done.stderr
        said = list(dict.fromkeys(line.strip().replace(str(self.home) + "/", "") for line in SAID.findall(text)))
        case: dict[str, Any] = {"kind": point.kind, "path": point.like, "error": error, "way": way, "faults": happened}
        names = sorted(path.name for path in self.run_dir.glob(f"{CHECKPOINTS}/*"))
        case |= {"exit_code": done.returncode, "said": said, "left": names}
        wrong = self.wrongs(point, way, done.returncode, text, said)
        if not happened:
            wrong.append("the operation was not met")
        if done.returncode:
            again = run(self.home, *self.words)
            ended = f"step-{STEPS:08d}.ckpt" in names  # what is missing beside it is not made again
            case["resumed"] = again.returncode == 0 and (ended or not self.unlike())
            if not case["resumed"]:
                wrong.append(f"it does not go on to the same end: {again.stderr[-300:] or self.unlike()}")
        return case | ({"wrong": wrong, "text": text[-3000:]} if wrong else {})

    def wrongs(self, point: Point, way: str, code: int, text: str, said: list[str]) -> list[str]:
        wrong = ["a traceback"] if "Traceback" in text else []
        wrong += [f"{name} is damaged: {found}" for name, found in damaged(self.run_dir / CHECKPOINTS).items()]
        newest = newest_whole(self.run_dir)
        if (-1 if newest is None else step_of(newest)) < (4 if point.number > self.step_saved else -1):
            wrong.append("the checkpoint of step 4 is lost")
        if point.number > self.best_saved and best_whole(self.run_dir) is None:
            wrong.append("the best checkpoint is lost")
        told = [line for line in said if "runs/subject" in line]
        trains = point.number > self.best_saved or re.search(r"^step \d", text, re.MULTILINE)
        errors = [line for line in text.splitlines() if line.startswith("error: ")]
        if code and (len(errors) != 1 or "runs/subject" not in errors[0]):
            wrong.append(f"not one message with the path: {errors}")
        if code and trains and (code != 1 or way == "once"):
            wrong.append(f"exit code {code}")
        if code:
            return wrong
        unlike = self.unlike()
        if newest is None or step_of(newest) != STEPS:
            wrong.append("exit code 0 without the last checkpoint")
        elif unlike and (way == "once" or not told or any("bits" in one for one in unlike)):
            wrong.append(f"not the undisturbed end: {unlike}")
        return wrong


def main() -> int:
    parser = results.command_line(__doc__, accelerator=None)
    parser.add_argument("--errors", type=results.names(ERRORS), default=ERRORS, help="separated by commas")
    parser.add_argument("--ways", type=results.names(WAYS), default=WAYS, help="separated by commas")
    parser.add_argument("--only", default="", help="operations with this text in `kind path`, numbers as *")
    parser.add_argument("--in-turn", action="store_true", help="the errors take turns")
    arguments = parser.parse_args()
    environment, _ = results.measured_on("cpu", arguments.commit)
    path = arguments.out / "storage-faults-cpu.json"
    cases = results.earlier(path, lambda found: [case["way"] for case in found["cases"]]).get("cases", [])
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder))
        chosen = []
        for at, point in enumerate(trial.points):
            errors = [error for error in arguments.errors if error != "short" or point.kind == "write"]
            for turn, way in enumerate(arguments.ways):
                some = [errors[(at + 2 * turn) % len(errors)]] if arguments.in_turn else errors
                if arguments.only in f"{point.kind} {point.path} {point.like}":
                    chosen += [(point, error, way) for error in some]
        for point, error, way in tqdm(chosen, disable=None):
            case = trial.run(point, error, way) | {"commit": environment["commit"]}
            same = {"kind": point.kind, "path": point.like, "error": error, "way": way}
            cases = [*(one for one in cases if any(one[key] != same[key] for key in same)), case]
            results.write(path, {"command": results.command(), "environment": environment, "cases": cases})
            if "wrong" in case:
                what = f"{point.kind} {point.like}, {error} {way}: exit code {case['exit_code']}"
                tqdm.write(f"{what}: {'; '.join(case['wrong'])[:300]}\n    {' | '.join(case['said'])[:400]}")
    wrong = sum("wrong" in case for case in cases)
    print(f"{len(cases)} cases, {wrong} wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
