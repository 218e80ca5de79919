"""Ranks as processes: they start with one word, say once what is wrong, and none is left behind."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pytest

from shardwise_tools.viewer.record import read_run
from shardwise_tools.viewer.report import make_report
from shardwise_tools.viewer.state import state_of
from tests.harness.commands import OWN, RECIPE, TRAIN, Running, check, environment, make_home, metrics, run
from tests.harness.patience import exit_code, run_patiently

FILES = {"config.yaml", "plan.json", "environment.json", "starts.json", "metrics.csv", "ranks.csv", "events.jsonl",
         "summary.json", "loss.png", "report.html",
         "checkpoints", "logs"}  # fmt: skip
SHORT = [*RECIPE, "max_steps=3", "validate_every_n_steps=2"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def two(home: Path) -> subprocess.CompletedProcess[str]:
    return check(run(home, *SHORT, "devices=2", "name=two", "module.sample_tokens=4", anew=True))


def torchrun(*words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *words]


def test_two_devices_need_one_word(home: Path, two: subprocess.CompletedProcess[str]) -> None:
    assert {path.name for path in (home / "runs" / "two").iterdir()} == FILES | {"samples.txt", "tokenizer"}
    assert {path.name for path in home.iterdir()} <= {"mine.py", "__pycache__", "shards", "runs"} | {
        path.name for path in home.glob("*.log")
    }
    assert two.stderr == ""
    plan = json.loads((home / "runs" / "two" / "plan.json").read_text())
    assert plan["topology"]["devices"] == 2 and plan["resume"] is None


def test_runs_in_forks_are_those_that_are_started_anew(tmp_path: Path) -> None:
    """Most tests fork launcher and ranks (tests/harness/forked.py), and see what a user would."""
    words, done = [*OWN, "-m", "+data.rank_1=works,raises,is_killed"], {}
    for name in ("anew", "forked"):
        done[name] = run(make_home(tmp_path / name), *words, "name=sweep", anew=name == "anew")
    assert done["forked"].returncode == done["anew"].returncode == 137, done["forked"].stderr
    assert done["forked"].stderr == done["anew"].stderr
    lines = [[line for line in one.stdout.splitlines() if "step" not in line] for one in done.values()]
    assert len(lines[0]) == len(lines[1]) > 10
    losses = [metrics(tmp_path / name / "runs/sweep-0", "train/loss") for name in done]
    assert losses[0] == losses[1] and losses[0].keys() == {1, 3}


def test_output_without_a_terminal_is_plain_lines(home: Path, two: subprocess.CompletedProcess[str]) -> None:
    lines = two.stdout.splitlines()
    assert "\r" not in two.stdout and "\x1b" not in two.stdout
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == [
        "step 1/3", "step 2/3", "step 2", "step 3/3",
    ]  # fmt: skip
    first, last = (number for number, line in enumerate(lines) if line.startswith("─"))
    table = lines[first:last]
    assert any("tokens/s" in line for line in table) and any("3 steps, 24 samples" in line for line in table)
    assert any(line.startswith("validation loss") and line.endswith("(step 2)") for line in table)
    assert any(re.fullmatch(r"parameters: [\d,]+, of which [\d,]+ are trained", line) for line in lines)


def test_a_terminal_gets_a_progress_bar(home: Path) -> None:
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [sys.executable, str(TRAIN), *SHORT, "name=terminal", "checkpoint=none"]
    with subprocess.Popen(
        command, cwd=home, env=environment(), stdin=terminal, stdout=terminal, stderr=terminal
    ) as shell:
        os.close(terminal)
        shown = b""
        with suppress(OSError):  # at the end
            while data := os.read(main, 65536):
                shown += data
        assert exit_code(shell, 60) == 0
    os.close(main)
    assert "100%|█" in shown.decode() and "step 1/3" not in shown.decode()


def test_one_rank_sees_the_same_losses(home: Path, two: subprocess.CompletedProcess[str]) -> None:
    """train/loss is the mean over micro-batches and ranks; and a sweep of single-device jobs runs each job once."""
    done = check(run(home, *SHORT, "name=one", "-m", "micro_batch_size=8,2", anew=True))
    assert done.stdout.count("run one-") == 2
    expected = metrics(home / "runs" / "two", "train/loss", "train/samples")
    assert set(expected) == {1, 2, 3}
    for name in ("one-0", "one-1"):
        measured = metrics(home / "runs" / name, "train/loss", "train/samples")
        assert set(measured) == {1, 2, 3}
        for step, values in measured.items():
            assert values == pytest.approx(expected[step], rel=1e-5), (name, step)


def test_resume_is_one_word_as_well(home: Path, two: subprocess.CompletedProcess[str]) -> None:
    """With a data worker in each rank, stopped within an epoch of 2 steps; a taken name needs the word. A start that is
    refused leaves no record."""
    words = [*SHORT, "devices=2", "data.num_workers=1", "name=resumed"]
    check(run(home, *words, "max_steps=1"))
    taken = check(run(home, *words), 2)
    assert taken.stderr.startswith("error: ") and "already holds a run" in taken.stderr
    records = {path.name: path.read_text() for path in (home / "runs" / "resumed").glob("[cp]*.*")}
    assert "holds no average" in check(run(home, *words, "resume=auto", "ema_decay=0.9"), 2).stderr
    assert records == {path.name: path.read_text() for path in (home / "runs" / "resumed").glob("[cp]*.*")}
    done = check(run(home, *words, "resume=auto"))
    assert "from step-00000001.ckpt" in done.stdout and done.stderr == ""
    columns = ("train/loss", "train/gradient_norm", "train/samples")
    expected, measured = metrics(home / "runs" / "two", *columns), metrics(home / "runs" / "resumed", *columns)
    assert sorted(measured) == [1, 2, 3]
    assert [measured[step] for step in (1, 2, 3)] == [pytest.approx(expected[step], rel=1e-6) for step in (1, 2, 3)]


def test_of_two_runs_that_want_one_name_the_first_has_it(home: Path) -> None:
    words = [*SHORT, "name=wanted", "checkpoint=none"]
    with Running(home, "one-of-two", *words) as one:
        two = run(home, *words)
        codes = sorted([exit_code(one.process, 60), two.returncode])
    assert codes == [0, 2]
    assert sorted(metrics(home / "runs" / "wanted", "train/loss")) == [1, 2, 3]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_run_outlives_its_terminal(home: Path, unbuffered: str) -> None:
    """Whose other end is closed, like that of `| head`."""
    name = f"piped{unbuffered}"
    words = [*SHORT, f"name={name}", "checkpoint=none", "devices=2"]
    listens, speaks = os.pipe()
    os.close(listens)
    env = environment(PYTHONUNBUFFERED=unbuffered)
    done = run_patiently([sys.executable, str(TRAIN), *words], 120, cwd=home, env=env, stdout=speaks)
    os.close(speaks)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(metrics(home / "runs" / name, "train/loss")) == [1, 2, 3]


STANDBY = f"""
import runpy, sys
sys.path[:0] = [{str(TRAIN.parent / "src")!r}]
from shardwise.launch import local
local.STANDBY_SECONDS = 0.0
runpy.run_path({str(TRAIN)!r}, run_name="__main__")
"""
DIES_ONCE = """
class Dies(Module):
    def on_train_batch_start(self, batch, batch_idx):
        stood_by = b"SHARDWISE_STANDBY=yes" in open("/proc/self/environ", "rb").read()
        open("steps", "a").write(f"{batch_idx} {stood_by}\\n")
        if batch_idx == 2 and not stood_by:
            os.kill(os.getpid(), 9)
"""


def test_the_ranks_of_a_restart_have_stood_by(tmp_path: Path) -> None:
    """They have imported everything, with the environment of their Plan; and none of those that wait is left behind."""
    home = make_home(tmp_path, DIES_ONCE)
    (home / "standby.py").write_text(STANDBY)
    words = [*OWN[:-1], "module._target_=mine.Dies", "global_batch_size=2", "max_restarts=2"]
    words += ["checkpoint.save_every_n_steps=1"]
    with Running(home, "standby", *words, program=home / "standby.py") as running:
        assert exit_code(running.process, 120) == 0, running.log.read_text()
        running.wait_until_gone()
        assert "shardwise: restart 1 of 2, from step 2" in running.log.read_text()
    assert (home / "steps").read_text().splitlines() == ["0 False", "1 False", "2 False", "2 True"]


def test_torchrun_standalone(home: Path) -> None:
    check(run(home, *OWN[:-1], "name=standalone", command=torchrun("--standalone")))
    assert {path.name for path in (home / "runs" / "standalone").iterdir()} == FILES


def test_torchrun_agrees_on_a_run_id_and_refuses_a_taken_name(home: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = f"--master-port={probe.getsockname()[1]}"
    before = set((home / "runs").iterdir()) if (home / "runs").exists() else set()
    check(run(home, *OWN[:-1], command=torchrun(port)))
    (made,) = set((home / "runs").iterdir()) - before
    assert made.name.startswith("torchrun-") and (made / "summary.json").exists()

    taken = run(home, *OWN[:-1], f"name={made.name}", command=torchrun(port))
    assert taken.returncode != 0
    assert taken.stderr.count("already holds a run") == 1 and "exitcode  : 2" in taken.stderr


def test_each_job_of_a_sweep_says_once_what_went_wrong(home: Path) -> None:
    """Whichever rank finds it, with what follows in the other rank left out; the jobs after it still run."""
    (home / "runs").mkdir(exist_ok=True)
    (home / "runs" / "sweep-4").touch()
    done = check(run(home, *OWN, "-m", "+data.rank_1=raises,is_killed,is_odd,works,has_no_folder", "name=sweep"), 137)
    assert [(home / "runs" / f"sweep-{job}" / "summary.json").exists() for job in range(4)] == [False] * 3 + [True]
    assert json.loads((home / "runs" / "sweep-3" / "summary.json").read_text())["steps"] == 3
    _, raised, killed, odd, folder, total = done.stderr.replace("shardwise:", "\0").replace("error:", "\0").split("\0")
    assert raised.startswith(" ValueError: broken by hand\n  in collate, mine.py line ") and raised.count("\n") == 3
    assert raised.endswith("  the whole traceback is in runs/sweep-0/logs/rank-00001.log\n")
    assert killed == " rank 1 was killed by SIGKILL (out of memory?); the other ranks are stopped\n"
    # Also a run that died has a report, which says how it ended and which words start it again
    of_killed, of_last = (read_run(home / "runs" / f"sweep-{job}") for job in (1, 3))
    assert state_of(of_killed).text.endswith("exit code 137:" + killed.rstrip())
    assert state_of(of_last).text == "ended after 3 steps"
    for run_of_sweep, word in ((of_killed, "is_killed"), (of_last, "works")):
        page = (run_of_sweep.path / "report.html").read_text()
        assert page == make_report(run_of_sweep) and f"data.rank_1={word} name=sweep\n" in page.replace("</pre>", "\n")
    assert odd.startswith(" the training loader's batch_size is 3") and odd.count("\n") == 1
    assert folder.startswith(" cannot write the run's folder") and folder.count("\n") == 1
    table = done.stdout[done.stdout.index("the sweep, best first:") :].splitlines()
    assert table[1].startswith("data.rank_1=works ") and " train/loss " in table[1] and table[1].endswith("sweep-3")
    assert sorted(line.split(",")[1].split("  ")[0] for line in table[2:6]) == sorted(
        [" exit code 137", " exit code 2", " exit code 2", " exit code 2"]
    )
    assert table[6] == f"curves: {home / 'runs' / 'sweep.png'}" and (home / "runs" / "sweep.png").exists()
    codes = "sweep-0 (exit code 2), sweep-1 (exit code 137), sweep-2 (exit code 2), sweep-4 (exit code 2)"
    assert total == f" 4 of 5 runs failed: {codes}\n"


def test_a_refusal_in_mid_run_keeps_what_was_written_and_an_early_one_leaves_nothing(home: Path) -> None:
    words = [*RECIPE, "max_steps=3", "validate_every_n_steps=2"]
    late = check(run(home, *words, "checkpoint.monitor=nope", "checkpoint.mode=min", "name=late"), 2)
    assert late.stderr.startswith("error: checkpoint.monitor=nope") and late.stderr.count("\n") == 1
    assert sorted(metrics(home / "runs" / "late", "train/loss")) == [1, 2]
    early = check(run(home, *words, "model.vocab_size=100", "name=early"), 2)
    assert early.stderr.startswith("error: ") and not (home / "runs" / "early").exists()


def test_torchrun_hears_of_a_mistake_once(home: Path) -> None:
    done = run(home, *OWN[:-1], "+data.rank_1=is_odd", "name=odd", command=torchrun("--standalone"))
    assert done.returncode != 0 and "exitcode  : 2" in done.stderr
    assert done.stderr.count("error: the training loader's batch_size is 3") == 1
    both = run(home, *OWN[:-1], "module._target_=mine.Absent", "name=absent", command=torchrun("--standalone"))
    assert both.returncode != 0 and both.stderr.count("error: ") == 1


ENDLESS = [*RECIPE, "max_steps=1000000", "log_every_n_steps=10", "data.num_workers=1", "checkpoint=none"]


@pytest.mark.parametrize(
    ("sent", "whole_group", "code", "says"),
    [
        (signal.SIGKILL, False, -signal.SIGKILL, ""),
        (signal.SIGINT, True, 130, "shardwise: stopped by Ctrl-C: nothing is saved, as checkpoint=none asks for"),
        (signal.SIGINT, False, 130, "shardwise: stopped by Ctrl-C: nothing is saved, as checkpoint=none asks for"),
        (signal.SIGTERM, False, 143, "shardwise: stopped by SIGTERM: nothing is saved, as checkpoint=none asks for"),
    ],
)
def test_nothing_outlives_the_launcher(home: Path, sent: int, whole_group: bool, code: int, says: str) -> None:
    """Two ranks, a data worker each."""
    mark = f"{signal.Signals(sent).name}-{whole_group}"
    with Running(home, mark, *ENDLESS, "devices=2", f"name={mark}") as running:
        running.wait_for("step 10/")
        assert len(running.pids()) >= 5
        os.killpg(running.process.pid, sent) if whole_group else running.process.send_signal(sent)
        assert exit_code(running.process, 60) == code
        running.wait_until_gone()
    _check_last_words(running, says)


def test_ctrl_c_of_a_single_process(home: Path) -> None:
    with Running(home, "single", *ENDLESS, "name=single") as running:
        running.wait_for("step 10/")
        os.killpg(running.process.pid, signal.SIGINT)
        assert exit_code(running.process, 60) == 130
        running.wait_until_gone()
    _check_last_words(running, "shardwise: stopped by Ctrl-C: nothing is saved, as checkpoint=none asks for")


def _check_last_words(running: Running, says: str) -> None:
    before, _, after = running.log.read_text().partition("step 1/")
    assert len(before.splitlines()) <= 4, before  # the headline
    others = [
        line
        for line in (after or before).splitlines()[1 if after else 2 :]
        if line.strip() and not line.startswith(("step ", "reads "))
    ]
    assert others == ([says] if says else [])
