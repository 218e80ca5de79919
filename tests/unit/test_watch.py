"""`shardwise watch`: what it reads of files that grow, what it says of a run, and how it ends."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

import shardwise_tools
from shardwise.metrics.verdicts import BUSY, COMPUTE, DATA_WAIT, SECONDS
from shardwise.run_dir import events, files
from shardwise.run_dir.events import this_machine
from shardwise_tools.viewer.chart import series_of
from shardwise_tools.viewer.record import FollowedFile, Table, read_run
from shardwise_tools.viewer.report import make_report
from shardwise_tools.viewer.state import duration, lock_holder, state_of
from shardwise_tools.viewer.watch import Watch, panel, sparkline
from tests.harness.commands import environment
from tests.harness.patience import Patience, exit_code, wait_until
from tests.harness.run_folder import DAMAGED, ODD, make_run

ROOT = Path(__file__).resolve().parents[2]
WATCH = [sys.executable, "-m", "shardwise", "watch"]


def said(folder: Path) -> dict[str, str]:
    return {line.label: line.text for line in Watch(folder).lines()}


def append_event(folder: Path, kind: str, **data: object) -> None:
    with (folder / files.EVENTS).open("a") as file:
        file.write(json.dumps({"time": time.time(), "kind": kind, "step": None, "text": kind, "data": data}) + "\n")


def running(folder: Path, **more: int) -> Path:
    """A run of another machine that has just written its files."""
    return make_run(folder, ends=None, machine={"host": "elsewhere"}, **more)


def test_a_file_that_grows_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / files.METRICS
    table, file = Table(path), FollowedFile(path)
    assert not table.poll() and file.poll()[0] is False
    path.write_text("step,a,b\n" + "".join(f"{step},{step}.5,\n" for step in range(1, 1001)) + "1001,9")
    assert table.poll() and (table.step, table.last) == (1000, {"a": 1000.5})
    is_new, lines = file.poll()
    assert is_new and len(list(lines)) == 1001
    assert not table.poll()
    with path.open("r+") as writer:  # the row that was cut is whole now, and another one begins
        writer.seek(0, os.SEEK_END)
        writer.write(".5,\n1002,")
    is_new, lines = file.poll()
    assert (is_new, list(lines)) == (False, ["1001,9.5,\n"])
    assert table.poll() and len(table.series["a"].steps) == 1001 and table.last["a"] == 9.5
    # A validation comes into the row of its step: the last row is replaced by a longer one
    path.write_text("step,a,b\n1,1,\n2,2,\n")
    table.poll()
    with path.open("r+") as writer:
        writer.seek(len("step,a,b\n1,1,\n"))
        writer.write("2,2,7.25\n3,3,\n")
    assert table.poll()
    assert list(table.series["a"].steps) == [1, 2, 3] and dict(zip(*_points(table, "b"), strict=True)) == {2: 7.25}
    # A run that goes on from a checkpoint writes its rows anew, and a new column makes a new file
    files.write_whole(path, "step,c,a\n1,5,1\n")
    assert table.poll() and table.step == 1 and table.last == {"c": 5.0, "a": 1.0}
    path.unlink()
    assert table.poll() and not table.series


def _points(table: Table, name: str) -> tuple[list[int], list[float]]:
    return list(table.series[name].steps), list(table.series[name].values)


def test_the_slowest_rank_is_the_one_farthest_above_the_median_by_the_columns_of_verdicts(tmp_path: Path) -> None:
    folder = running(tmp_path / "run")

    def slowest(accelerator: str, *ranks: tuple[float, float, float]) -> str | None:
        """`ranks`: of each, the share of waiting for data, the host's seconds and those of computing in a step of 2."""
        plan = json.loads((folder / files.PLAN).read_text()) | {"accelerator": accelerator}
        (folder / files.PLAN).write_text(json.dumps(plan))
        rows = [f"9,1.0,{rank},{wait},2.0,{host},{compute}" for rank, (wait, host, compute) in enumerate(ranks)]
        names = ["step", "time", "rank", DATA_WAIT, SECONDS, BUSY, COMPUTE]
        (folder / files.RANKS).write_text("\n".join([",".join(names), *rows, ""]))
        return said(folder).get("slowest rank")

    assert (
        slowest("cuda", (0.01, 1.9, 0.5), (0.3, 1.9, 0.6))
        == "rank 1 waits for data 30.0% of the time, the median is 15.5%"
    )
    assert slowest("cuda", (0.0, 1.2, 0.5), (0.1, 0.2, 1.5)) == "rank 1: step compute seconds 1.5, the median is 1"
    assert slowest("cpu", (0.0, 1.9, 0.5), (0.1, 0.1, 1.0)) == "rank 0: step host seconds 1.9, the median is 1"
    assert slowest("cpu", (0.0, 1.0, 0.5), (0.0, 1.0, 0.51)) is None


def test_what_a_run_is_doing(tmp_path: Path) -> None:
    folder = running(tmp_path / "run", steps=1000)
    plan = json.loads((folder / files.PLAN).read_text()) | {"max_steps": 4000}
    (folder / files.PLAN).write_text(json.dumps(plan))
    lines = said(folder)
    assert lines["state"].startswith("running, wrote ") and lines["state"].endswith(" s ago")
    assert re.fullmatch(r"1,000 of 4,000 \(25%\), 5 min( \d+ s)? to go", lines["step"])
    assert re.fullmatch(r"[\d.]+  [▁▂▃▄▅▆▇█]{40}", lines["loss"]) and "validation loss" in lines
    assert lines["MFU"] == "41.0%" and lines["memory"] == "at most 60.0 GiB allocated, 70.5 GiB reserved"
    assert re.fullmatch(r"rank \d waits for data [\d.]+% of the time, the median is [\d.]+%", lines["slowest rank"])
    assert re.fullmatch(r"[\d.]+  \([\d.]+ to [\d.]+\)", lines["GPU power watts"])
    assert lines["verdict"].startswith("step 500: data-bound: rank 1 waits 12 % of the time")
    assert lines["checkpoint"] == "step 1,000; 2 checkpoints kept"
    assert lines["restart"].startswith("restart 1 of 2") and "error" not in lines  # that of the start before
    assert sparkline(series_of([(1, 0.0), (2, 7.0), (3, float("nan"))])) == "▁█" and sparkline(series_of([])) == ""
    assert [duration(s) for s in (0, 59, 200, 18_600, 183_600)] == [
        "0 s",
        "59 s",
        "3 min 20 s",
        "5 h 10 min",
        "2 d 3 h",
    ]


def test_a_folders_lock_tells_that_a_run_is_alive(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ends=None, machine=this_machine())
    assert state_of(read_run(folder)).name == "died"
    program = "import sys; from pathlib import Path; from shardwise.run_dir.files import lock_run_dir\n"
    program += "print(lock_run_dir(Path(sys.argv[1]), 'fit', is_requeued=False), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          env=environment(PYTHONPATH=str(ROOT / "src"))) as holder:  # fmt: skip
        assert holder.stdout is not None and holder.stdout.readline() == b"True\n"
        assert lock_holder(folder) == holder.pid
        assert state_of(read_run(folder)).name == "running"
        append_event(folder, "end", exit_code=0)  # its launcher holds the lock while it writes the report
        assert state_of(read_run(folder)).name == "ended"
        holder.kill()
    assert lock_holder(folder) is None


@pytest.mark.parametrize("how", ["missing", "cut", "garbage", "holes", *ODD])
def test_any_file_may_be_missing_or_cut(tmp_path: Path, how: str) -> None:
    whole = make_run(tmp_path / "whole", steps=20, ends=None)
    names = [path.name for path in whole.iterdir() if path.is_file()]
    for number, some in enumerate([*([name] for name in names), names[1:]]):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        watch = Watch(folder)
        for name in some:
            content = (folder / name).read_bytes()
            (folder / name).unlink()
            if how in ODD:
                ODD[how](folder / name)
            elif how != "missing":
                (folder / name).write_bytes(DAMAGED[how](content))
        watch.poll()
        assert watch.lines()[0].label == Watch(folder).lines()[0].label == "state"


def test_records_of_other_types_and_times_are_passed_over(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=20)
    lines, page = Watch(folder).lines(2e9), make_report(read_run(folder))
    wrong = [
        {"time": float("nan")},
        {"time": 1e300},
        {"time": -1e20},
        {"text": None},
        {"kind": 5},
        {"step": "q"},
        {"data": 3},
    ]
    with (folder / files.EVENTS).open("a") as file:
        for one in wrong:
            file.write(json.dumps({"time": 1.8e9, "kind": "save", "step": 1, "text": "", "data": {}} | one) + "\n")
    starts = json.loads((folder / files.STARTS).read_text())
    (folder / files.STARTS).write_text(json.dumps([*starts, 1e300, float("inf"), "x"]))
    assert Watch(folder).lines(2e9) == lines and make_report(read_run(folder)) == page


def test_what_is_not_known_is_not_said(tmp_path: Path) -> None:
    (tmp_path / files.CONFIG).write_text("name: run\n")  # no file of a run that has begun
    assert said(tmp_path)["state"] == "no sign of life: it may have died"
    folder = running(tmp_path / "one", steps=20, ranks=1)
    assert re.fullmatch(r"[\d.]+", said(folder)["GPU power watts"])  # one rank: no lowest and highest
    (folder / files.METRICS).write_text(
        "step,gpu/power_watts,gpu/power_watts_min,gpu/power_watts_max\n1,20,19.9999,20.0001\n"
    )
    assert said(folder)["GPU power watts"] == "20"  # all the same, as far as it is shown


def test_half_of_a_narrow_terminal_is_left_for_the_values(tmp_path: Path) -> None:
    watch = Watch(make_run(tmp_path / "run", steps=20))
    for width in (80, 30):
        console = Console(width=width, file=StringIO())
        console.print(panel(watch, width))
        rows = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert {cell_len(row) for row in rows} == {width}
        assert any("20 of 20" in row for row in rows) and any("ended after" in row for row in rows)


def test_without_a_terminal_it_prints_lines_and_ends_with_the_run(tmp_path: Path) -> None:
    for code, ended in ((0, "ended after 20 steps"), (1, "died after 20 steps, exit code 1: went wrong")):
        folder = running(tmp_path / str(code), steps=20)
        with subprocess.Popen([*WATCH, str(folder), "every=0.1"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, env=environment(PYTHONPATH=str(ROOT / "src"))) as shown:  # fmt: skip
            assert shown.stdout is not None
            assert shown.stdout.readline().startswith("state ")
            with (folder / files.EVENTS).open("a") as file:
                if code:
                    row = {"time": time.time(), "kind": "error", "step": None, "text": "went wrong", "data": {}}
                    file.write(json.dumps(row) + "\n")
            append_event(folder, "end", exit_code=code)
            rest = shown.stdout.read()
            assert exit_code(shown, 60) == code
        assert f"state {ended}" in rest.splitlines()[-1] and "\x1b" not in rest and "Traceback" not in rest


def test_in_a_terminal_of_80_columns_that_is_resized_until_ctrl_c(tmp_path: Path) -> None:
    folder = running(tmp_path / "run", steps=20)
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    shown = b""

    def plain() -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode(errors="replace")).replace("\r", "")

    def drawn(text: str) -> bool:
        nonlocal shown
        if select.select([main], [], [], 0.1)[0]:
            shown += os.read(main, 2**16)
        return text in plain()

    own = environment(PYTHONPATH=str(ROOT / "src"), TERM="xterm-256color")
    sizes = {"COLUMNS", "LINES"}  # a test's runner may set these, and rich takes them for the terminal's
    with subprocess.Popen([*WATCH, str(folder), "every=0.1"], stdin=terminal, stdout=terminal, stderr=terminal,
                          env={key: value for key, value in own.items() if key not in sizes},
                          start_new_session=True) as view:  # fmt: skip
        try:
            wait_until(lambda: drawn("╯"), "the view", 60)
            rows = (plain().partition("╯")[0] + "╯").splitlines()  # the first picture
            assert "╭─ run" in rows[0] and {cell_len(row) for row in rows if row.startswith(("│", "╭", "╰"))} == {80}
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 60, 0, 0))
            view.send_signal(signal.SIGWINCH)
            shown = b""
            wait_until(lambda: drawn("╭─ run " + "─" * 52 + "╮"), "the narrower view", 60)
            view.send_signal(signal.SIGINT)
            patience = Patience(60)
            while view.poll() is None and not patience.is_over():
                drawn("")
            assert view.returncode == 0
        finally:
            view.kill()
    drawn("")
    assert "Traceback" not in shown.decode() and "\x1b[?25h" in shown.decode()  # the cursor is there again
    os.close(main)
    os.close(terminal)


def test_the_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", steps=20, ends=4)
    assert shardwise_tools.main(["watch", str(folder), "--once"]) == 1
    assert "died after 20 steps, exit code 4: rank 2 has run out of memory" in capsys.readouterr().out
    for words, text in {
        (): "watch takes one run, and got none",
        ("none",): "there is no such folder",
        (str(folder), "every=0"): "every=0: must be from 0.1 to 3600 seconds",
        (str(folder), "--follow"): "there is no such flag",
    }.items():
        assert shardwise_tools.main(["watch", *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and text in error and error.count("\n") == 1


def test_what_a_run_has_recovered_from_is_no_error_of_it(tmp_path: Path) -> None:
    """A rank records why it leaves, and its launcher repeats that."""
    folder = make_run(tmp_path / "run", steps=20, ends=None)
    text = "shardwise: stopped by SIGTERM, step 20 is saved"
    events.append_event(folder, "error", 20, text, rank=0)
    events.append_event(folder, "error", None, text, exit_code=3)
    told = [line.text for line in Watch(folder).lines() if line.label == "error"]
    assert len(told) == 1 and "SIGTERM" in told[0]
    assert [event.data for event in read_run(folder).events if event.text == text] == [{"exit_code": 3}]
    events.append_event(folder, "command", None, "python train.py", command=["python", "train.py"])
    events.append_event(folder, "start", 20, "training starts")
    assert not [line for line in Watch(folder).lines() if line.label == "error"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_stream_shows_what_its_encoding_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, encoding: str) -> None:
    folder = make_run(tmp_path / "run", steps=20)
    for words in (["watch", str(folder), "--once"], ["watch", "--help"], ["report", "--help"]):
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
        assert shardwise_tools.main(words) == 0
        sys.stdout.flush()
        assert (b"?" in written.getvalue()) or "--help" in words
