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
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]


from benchmarks.harness import results, storage  # noqa: E402
from benchmarks.harness.crashes import (  # noqa: E402
    Recorded,
    differences,
    kill_states,
    look_at,
    record,
    try_kills,
    try_power,
    try_real,
    wrongs_of_run,
)
from shardwise.devices import count_cpus  # noqa: E402
from shardwise.run_dir.files import BEST, CHECKPOINTS, PARTIAL  # noqa: E402
from tests.harness.chaos import SUBJECT, words_for  # noqa: E402
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


def make_home(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "subject.py").write_text(SUBJECT.replace("WIDTH = 96", "WIDTH = 8") + MODULE)
    return folder


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
