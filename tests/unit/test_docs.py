"""What the pages show works: every command can be composed, and the examples of docs/data.md train."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from shardwise.config.compose import compose
from tests.harness.commands import environment, run
from tests.harness.patience import run_patiently

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("recipes/**/*.md")),
         *sorted(ROOT.glob("slurm/**/*.md"))]  # fmt: skip
OF_SUBMIT = ("nodes=", "time=", "follow=", "partition=", "account=", "qos=", "job_name=", "array_limit=", "container=")


def blocks(page: Path, language: str = "") -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for kind, text in fences if kind == language]


def commands() -> list[tuple[str, str]]:
    """(page, what follows train.py, a template or submit) of every command that is written out in full."""
    found = []
    for page in PAGES:
        for line in "".join(blocks(page)).replace("\\\n", " ").splitlines():
            if not re.match(r"(\S*=\S* )*(sudo )?(python|torchrun|sbatch|shardwise submit) ", line):
                continue
            words = shlex.split(line, comments=True)
            start = next((n for n, w in enumerate(words) if w.endswith(("train.py", ".sbatch")) or w == "submit"), None)
            if start is None or "…" in " ".join(words):
                continue
            rest = [word for word in words[start + 1 :] if words[start] != "submit" or not word.startswith(OF_SUBMIT)]
            found.append((str(page.relative_to(ROOT)), shlex.join(rest)))
    return found


@pytest.mark.parametrize(("page", "line"), commands())
def test_a_command_of_the_docs_can_be_composed(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    argv = [word for word in shlex.split(line) if word not in ("--config-dir", "conf", "recipe=mine", "--dry-run")]
    assert compose(argv).jobs or "--help" in argv, page


def test_there_are_commands_to_look_at() -> None:
    assert len(commands()) > 30 and {page for page, _ in commands()} >= {"README.md", "docs/data.md", "docs/slurm.md"}


def test_the_pages_link_to_what_is_there() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http|#)([^)#\s]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_the_examples_of_own_data_train(tmp_path: Path) -> None:
    """The page's own files, and its own commands on them."""
    page = ROOT / "docs/data.md"
    for block in blocks(page, "python"):
        (tmp_path / block.partition("\n")[0].removeprefix("# ")).write_text(block)
    (tmp_path / "texts").mkdir()
    for number in range(40):
        (tmp_path / f"texts/{number}.txt").write_text(f"{number}: a text that is long enough for some sequences. " * 40)
    starts = ("python ", "shardwise ")
    lines = [line for block in blocks(page) for line in block.splitlines() if line.startswith(starts)]
    ours = [line for line in lines if "/data/" not in line and "books" not in line]
    assert len(ours) == 10, ours
    path = f"{ROOT}/src:{tmp_path}"
    for line in ours:
        words = shlex.split(line.replace("/path/to/shardwise", str(ROOT)))
        small = ["accelerator=cpu", "model.dim=32", "model.n_layers=1", "module.sample_tokens=0"]
        more = small[: 1 if "recipe=custom" in line else 4]
        if words[1] == str(ROOT / "train.py"):
            done = run(tmp_path, *words[2:], *more, PYTHONPATH=path)
        else:
            words[:1] = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "shardwise"]
            done = run_patiently(words, 120, cwd=tmp_path, env=environment(PYTHONPATH=path))
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert (tmp_path / "tokens/index.json").is_file() and len(list((tmp_path / "runs").iterdir())) == 8
