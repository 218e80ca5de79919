"""`shardwise prepare` on much text: its rate beside the bare tokenizer's, and ten kills at random moments.

    python benchmarks/prepare.py --megabytes 1000 && python benchmarks/report.py

The text is Python source from this machine, again and again with its lines in another order, as JSON lines. It is
removed afterwards. Writes benchmarks/results/prepare-cpu-xN.json, N being the number of processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.harness.results import command, command_line, measured_on, write  # noqa: E402

VOCABULARY = 32768
LONGEST = 8000  # characters of a document


def main() -> None:
    parser = command_line(__doc__, accelerator=None)
    parser.add_argument("--megabytes", type=int, default=1000, help="of text, for the rate")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--kill-megabytes", type=int, default=60, help="of text, for the kills")
    options = parser.parse_args()
    environment, _ = measured_on("cpu", options.commit)
    result: dict[str, Any] = {"environment": environment, "command": command(), "processes": options.processes}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        words = [f"processes={options.processes}", "validation=0.001"]
        write_text(folder / "small.jsonl", options.kill_megabytes)
        small = [str(folder / "small.jsonl"), *words]
        prepare(folder / "trained", [*small, "tokenizer=train", f"vocab_size={VOCABULARY}"])
        tokenizer = f"tokenizer={folder / 'trained/tokenizer'}"
        if options.kills:
            prepare(folder / "undisturbed", [*small, tokenizer])
            result["kills"] = kills(folder, [*small, tokenizer], options.kills)
            write(options.out / f"prepare-cpu-x{options.processes}.json", result)
        if options.megabytes:
            write_text(folder / "text.jsonl", options.megabytes)
            result["rate"] = rate(folder, [str(folder / "text.jsonl"), tokenizer, *words])
    write(options.out / f"prepare-cpu-x{options.processes}.json", result)
    print(json.dumps({key: result.get(key) for key in ("kills", "rate")}, indent=1))


def write_text(path: Path, megabytes: int) -> None:
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for text in documents():
            file.write(json.dumps({"text": text}) + "\n")
            size += len(text.encode())
            if size >= megabytes * 1_000_000:
                return


def documents() -> Iterator[str]:
    """Pieces of *.py files; from the second round on with their lines in a random order."""
    chance = random.Random(0)
    folders = [Path(sysconfig.get_path(name)) for name in ("purelib", "stdlib")]
    paths = sorted({path for folder in folders for path in folder.rglob("*.py")})
    chance.shuffle(paths)
    for turn in range(1000):
        for path in paths:
            lines = path.read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True)
            if turn:
                chance.shuffle(lines)
            text = "".join(lines).replace("<|endoftext|>", "")
            pieces = (text[begin : begin + LONGEST] for begin in range(0, len(text), LONGEST))
            yield from (piece for piece in pieces if piece.strip())


def start(output: Path, words: list[str]) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/src"}
    line = [sys.executable, "-m", "shardwise", "prepare", *words, f"output={output}"]
    return subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True)


def prepare(output: Path, words: list[str]) -> str:
    process = start(output, words)
    said = process.communicate()[1]
    if process.returncode:
        sys.exit(f"exit code {process.returncode}\n{said}")
    return said


def kills(folder: Path, words: list[str], number: int) -> dict[str, Any]:
    """Killed at random moments: are all files those of an undisturbed run? Begun anew when it is complete before."""
    output, chance, expected = folder / "killed", random.Random(), digests(folder / "undisturbed")
    moments: list[float] = []
    resumed = complete = same = 0
    while len(moments) < number or not output.exists():
        if output.exists():
            shutil.rmtree(output)
        process = start(output, words)
        if len(moments) < number:
            moments.append(round(chance.uniform(1, 20), 1))
            time.sleep(moments[-1])
            process.send_signal(signal.SIGKILL)
        resumed += "goes on after" in process.communicate()[1]
        if output.exists():
            complete += 1
            same += digests(output) == expected
    return {"seconds": moments, "starts_that_went_on": resumed, "complete": complete, "same_bytes": same}


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.stem != "report")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def rate(folder: Path, words: list[str]) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    prepare(folder / "shards", words)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = json.loads((folder / "shards/report.json").read_text())
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    kept = ("documents", "tokens", "text_bytes", "vocab_size", "rate")
    return {key: report[key] for key in kept} | {"cpu_seconds": round(cpu, 1), "input_bytes": report["inputs"]["bytes"]}


if __name__ == "__main__":
    main()
