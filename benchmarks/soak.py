"""Ten thousand saves and some hundred restarts of one run, and what they leave behind: docs/reliability.md.

    python benchmarks/soak.py                                  half an hour on two cores
    python benchmarks/soak.py --saves 500 --restarts 5

A small model saves behind every step, on two ranks, asynchronously. A rank is killed now and then, and its launcher
starts the run again in place. What launcher and ranks hold is read after every hundredth save: memory, open files,
threads and processes, and what lies in /dev/shm, in the folder for temporary files and in the folder of checkpoints.
None of it may grow from the second tenth of the run to the last.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tqdm import tqdm  # noqa: E402

from benchmarks.harness import results  # noqa: E402
from tests.harness.chaos import make_subject, words_for  # noqa: E402
from tests.harness.commands import Running  # noqa: E402
from tests.harness.patience import exit_code  # noqa: E402

RANKS = 2
MIB = 2**20
# What may be more in the end than in the beginning: an allocator keeps some, and a save may be looked at while its
# threads write. What a save or a restart leaves behind would be hundreds by then
SLACK = {"launcher_mib": 4.0, "rank_mib": 30.0, "rank_threads": 2}


def held_by(pid: int) -> tuple[float, int, int]:
    """Resident memory in MiB, open files, threads."""
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) / 1024, len(list((folder / "fd").iterdir())), int(status["Threads"])


def look(running: Running, home: Path) -> dict[str, float] | None:
    """What the run holds; None while it restarts."""
    try:
        ranks, pids = running.ranks(), running.pids()
        launcher, files, _ = held_by(running.process.pid)
        of_ranks = [held_by(pid) for pid in ranks.values()]
        if len(of_ranks) < RANKS:
            return None
    except (OSError, KeyError):
        return None
    return {
        "launcher_mib": launcher, "launcher_files": files, "rank_mib": max(one[0] for one in of_ranks),
        "rank_files": max(one[1] for one in of_ranks), "rank_threads": max(one[2] for one in of_ranks),
        "processes": len(pids), "shared_memory_files": len(os.listdir("/dev/shm")),
        "temporary_files": len(list((home / "tmp").rglob("*"))),
        "names_of_checkpoints": len(os.listdir(home / "runs/soak/checkpoints")),
    }  # fmt: skip


def main() -> int:
    parser = results.command_line(__doc__, accelerator=None)
    parser.add_argument("--saves", type=int, default=10_000)
    parser.add_argument("--restarts", type=int, default=100)
    arguments = parser.parse_args()
    environment, _ = results.measured_on("cpu", arguments.commit)
    chance, seen = random.Random(0), []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        make_subject(home)
        (home / "tmp").mkdir()
        os.environ["TMPDIR"] = str(home / "tmp")
        words = [
            *words_for("fsdp", "cpu", RANKS, arguments.saves), "validate_every_n_steps=null", "checkpoint.monitor=null",
            "checkpoint.save_every_n_steps=1", "checkpoint.keep_last=2", "checkpoint.asynchronous=true",
            "checkpoint.when_busy=wait", f"max_restarts={arguments.restarts}", "name=soak",
        ]  # fmt: skip
        with Running(home, "soak", *words) as running, tqdm(total=arguments.saves, unit="save", disable=None) as bar:
            kills = sorted(chance.sample(range(20, arguments.saves), arguments.restarts))
            next_look = 20
            while running.process.poll() is None:
                found = re.findall(rb"^step (\d+)/\d", running.log.read_bytes()[-4000:], re.MULTILINE)
                step = int(found[-1]) if found else 0
                bar.update(step - bar.n)
                if kills and step >= kills[0] and len(ranks := running.ranks()) == RANKS:
                    kills.pop(0)
                    os.kill(chance.choice(list(ranks.values())), signal.SIGKILL)
                    time.sleep(1)
                elif step >= next_look and (held := look(running, home)):
                    seen.append({"step": step, **held})
                    next_look = step + arguments.saves // 100
                time.sleep(0.1)
            code = exit_code(running.process, 60)
            said = running.log.read_text()
    tenth = max(1, len(seen) // 10)
    grown = {}
    for key in seen[0].keys() - {"step"}:
        before, after = (median(one[key] for one in part) for part in (seen[tenth : 2 * tenth], seen[-tenth:]))
        grown[key] = {"second_tenth": before, "last_tenth": after, "flat": after <= before + SLACK.get(key, 0)}
    restarts = said.count("shardwise: restart ")
    result = {"command": results.command(), "environment": environment, "saves": arguments.saves, "exit_code": code,
              "restarts": restarts, "held": grown, "seen": seen}  # fmt: skip
    results.write(arguments.out / "soak-cpu-x2.json", result)
    for key, one in grown.items():
        print(f"{key}: {one['second_tenth']:.1f} → {one['last_tenth']:.1f}{'' if one['flat'] else '  grows'}")
    print(f"exit code {code}, {restarts} restarts")
    return int(code != 0 or not all(one["flat"] for one in grown.values()))


if __name__ == "__main__":
    sys.exit(main())
