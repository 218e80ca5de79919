"""docs/upstream.md: its programs show the symptoms in the installed versions, and its table is that of its entries.

`python -m tests.unit.test_upstream` writes the table anew.
"""

import ast
import importlib.util
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.patience import run_patiently
from tests.unit.private_names import NAMES, NEEDED_UNTIL, SEEN_IN

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "upstream.md"
TABLE = re.compile(r"(<!-- table: .*? -->\n).*?(<!-- end of the table -->)", re.DOTALL)
ENTRY = re.compile(
    r"Seen in: (?P<seen>[^\n]*?)\. Upstream: (?P<upstream>[^\n]*)\. Ours: (?P<ours>[^\n]*)\.\n\n"
    r"(?P<symptom>\S.*?)\n\n```python\n(?P<program>.*?)```\n\nProposed: (?P<proposed>.*?)\n(?=\n#|\Z)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Entry:
    title: str
    seen: str  # package and version, with commas between
    upstream: str
    ours: str  # modules that work around it
    program: str


def entries() -> list[Entry]:
    page = PAGE.read_text().partition("\n# Without a program")[0]
    found = []
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n\n")
        parts = ENTRY.match(text)
        assert parts, f"{title}: it needs Seen in, Upstream, Ours, the symptom, a program and Proposed, in this order"
        found.append(Entry(title, *parts.group("seen", "upstream", "ours", "program")))
    return found


def table() -> str:
    rows = ["| entry | seen in | upstream |", "|---|---|---|"]
    for entry in entries():
        anchor = re.sub(r"[^\w\- ]", "", entry.title.lower()).replace(" ", "-")
        link = re.search(r"\[\S+?\]\(\S+?\)", entry.upstream)
        state = "open" if ", open" in entry.upstream else "closed" if ", closed" in entry.upstream else "ready to file"
        rows.append(f"| [{entry.title}](#{anchor}) | {entry.seen} | {link[0] + ', ' if link else ''}{state} |")
    return "\n".join(rows) + "\n"


def is_there(program: str) -> bool:
    """Whether the packages that it imports are installed: DeepSpeed need not be."""
    imports = [node for node in ast.walk(ast.parse(program)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {str(getattr(node, "module", "") or node.names[0].name).partition(".")[0] for node in imports}
    names |= {"deepspeed"} if "DeepSpeedStrategy" in program else set()
    return all(map(importlib.util.find_spec, names))


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    folder = tmp_path_factory.mktemp("upstream")
    programs, results = folder / "programs.json", folder / "results.json"
    programs.write_text(json.dumps({entry.title: entry.program for entry in entries() if is_there(entry.program)}))
    done = run_patiently(
        [sys.executable, "-m", "tests.unit.upstream_programs", str(programs), str(results)], 120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str | None] = json.loads(results.read_text())
    return found


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.title)
def test_the_symptom_is_still_there(entry: Entry, errors: dict[str, str | None]) -> None:
    if entry.title not in errors:
        pytest.skip("its packages are not installed")
    if (error := errors[entry.title]) is not None:
        names = NEEDED_UNTIL.get(entry.title, "").split()
        mended = (
            f"upstream has mended «{entry.title}»: remove what works around it in {entry.ours}"
            f"{f' with the private names {names}' if names else ''}, and the entry"
        )
        broken = f"the program of «{entry.title}» fails in another way than by its assert: mend the program"
        pytest.fail(f"{mended if 'AssertionError' in error else broken}\n{error}", pytrace=False)


def test_the_entries_name_modules_of_ours_and_the_versions_that_are_pinned() -> None:
    for module in re.findall(r"`(shardwise\.[\w.]+)`", PAGE.read_text()):
        path = ROOT.joinpath("src", *module.split("."))
        assert path.with_suffix(".py").exists() or path.is_dir(), f"docs/upstream.md names {module}, which is not there"
    for package, version in re.findall(rf"\b({'|'.join(SEEN_IN)}) (\d+\.\d+\.\d+)", PAGE.read_text()):
        assert SEEN_IN[package] == version, (
            f"{package} is pinned to {SEEN_IN[package]}: run the programs, change the page"
        )
    assert all(re.match(rf"({'|'.join(SEEN_IN)}) \d", entry.seen) for entry in entries())
    titles = {entry.title for entry in entries()}
    assert len(titles) == len(entries()) and titles >= NEEDED_UNTIL.keys()
    assert NAMES.keys() >= {name for names in NEEDED_UNTIL.values() for name in names.split()}


def test_the_table_is_that_of_the_entries() -> None:
    found = TABLE.search(PAGE.read_text())
    assert found is not None
    assert found[0] == f"{found[1]}{table()}{found[2]}", "python -m tests.unit.test_upstream writes the table anew"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda found: f"{found[1]}{table()}{found[2]}", PAGE.read_text()))
