"""Runs the commands of docs/your-own-text.md up to the generated text, as a reader would. Keeps what they print, the
samples and the picture: benchmarks/results/your-own-text-cpu.json and docs/your-own-text-loss.png.

    python benchmarks/your_own_text.py && python benchmarks/report.py
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.harness.results import command_line, measured_on, write  # noqa: E402

PAGE = ROOT / "docs" / "your-own-text.md"
PROGRAMS = {
    "python": [sys.executable],
    "shardwise": [sys.executable, "-m", "shardwise"],
}


def main() -> None:
    parser = command_line(__doc__, accelerator=None)
    parser.add_argument("--folder", type=Path, help="where the commands run; default: a new one, which is removed")
    options = parser.parse_args()
    environment, _ = measured_on("cpu", options.commit)
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        for steps in run_page(folder):
            result = {"environment": environment, "command": "python benchmarks/your_own_text.py", "steps": steps}
            keep(folder, result, options.out)


def keep(folder: Path, result: dict[str, Any], out: Path) -> None:
    """Keep what there is so far."""
    samples = folder / "runs/docstrings/samples.txt"
    result["samples"] = samples.read_text(encoding="utf-8") if samples.exists() else ""
    if (picture := folder / "runs/docstrings/loss.png").exists():
        shutil.copyfile(picture, ROOT / "docs/your-own-text-loss.png")
    write(out / "your-own-text-cpu.json", result)


def run_page(folder: Path) -> Iterator[list[dict[str, str]]]:
    """Run every command before `## Go on`; after each, yield what all have printed.

    What an earlier start in this folder has done is not done again.
    """
    kept = folder / "steps.json"
    text = PAGE.read_text(encoding="utf-8").partition("## Go on")[0]
    steps: list[dict[str, str]] = json.loads(kept.read_text()) if kept.exists() else []
    done = {step["line"] for step in steps}
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language == "python":
            (folder / block.partition("\n")[0].removeprefix("# ")).write_text(block)
        elif block.startswith(tuple(PROGRAMS)):
            for line in block.splitlines():
                if line not in done:
                    steps.append(run(folder, line))
                    write(kept, steps)
                yield steps


def run(folder: Path, line: str) -> dict[str, str]:
    print(f"$ {line}", flush=True)
    program, *words = shlex.split(line)
    words = [str(ROOT / word) if word == "train.py" else word for word in words]
    if "train.py" in line and (folder / "runs").exists():  # the run goes on as if it had not been stopped
        words.append("resume=auto")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    done = subprocess.run(
        [*PROGRAMS[program], *words], cwd=folder, env=environment, text=True, check=False, encoding="utf-8",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    print(done.stdout, flush=True)
    if done.returncode:
        sys.exit(f"exit code {done.returncode}")
    return {"line": line, "printed": done.stdout}


if __name__ == "__main__":
    main()
