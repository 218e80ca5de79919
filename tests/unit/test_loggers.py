"""metrics.csv loses nothing and repeats nothing; the real TensorBoard and W&B clients record what was asked for."""

from __future__ import annotations

import csv
import errno
import json
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest

from shardwise.metrics.loggers import CsvLogger
from shardwise.metrics.meter import Meter, RanksCsv
from shardwise.process import report
from shardwise.run_dir.checkpoints import was_trained
from shardwise.run_dir.files import rank_log, read_rows
from tests.harness.commands import RECIPE, check, make_home, run


def test_a_new_metric_gets_a_column(tmp_path: Path) -> None:
    logger = CsvLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, 1)
    logger.log_metrics({"b": 2.0, "a": 3.0}, 2)
    logger.log_metrics({"b": 4.0}, 3)
    assert (tmp_path / "metrics.csv").read_text() == "step,a,b\n1,1.0,\n2,3.0,2.0\n3,,4.0\n"


@contextmanager
def room_for(path: Path, more: int) -> Iterator[None]:
    """No file may have more than so many bytes beyond those of `path`, as on a disk that is nearly full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_rows_that_find_no_room_are_written_when_there_is_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_room, without = CsvLogger(tmp_path / "with"), CsvLogger(tmp_path / "without")
    rows = {1: {"a": 1.0}, 2: {"a": 2.0}, 3: {"a": 3.0, "new": 1.0}, 4: {"a": 4.0}, 5: {"a": 5.0}}
    for logger in (with_room, without):
        logger.path.parent.mkdir()
        for step, row in rows.items():
            full = logger is without and step in (2, 3)
            with room_for(logger.path, 3) if full else nullcontext():  # a part of the row finds room
                logger.log_row(row, step)
                logger.log_metrics({"validation": step / 2}, step)
    assert without.path.read_text() == with_room.path.read_text() and len(read_rows(without.path)) == 5
    assert capsys.readouterr().err.count("could not be written: File too large; the row is kept until it can be") == 1


@pytest.mark.usefixtures("capsys")
def test_no_row_comes_before_one_that_could_not_be_written(tmp_path: Path) -> None:
    logger, real = CsvLogger(tmp_path), CsvLogger._append_row
    errors = [OSError(errno.EIO, "bad"), OSError(errno.EIO, "bad"), None, OSError(errno.EIO, "bad")]

    def bad(self: CsvLogger, metrics: Any, step: int) -> None:
        if errors and (error := errors.pop(0)) is not None:
            raise error
        real(self, metrics, step)

    with patch.object(CsvLogger, "_append_row", bad):
        for step in (1, 2, 3, 4):
            logger.log_row({"a": float(step)}, step)
    assert [row["step"] for row in read_rows(logger.path)] == ["1", "2", "3", "4"]


@pytest.mark.usefixtures("capsys")
def test_a_row_that_the_second_try_wrote_is_not_written_twice(tmp_path: Path) -> None:
    """Closing a file tries once more to write what could not be written, and raises the first error all the same."""
    errors, real = iter([OSError(errno.EIO, "Input/output error")]), Path.open

    @contextmanager
    def once_bad(path: Path, *words: Any, **more: Any) -> Iterator[Any]:
        with real(path, *words, **more) as file:
            yield file
        if words == ("r+",) and (error := next(errors, None)):
            raise error

    logger = CsvLogger(tmp_path)
    with patch.object(Path, "open", once_bad):
        for step in (1, 2):
            logger.log_row({"a": step / 2}, step)
    assert logger.path.read_text() == "step,a\n1,0.5\n2,1.0\n"


def test_ranks_whose_row_finds_no_room_lack_that_step_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = RanksCsv(tmp_path)
    for step in (1, 2, 3):
        with room_for(ranks.path, 30) if step == 2 else nullcontext():  # a part of a row finds room
            ranks.append(step, {"a": [0.125, 0.25]})
    assert [(row["step"], row["rank"], row["a"]) for row in read_rows(ranks.path)] == [
        ("1", "0", "0.125"), ("1", "1", "0.25"), ("3", "0", "0.125"), ("3", "1", "0.25"),
    ]  # fmt: skip
    assert "ranks.csv lacks step 2: it could not be written: File too large" in capsys.readouterr().err


def test_a_log_that_finds_no_room_ends_no_run_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Watchdog", "faulthandler"):
        monkeypatch.setattr(report, name, MagicMock())
    log = rank_log(tmp_path, 0)
    log.parent.mkdir()
    log.touch()
    plan: Any = SimpleNamespace(run_dir=str(tmp_path), topology=SimpleNamespace(world_size=1), strategy=MagicMock())
    with room_for(log, 3):
        report.keep_log(plan, lambda code, text: None)
    stream = report.faulthandler.enable.call_args.args[0]  # type: ignore[attr-defined]
    stream.write("second\n")
    stream.close()
    assert log.read_text().endswith("second\n")


@pytest.mark.usefixtures("capsys")  # what is said then is in no file
def test_no_room_for_the_validation_of_a_step_loses_no_step(tmp_path: Path) -> None:
    logger = CsvLogger(tmp_path)
    logger.log_row({"a": 1.0}, 1)
    logger.log_metrics({"validation": 0.5}, 1)
    logger.log_row({"a": 2.0}, 2)
    with room_for(logger.path, 1):
        logger.log_metrics({"validation": 0.123456789}, 2)
    logger.log_row({"a": 3.0}, 3)
    assert [(row["a"], row["validation"]) for row in read_rows(logger.path)] == [
        ("1.0", "0.5"), ("2.0", "0.123456789"), ("3.0", ""),
    ]  # fmt: skip


@pytest.mark.parametrize(("header", "step", "why"), [
    ("Step,a", 2, "has no column named step"),  # a spreadsheet may have changed it
    ("\xff\xd9\0", 2, "has no column named step"),  # no text
    ("step,a", 0, "is of a start that left no checkpoint"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["metrics.csv", "ranks.csv"])
def test_rows_that_a_run_does_not_go_on_with_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, header: str, step: int, why: str
) -> None:
    path, text = tmp_path / name, f"{header}\n1,1.0\n2,2.0\n".encode("latin-1")
    path.write_bytes(text)
    Meter(SimpleNamespace(run_dir=str(tmp_path))).on_start()  # type: ignore[arg-type] # this reads it first
    assert was_trained(tmp_path) == (name == "metrics.csv")  # and the launcher has read it before
    (CsvLogger(tmp_path) if name == "metrics.csv" else RanksCsv(tmp_path)).rewind(step)
    kept = path.with_stem(f"{path.stem}-1")
    assert kept.read_bytes() == text and not path.exists()
    assert f"{path} {why}: a new one begins, and it is kept as {kept.name}" in capsys.readouterr().out


def test_rows_that_are_no_text_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_bytes(b"step,a\n1,1.0\n2,\xff2.0\n\xd9\0\n3,3.0\n")
    CsvLogger(tmp_path).rewind(3)
    assert (tmp_path / "metrics.csv").read_text() == "step,a\n1,1.0\n3,3.0\n"


@pytest.mark.parametrize("damaged", [b"{", b"\xff\0"])
def test_a_damaged_record_of_starts_ends_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: bytes
) -> None:
    starts = tmp_path / "starts.json"
    starts.write_bytes(damaged)
    meter = Meter(SimpleNamespace(run_dir=str(tmp_path)))  # type: ignore[arg-type]
    meter.on_start()
    assert json.loads(starts.read_text()) == [meter.started]
    assert (tmp_path / "starts-1.json").read_bytes() == damaged
    assert f"{starts} cannot be read: goodput counts from this start, and it is kept as" in capsys.readouterr().out


def test_what_follows_upon_a_step_goes_into_its_row(tmp_path: Path) -> None:
    def rows() -> list[tuple[str, ...]]:
        return [tuple(row.get(key, "") for key in ("step", "loss", "validation", "b")) for row in read_rows(path)]

    path, logger = tmp_path / "metrics.csv", CsvLogger(tmp_path)
    for metrics, step in (
        ({"loss": 1.0, "epoch": 0}, 1),
        ({"loss": 2.0, "epoch": 0}, 2),
        ({"validation": 3.0, "epoch": 0}, 2),
    ):
        logger.log_metrics(metrics, step)
    assert rows() == [("1", "1.0", "", ""), ("2", "2.0", "3.0", "")]
    logger.log_metrics({"b": 5.0}, 2)  # with a new column
    logger.log_metrics({"b": 6.0}, 2)  # and once more: nothing is written over
    logger.log_metrics({"loss": 7.0}, 3)
    again = CsvLogger(tmp_path)
    again.rewind(3)
    again.log_metrics({"validation": 8.0}, 3)
    again.log_metrics({"loss": 9.0}, 4)
    assert rows()[1:] == [
        ("2", "2.0", "3.0", "5.0"), ("2", "", "", "6.0"), ("3", "7.0", "8.0", ""), ("4", "9.0", "", ""),
    ]  # fmt: skip
    logger = CsvLogger(tmp_path)
    logger.log_metrics({"loss": 10.0, "validation": 1.0, "b": 2.0, "epoch": 1}, 5)
    logger.log_metrics({"validation": 11.0}, 5)
    assert len(rows()) == 7


def test_a_run_goes_on_after_a_power_failure_has_left_zeros_in_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"step,a\n1,1.0\n" + b"\0" * 200_000 + b"\n2\r2.0\n3,3.0\n" + b"\0" * 5000)
    again = CsvLogger(tmp_path)
    again.rewind(3)
    again.log_metrics({"a": 4.0}, 4)
    assert [row["a"] for row in read_rows(path)] == ["1.0", "3.0", "4.0"]


def test_another_process_goes_on_in_the_same_file(tmp_path: Path) -> None:
    CsvLogger(tmp_path).log_metrics({"a": 1.0}, 1)
    CsvLogger(tmp_path).log_metrics({"a": 2.0, "b": 3.0}, 2)
    assert read_rows(tmp_path / "metrics.csv") == [
        {"step": "1", "a": "1.0", "b": ""}, {"step": "2", "a": "2.0", "b": "3.0"},
    ]  # fmt: skip


def test_every_row_is_on_disk_at_once_and_a_torn_one_is_left_out(tmp_path: Path) -> None:
    logger = CsvLogger(tmp_path)
    for step in range(1, 5):
        logger.log_metrics({"a": float(step)}, step)
        assert len(read_rows(tmp_path / "metrics.csv")) == step
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("1")  # of 10, say
    again = CsvLogger(tmp_path)
    again.rewind(4)
    again.log_metrics({"a": 5.5}, 5)
    assert [row["a"] for row in read_rows(tmp_path / "metrics.csv")] == ["1.0", "2.0", "3.0", "4.0", "5.5"]


@pytest.mark.parametrize(("step", "left"), [(9, [1, 2, 3]), (2, [1, 2]), (0, [])])
def test_rewind_forgets_later_steps(tmp_path: Path, step: int, left: list[int]) -> None:
    logger = CsvLogger(tmp_path)
    for number in (1, 2, 3):
        logger.log_metrics({"a": 0.0}, number)
    logger.rewind(step)
    assert [int(row["step"]) for row in read_rows(tmp_path / "metrics.csv")] == left
    CsvLogger(tmp_path).log_metrics({"a": 0.0}, 10)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [*left, 10]


@pytest.mark.parametrize("logger", ["tensorboard", "wandb"])
def test_the_real_client(tmp_path: Path, logger: str) -> None:
    """A key but no server: W&B goes offline by itself. All is in the run's folder, without the key."""
    home = make_home(tmp_path / "home")
    words = [*RECIPE, "max_steps=2", "validate_every_n_steps=2", "checkpoint=none", f"logger={logger}", "name=logged"]
    secret = "0123456789abcdef0123456789abcdef01234567"
    done = check(run(home, *words, HOME=str(tmp_path), WANDB_API_KEY=secret, WANDB_BASE_URL="http://127.0.0.1:9"))
    assert done.stderr == ""
    assert {path.name for path in home.iterdir()} == {"mine.py", "shards", "runs"}
    run_dir = home / "runs" / "logged"
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert not [path for path in files if secret.encode() in path.read_bytes()]
    if logger == "tensorboard":
        (events,) = (run_dir / "tensorboard").glob("events.out.tfevents.*")
        assert b"train/loss" in events.read_bytes()
        return
    (record,) = run_dir.glob("wandb/offline-run-*-logged/run-logged.wandb")
    assert f"to upload it: wandb sync {run_dir}/wandb/offline-run-*" in done.stdout
    content = record.read_bytes()
    assert b"train/loss" in content and b"validation/loss" in content
    plan = json.loads((run_dir / "plan.json").read_text())
    environment = json.loads((run_dir / "environment.json").read_text())
    for value in ("global_batch_size", plan["run_dir"], "packages", environment["platform"]):
        assert re.search(re.escape(value.encode()), content), value


def history(record: Path) -> list[dict[str, str]]:
    """What was logged, of a .wandb file."""
    return [
        {item.key or ".".join(item.nested_key): item.value_json for item in found.history.item}
        for found in records(record)
        if found.HasField("history")
    ]


def records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format, a protobuf a record."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, whole = file.read_bytes(), b""
    at = 7  # after the file's header
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # a block's end is padded
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(whole)
            whole = b""


def test_wandb_has_every_step_once_over_restarts(tmp_path: Path) -> None:
    """The first process ends at step 7, and its last checkpoint is of step 4."""
    home = make_home(tmp_path / "home")
    words = [*RECIPE, "logger=wandb", "logger.mode=offline", "name=tracked", "checkpoint.save_every_n_steps=4",
             "checkpoint.save_at_end=false", "validate_every_n_steps=2", "checkpoint.monitor=null"]  # fmt: skip
    for steps in (7, 9):
        check(run(home, *words, f"max_steps={steps}", "resume=auto", HOME=str(tmp_path)))
    records = sorted((home / "runs" / "tracked").glob("wandb/offline-run-*-tracked/run-tracked.wandb"))
    assert len(records) == 2
    rows = [row for record in records for row in history(record)]
    for key, expected in (("train/loss", range(1, 10)), ("validation/loss", range(2, 9, 2))):
        assert [int(row["trainer/global_step"]) for row in rows if key in row] == list(expected), key
