"""The files of a run have their names from run_dir/files.py, which writes them whole or not at all."""

import ast
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.checkpoint.files import changed
from shardwise.checkpoint.publish import read_best, write_best
from shardwise.config.compose import compose
from shardwise.errors import ConfigError, DataError
from shardwise.plan import Host
from shardwise.plan.resolve import make_plan
from shardwise.run_dir import files
from shardwise.run_dir.checkpoints import damage
from shardwise.run_dir.events import has_begun, read_events
from shardwise.run_dir.files import lines_of, read_json, read_text
from shardwise.run_dir.resume import choose_again, find_checkpoint, resolve_resume, resumption
from shardwise_tools.bench_data import appetite_of
from shardwise_tools.prepare.work import begin_or_go_on
from shardwise_tools.traces import read_trace
from tests.harness.rooms import MODULES, tree_of
from tests.harness.run_folder import ODD

RUN = Path("run")
MADE = [
    files.checkpoint_path(RUN, 1), files.best_checkpoint_path(RUN, 1), files.rank_state(RUN, 1),
    files.rank_log(RUN, 1), files.hang_report(RUN, 1), files.nccl_trace(RUN, 1), files.nccl_trace(RUN),
    files.memory_snapshot(RUN, 1),
]  # fmt: skip
NAMES = {value for name, value in vars(files).items() if name[0] != "_" and name.isupper() and isinstance(value, str)}
NAMES |= {re.sub(r"\d+", "*", path.name) for path in MADE} | {"*.json"}  # what `stage_results` makes
# These give a whole folder its name, which is theirs.
PUBLISHES_FOLDERS = {"shardwise.checkpoint.publish", "shardwise_tools.export",
                     "shardwise.run_dir.checkpoints",
                     "shardwise.data.tokens"}  # fmt: skip


def text_of(node: ast.AST) -> str | None:
    """A string of the code, with `*` for what is filled in; None: no string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    return None


def names_in(tree: ast.AST) -> Iterator[str]:
    """Names of a run's files that stand in a string; what has a space is a sentence, for a reader."""
    for node in ast.walk(tree):
        if (text := text_of(node)) is not None and not re.search(r"\s", text):
            parts = text.split("/")
            yield from (part for part in parts if part in NAMES or part.endswith((files.PARTIAL, ".tmp")))


def renames_in(tree: ast.AST) -> Iterator[int]:
    """Lines in which a file is renamed."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("replace", "rename")
        ):
            is_of_os = ast.unparse(node.func.value) == "os"
            takes_a_path = len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.DictComp)
            if is_of_os or takes_a_path:
                yield node.lineno


def test_a_runs_files_are_named_and_renamed_in_one_file() -> None:
    for module in MODULES.keys() - {"shardwise.run_dir.files"}:
        tree = tree_of(MODULES[module])
        found = sorted(names_in(tree))
        assert not found, f"{module} names {', '.join(found)}: the names of a run's files are in run_dir/files.py"
        lines = list(renames_in(tree))
        assert not lines or module in PUBLISHES_FOLDERS, (
            f"{module}, lines {lines}: renames a file; write_whole and put_in_place of run_dir/files.py do"
        )


def test_the_reader_sees_names_and_renames() -> None:
    code = """
path = folder / "metrics.csv"
trace = f"{run_dir}/logs/nccl-trace-rank-{rank}"
beside = path.with_suffix(".partial")
beside.replace(path)
os.replace(beside, path)
said = f"look at {folder}/metrics.csv, or at plan.json".replace("a", "b")
"""
    assert {"metrics.csv", "logs", "nccl-trace-rank-*", ".partial"} <= set(names_in(ast.parse(code)))
    assert "plan.json" not in names_in(ast.parse(code))
    assert list(renames_in(ast.parse(code))) == [5, 6]


@pytest.mark.parametrize("content", ["a line\r\n", b"\0bytes"])
def test_a_file_is_written_whole(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_text("before, and longer than what comes")
    files.write_whole(path, content)
    assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    taken = tmp_path / "plan.json"
    taken.mkdir()
    with pytest.raises(OSError):
        files.write_whole(taken, "a plan")
    assert taken.is_dir() and [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def _best(checkpoint: object) -> bytes:
    return json.dumps({"checkpoint": checkpoint, "monitor": "loss", "score": 1.0}).encode()


@pytest.mark.parametrize("damaged", [b'{"checkp', b"[]", b"{}", b"\xff\0", b"", b"[" * 100_000, _best("{folder}/kept"),
                                     _best(""), _best("."), _best("../kept"), _best("kept"), _best(1),
                                     _best("a/step-00000001.ckpt")])  # fmt: skip
def test_a_damaged_best_json_is_kept_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: bytes
) -> None:
    damaged = damaged.replace(b"{folder}", str(tmp_path).encode())
    tmp_path /= files.CHECKPOINTS
    for kept in (tmp_path, tmp_path / "kept", tmp_path.parent / "kept", tmp_path / "a" / "step-00000001.ckpt"):
        kept.mkdir(parents=True)  # what is named there is removed when a better checkpoint comes
    place, best = tmp_path / files.BEST, tmp_path / "best-00000004.ckpt"
    assert read_best(tmp_path, "loss", keeps=True) == (None, None) and capsys.readouterr().out == ""
    for number in (1, 2):
        place.write_bytes(damaged)
        assert read_best(tmp_path, "loss") == (None, None) and place.exists()
        with pytest.raises(ConfigError, match=r"resume=best: .*best.json does not name a checkpoint that is whole"):
            resolve_resume("best", tmp_path.parent, "test")
        assert read_best(tmp_path, "loss", keeps=True) == (None, None) and not place.exists()
        assert (tmp_path / f"best-{number}.json").read_bytes() == damaged
        said = capsys.readouterr().out
        assert f"{place} does not say which checkpoint is the best" in said and f"kept as best-{number}.json" in said
    best.mkdir()
    write_best(best, "loss", 0.5)
    assert read_best(tmp_path, "loss", keeps=True) == (0.5, str(best))
    assert read_best(tmp_path, "another", keeps=True) == (None, None) and place.exists()


def test_a_run_goes_on_from_what_was_saved_while_it_started(tmp_path: Path) -> None:
    """Between its choice and its lock on the folder, the process that it takes over from may save once more."""

    def save(step: int) -> str:
        (folder := files.checkpoint_path(tmp_path / "run", step)).mkdir(parents=True)
        (folder / files.MANIFEST).write_text(json.dumps({"files": {}, "format": 2}))
        return str(folder)

    host, first = Host(cuda_devices=0), save(4)
    words = [f"runs_dir={tmp_path}", "name=run", "accelerator=cpu"]
    newest, named = (
        find_checkpoint(make_plan(compose([*words, f"resume={resume}"]).jobs[0].config, host), host)
        for resume in ("auto", first)
    )
    assert newest.resume == named.resume == first and choose_again(newest) == newest
    second = save(8)
    assert choose_again(newest).resume == second and choose_again(named).resume == first


def test_the_best_checkpoint_is_never_guessed(tmp_path: Path) -> None:
    """The newest is taken where the run kept no best one, and a line says so."""
    for name in ("step-00000004", "step-00000008"):
        (folder := tmp_path / files.CHECKPOINTS / f"{name}.ckpt").mkdir(parents=True)
        (folder / files.MANIFEST).write_text(json.dumps({"files": {}, "format": 2}))
    with pytest.raises(ConfigError, match="holds checkpoints, and no word asks for one: give resume=best"):
        resolve_resume(None, tmp_path, "test")
    newest = resolve_resume("best", tmp_path, "test")
    assert newest == str(files.checkpoint_path(tmp_path, 8))
    plan: Any = SimpleNamespace(resume=newest, run_dir=str(tmp_path), stage="test", init_from=None)
    [told] = resumption(plan, "best")
    assert told.startswith(f"{tmp_path} has kept no best checkpoint: step-00000008.ckpt is its newest; ")
    assert resumption(plan, "auto") == []
    files.best_checkpoint_path(tmp_path, 4).mkdir()
    with pytest.raises(ConfigError) as refused:
        resolve_resume("best", tmp_path, "test")
    assert str(refused.value) == (
        f"resume=best: there is no {tmp_path / files.CHECKPOINTS / files.BEST}, which names the best checkpoint; give "
        f"one by resume=PATH: best-00000004.ckpt, step-00000004.ckpt, step-00000008.ckpt"
    )


@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname", "", "."])
def test_a_manifest_names_nothing_outside_of_its_checkpoint(tmp_path: Path, name: str) -> None:
    checkpoint = tmp_path / files.CHECKPOINTS / "step-00000001.ckpt"
    checkpoint.mkdir(parents=True)
    (tmp_path / "secret").write_text("x")
    size = (checkpoint / name).stat().st_size
    manifest = {"format": 2, "files": {name: {"bytes": size, "sha256": "0"}}}
    (checkpoint / files.MANIFEST).write_text(json.dumps(manifest))
    found = damage(checkpoint)
    assert found is not None and found.startswith("manifest.json cannot be read (") and repr(name) in found
    assert found == changed(checkpoint)


@pytest.mark.parametrize("odd", ["device", "pipe", "folder", "sparse", "deep"])
def test_what_lies_in_place_of_a_file_is_not_waited_for(tmp_path: Path, odd: str) -> None:
    path = tmp_path / "file.json"
    if odd == "device":
        path.symlink_to("/dev/zero")
    elif odd == "pipe":
        os.mkfifo(path)
    elif odd == "sparse":
        with path.open("wb") as file:
            file.truncate(2**40)
    elif odd == "deep":
        path.write_text("[" * 200_000)
    else:
        path.mkdir()
    with pytest.raises((OSError, ValueError)):
        read_json(path)
    if odd != "deep":
        with pytest.raises(OSError):
            read_text(path)
    if odd == "sparse":
        assert list(lines_of(path)) == []


@pytest.mark.parametrize("odd", ODD)
def test_no_tool_waits_for_a_file_of_others(
    tmp_path: Path, odd: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of prepare, bench-data, profile, a job's folder, and events, which are left out with a word."""
    for name in ("summary.json", "state.json", "identity.json", "rank-0.json.gz", "begun", files.EVENTS):
        ODD[odd](tmp_path / name)
    with pytest.raises(ConfigError, match="does not say how fast it was"):
        appetite_of(tmp_path)
    with pytest.raises(DataError, match="rank-0.json.gz cannot be read"):
        read_trace(tmp_path / "rank-0.json.gz")
    with pytest.raises(DataError, match="identity.json cannot be read .*: remove .* to begin anew"):
        begin_or_go_on(tmp_path, {}, [])
    monkeypatch.setenv("SHARDWISE_JOB_DIR", str(tmp_path))
    assert not has_begun("run")
    assert read_events(tmp_path) == [] and f"{files.EVENTS} is not read: it " in capsys.readouterr().err
