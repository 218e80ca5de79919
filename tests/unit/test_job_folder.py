"""What a job's folder says of an earlier job: Slurm gives numbers out again when its controller is reset."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.config.paths import ROOT
from shardwise.launch.submit import _follow
from shardwise_tools import main

SRUN = """#!/bin/bash
echo "srun has $LOADED"
[[ $* != *train.py* ]] || { echo "trains"; touch "$SHARDWISE_JOB_DIR/done"; }
"""


def programs(folder: Path, **texts: str) -> str:
    """A PATH on which these programs come first."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return f"{folder / 'bin'}:{os.environ['PATH']}"


def batch(folder: Path, *, restarts: int | None = None, code: int = 0, **more: str) -> str:
    """What the batch script of job 17 prints, run as Slurm would; `restarts`: how often Slurm has started it again.

    `code`: the exit code that it has to have. `more`: of its environment.
    """
    environment = {
        "PATH": programs(folder, srun=SRUN), "SHARDWISE_HOME": str(ROOT), "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "17", "SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "1",
        "SLURM_CPUS_ON_NODE": "1", "SLURM_JOB_NODELIST": "node1", "PYTHON": "python3",
    }  # fmt: skip
    environment |= more
    if restarts is not None:  # Slurm does not set it in a job's first start
        environment["SLURM_RESTART_COUNT"] = str(restarts)
    done = subprocess.run(
        ["bash", str(ROOT / "slurm/generic.sbatch"), "max_steps=2"],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("restarts", [None, 0])
def test_a_new_job_with_the_number_of_an_earlier_one_trains(tmp_path: Path, restarts: int | None) -> None:
    assert "trains" in batch(tmp_path, restarts=restarts)
    again = batch(tmp_path, restarts=1)
    assert "trains\n" not in again and "slurm-17 is done already" in again and "resume=auto" in again
    for number in (1, 2):
        new = batch(tmp_path, restarts=restarts)
        assert "trains" in new and "start 1 of slurm-17" in new
        kept = tmp_path / f"runs/jobs/slurm-17-earlier-{number}"
        assert f"an earlier job had this number: its folder is {kept} now" in new and (kept / "done").exists()


def test_modules_and_the_prolog_reach_the_run(tmp_path: Path) -> None:
    """`module` is a function, which its own file defines where the job has not inherited it."""
    (tmp_path / "init").mkdir()
    (tmp_path / "init/bash").write_text(
        'module() { [[ $2 != missing ]] || return 1; export LOADED="${LOADED}[$*]$NOT_SET"; }\n'
    )
    modules = {"MODULESHOME": str(tmp_path), "SHARDWISE_MODULES": "cuda/12.4 gcc"}
    prolog = {"SHARDWISE_PROLOG": "export LOADED=\"$LOADED and $NOT_SET'mine'\""}
    assert "srun has [load cuda/12.4][load gcc] and 'mine'\n" in batch(tmp_path, **modules, **prolog)
    said = batch(tmp_path, code=2, MODULESHOME=str(tmp_path), SHARDWISE_MODULES="gcc missing")
    assert "not requeued: exit code 2: module load missing has failed on " in said and "srun" not in said
    said = batch(tmp_path, code=2, SHARDWISE_PROLOG="source /nowhere/x.sh")
    assert "not requeued: exit code 2: prolog=source /nowhere/x.sh has failed on " in said and "srun" not in said


def test_a_python_without_the_packages_is_one_line_and_starts_once(tmp_path: Path) -> None:
    """It has none of site-packages here."""
    bare = programs(tmp_path, bare=f'#!/bin/bash\nexec {sys.executable} -S "$@"\n').partition(":")[0] + "/bare"
    told = "; use the Python in which requirements.txt is installed, such as .venv/bin/python after `make train`\n"
    for words in ([str(ROOT / "train.py")], ["-m", "shardwise", "preflight"]):
        done = subprocess.run(
            [bare, *words], env={"PYTHONPATH": f"{ROOT}/src"}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2 and told in done.stderr and done.stderr.count("\n") == 1, done.stderr
    (tmp_path / "first").mkdir()
    path = programs(tmp_path / "first", srun='#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n')
    said = batch(tmp_path, code=2, PYTHON=bare, PATH=path)
    assert told in said and "shardwise: not requeued: exit code 2: the lines above say why\n" in said


def test_who_follows_a_job_is_not_told_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The new job was cancelled before it began, say."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", programs(tmp_path, squeue="#!/bin/bash\n"))
    log, done = tmp_path / "slurm-17.log", tmp_path / "runs/jobs/slurm-17/done"
    done.parent.mkdir(parents=True)
    done.touch()
    log.write_text("shardwise: exit code 3: of before\n")
    assert _follow("17", time.time()) == 0  # as they were written just now
    assert capsys.readouterr().out == "shardwise: exit code 3: of before\n"
    for path in (log, done):
        os.utime(path, (time.time() - 3600,) * 2)
    assert _follow("17", time.time()) == 1
    assert capsys.readouterr().out == ""


def test_who_follows_an_array_gets_the_table_of_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", programs(tmp_path, sbatch="#!/bin/bash\necho 17\n", squeue="#!/bin/bash\n"))
    for number in range(2):
        (tmp_path / f"runs/jobs/slurm-17_{number}").mkdir(parents=True)
        (tmp_path / f"runs/slurm-17_{number}").mkdir()
        (tmp_path / f"runs/slurm-17_{number}/summary.json").write_text(json.dumps({"train/loss": 0.5}))
    (tmp_path / "runs/jobs/slurm-17_0/done").touch()
    (tmp_path / "slurm-17_1.log").write_text("shardwise: not requeued: exit code 3: no number\n")
    assert main(["submit", "cluster=dgx_h100", "follow=true", "-m", "global_batch_size=64", "seed=5,6"]) == 3
    table = capsys.readouterr().out.partition("the sweep, best first:\n")[2].splitlines()
    assert table[0].startswith("seed=5  train/loss 0.5") and table[0].endswith("/runs/slurm-17_0")
    assert table[1].startswith("seed=6  failed, exit code 3") and len(table) == 2
