"""The example of docs/profiling.md: a run whose loader is slow, and the same with the word that mends it.

    python benchmarks/profile_example.py     half a minute on two CPU cores

Runs the page's commands in a folder of their own, keeps tables in benchmarks/results/profile-example-cpu.json and
pictures in docs/. `python benchmarks/report.py` then puts the tables into the page.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.pictures import shrink  # noqa: E402
from shardwise.run_dir.files import PROFILE_PICTURE, PROFILE_TABLE, profile_folder  # noqa: E402

PAGE = ROOT / "docs" / "profiling.md"


def main() -> None:
    options = results.command_line(__doc__, accelerator=None).parse_args()
    text = PAGE.read_text()
    [program] = re.findall(r"^```python\n# mine.py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^python (train\.py .* name=\w+ profile\.start=20.*)$", text, re.MULTILINE)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mine.py").write_text(program)
        for line in lines:
            rows.append(run(Path(folder), line))
    environment, device = results.measured_on("cpu", options.commit)
    content = {"environment": environment, "command": results.command(), "rows": rows}
    results.write(options.out / f"profile-example-{device}.json", content)


def run(folder: Path, line: str) -> dict[str, str]:
    """One command of the page: its name and the table that it printed. The picture goes into docs/, half as large."""
    words = shlex.split(line)
    [name] = [word.partition("=")[2] for word in words if word.startswith("name=")]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{folder}"}
    subprocess.run([sys.executable, str(ROOT / words[0]), *words[1:]], cwd=folder, env=environment, check=True)
    profile = profile_folder(folder / "runs" / name, 20)
    shrink(profile / PROFILE_PICTURE, ROOT / "docs" / f"profiling-{name}.png")
    return {"name": name, "table": (profile / PROFILE_TABLE).read_text()}


if __name__ == "__main__":
    main()
