"""`shardwise submit` for a machine of one's own: what it asks of sbatch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.config.groups import ClusterConfig
from shardwise.config.paths import CONF, ROOT
from shardwise.errors import ConfigError
from shardwise.launch.sbatch import check_time, merge_options
from shardwise_tools import main

WORDS = ["submit", "--dry-run", "nodes=2", "cluster=mine", "recipe=custom", "module._target_=my.Module",
         "micro_batch_size=1", "global_batch_size=48"]  # fmt: skip


def own_machine(folder: Path, **replaced: str) -> list[str]:
    """The words for a machine of one's own, whose file is a copy of one of ours with some lines `replaced`."""
    lines = (CONF / "cluster/dgx_a100.yaml").read_text().splitlines()
    for key, value in replaced.items():
        lines = [f"{key}: {value}" if line.startswith(f"{key}:") else line for line in lines]
        assert f"{key}: {value}" in lines
    (folder / "cluster").mkdir()
    (folder / "cluster/mine.yaml").write_text("\n".join(lines) + "\n")
    return [*WORDS, "--config-dir", str(folder), f"runs_dir={folder}/runs"]


@pytest.mark.parametrize(
    ("cores", "more", "asked"),
    [
        ("128", [], "--ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=16 "),
        ("128", ["devices=2"], "--ntasks-per-node=2 --gpus-per-node=2 --cpus-per-task=16 "),
        ("128", ["devices=4", "accelerator=cpu"], "--ntasks-per-node=4 --cpus-per-task=16 "),
        ("4", [], "--ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=1 "),
        ("null", [], "--ntasks-per-node=8 --gpus-per-node=8 /"),
    ],
)
def test_each_task_gets_its_share_of_the_cores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cores: str, more: list[str], asked: str
) -> None:
    assert main([*own_machine(tmp_path, name="mine", cpu_cores=cores), *more]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    assert f"--nodes=2 {asked}" in command and "/slurm/generic.sbatch " in command


def test_a_machine_with_the_name_of_another_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = own_machine(tmp_path)
    assert main(words) == 2
    said = "cluster=mine: the file is named mine, and its name: says dgx_a100; change that to name: mine"
    assert capsys.readouterr() == ("", f"error: {said}\n")
    assert main([*words, "-m", "cluster=mine,dgx_a100"]) == 2
    assert said in capsys.readouterr().err
    assert main([word.replace("cluster=mine", "cluster=dgx_a100") for word in words]) == 0


def test_a_short_job_is_told_the_signal_that_the_docs_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*own_machine(tmp_path, name="mine"), "time=00:10:00"]
    assert main(words) == 2
    said = capsys.readouterr().err
    [signal] = re.findall(r"sbatch\.signal=USR2@\d+", said)
    assert signal in (ROOT / "docs/slurm.md").read_text() and "give more than 10 minutes" in said
    assert main([*words, signal]) == 0


DGX = ["submit", "--dry-run", "nodes=2", "cluster=dgx_h100", "recipe=custom", "module._target_=my.Module",
       "micro_batch_size=1", "global_batch_size=48"]  # fmt: skip


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    """What sbatch is asked for, between --nodes and the template; and the lines before."""
    assert main([*DGX, *words]) == 0
    *lines, command = capsys.readouterr().out.splitlines()
    found = re.search(r"--parsable (.*)/slurm/(\w+)\.sbatch ", command)
    assert found is not None
    return f"{found[1].rpartition(' ')[0]} {found[2]}", "\n".join(lines)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sbatch.constraint=a&b|$(c);d", "sbatch.exclude=node[1-3]", "time=24h", "job_name=a b"],
         "--nodes=2 '--constraint=a&b|$(c);d' '--exclude=node[1-3]' --time=1-00:00:00 '--job-name=a b' dgx_h100"),
        (["devices=2", "sbatch.contiguous=true"],
         "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --cpus-per-task=14 --contiguous generic"),
        (["accelerator=cpu", "devices=4", "sbatch.cpus-per-task=4"],
         "--nodes=2 --ntasks-per-node=4 --cpus-per-task=4 generic"),
        (["-m", "seed=1,2,3", "array_limit=2"], "--nodes=2 --array=0-2%2 --output=slurm-%A_%a.log dgx_h100"),
    ],
)  # fmt: skip
def test_what_sbatch_is_asked_for(capsys: pytest.CaptureFixture[str], words: list[str], expected: str) -> None:
    assert asked(capsys, *words)[0] == expected


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ({"mail_type": "END,FAIL", "mail-user": "a@b"}, {"mail-type": "END,FAIL", "mail-user": "a@b"}),
        ({"contiguous": "true", "no-requeue": "false"}, {"contiguous": True, "no-requeue": None}),
        ({"gpus-per-node": "h100"}, {"gpus-per-node": "h100:8"}),
        ({"gpus-per-node": "h100:8"}, {"gpus-per-node": "h100:8"}),
        ({"time": "90m", "output": "logs/%j.log"}, {"time": "0-01:30:00", "output": "logs/%j.log"}),
        ({"signal": "R:USR2@60", "time": "5"}, {"signal": "R:USR2@60", "time": "5"}),
        ({"gres": "nvme:1", "export": "ALL,A=b"}, {"gres": "nvme:1", "export": "ALL,A=b"}),
    ],
)
def test_any_option_of_sbatch_is_passed_on(typed: dict[str, str], expected: dict[str, Any]) -> None:
    assert merge_options(ClusterConfig(devices_per_node=8), typed, {}, 8)[0] == expected


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("nodes=3", "sbatch.nodes=3: the run decides this: nodes=N says how many there are"),
        ("node=3", "the run decides this: nodes=N"),  # as sbatch reads it
        ("ntasks_per_node=3", "sbatch.ntasks_per_node=3: the run decides this: devices=N"),
        ("gpus=3", "the run decides this: devices=N"),
        ("gres=gpu:a100:3", "devices=N says how many ranks and GPUs a node has"),
        ("gpus-per-node=3", "this run has 8 GPUs a node"),
        ("gpus-per-nod=8", "options of sbatch are written in full: sbatch.gpus-per-node=…"),
        ("array=0-3", "-m makes an array"),
        ("export=NONE", "sbatch.export=NONE: the batch script is told in its environment"),
        ("signal=B:TERM@60", "give USR2@SECONDS"),
        ("C=ib", "names no option of sbatch"),
        ("--wrap=x", "names no option of sbatch"),
        ("constraint=", "must be one line of text"),
        ("qos=long", "qos= and sbatch.qos= are one option of sbatch: give it once"),
        ("time=24 h", "sbatch.time=24 h: Slurm takes minutes, minutes:seconds, hours:minutes:seconds"),
    ],
)
def test_an_option_of_sbatch_that_cannot_be_is_refused(word: str, told: str) -> None:
    name, _, value = word.rpartition("=")
    with pytest.raises(ConfigError, match=re.escape(told)):
        merge_options(ClusterConfig(devices_per_node=8), {name: value}, {"qos": "short"}, 8)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--constraint=ib"], "--constraint=ib: an option of sbatch is written sbatch.constraint=ib, without --"),
        (["--exclude", "node1"], "--exclude: an option of sbatch is written sbatch.exclude=node1, without --"),
        (["--time=3:00:00"], "--time=3:00:00: write time=3:00:00, without --"),
        (["--max-steps", "3"], "write max_steps=3, without --"),
        (["-C", "ib"], "-C: options of sbatch are written as words, in full"),
        (["constraint=ib"], "an option of sbatch is written sbatch.constraint=…"),
        (
            ["partitin=a"],
            "partitin=a: there is no partitin (did you mean partition?); --help lists what there is; an option",
        ),
        (["mount=/data"], "there is no mount (did you mean mounts?)"),  # and not units, a word of the run
        (["prologue=source /a b.sh"], "there is no prologue (did you mean prolog?)"),
        (["max_step=3"], "max_step=3: there is no max_step (did you mean max_steps?); --help lists what there is"),
        (["module=[cuda/12.4]"], "module is the LightningModule; environment modules are modules=[cuda/12.4,…]"),
        (["mounts=/data"], "mounts=/data: without a container all folders are there"),
        (["container=/i.sqsh", "mounts=data"], "mounts=data: a folder begins with /"),
        (["modules=$(id)"], "modules=$(id): names no environment module"),
        (["-m", "seed=1,2", "accelerator=cpu,cuda"], "an array's members are alike"),
    ],
)
def test_what_no_job_is_made_of_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    monkeypatch.delenv("CONTAINER", raising=False)
    assert main([*DGX, *words]) == 2
    out, said = capsys.readouterr()
    assert said.startswith("error: ") and told in said and out == ""


@pytest.mark.parametrize(
    ("time", "value", "said"),
    [
        ("24h", "1-00:00:00", "time=24h is 1 day: --time=1-00:00:00"),
        ("1d12H", "1-12:00:00", "time=1d12H is 1 day 12 hours: --time=1-12:00:00"),
        ("90min", "0-01:30:00", "time=90min is 1 hour 30 minutes: --time=0-01:30:00"),
        ("24", "24", "time=24 is 24 minutes: --time=24"),
        ("24:30", "24:30", "time=24:30 is 24 minutes 30 seconds: --time=24:30"),
        ("0", "0", "time=0 is no limit: --time=0"),
        ("24:00:00", "24:00:00", None),
        ("1-0", "1-0", None),
        ("1-00:30", "1-00:30", None),
        ("UNLIMITED", "UNLIMITED", None),
    ],
)
def test_how_a_time_is_read_is_said(time: str, value: str, said: str | None) -> None:
    assert check_time("time", time, None) == (value, [said] if said else [])


def test_a_clusters_file_has_defaults_for_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("CONTAINER", "CONTAINER_MOUNTS", "SHARDWISE_MODULES", "SHARDWISE_PROLOG"):
        monkeypatch.delenv(name, raising=False)
    said = "{account: mine, constraint: ib, exclusive: true, mem: 0, time: '8:00:00', gpus-per-node: a100}"
    words = own_machine(tmp_path, name="mine", sbatch=said, mounts="[/data, '/a:/b']", modules="[cuda/12.4, gcc]",
                        prolog="source /etc/site.sh; x=1")  # fmt: skip

    def command(*more: str) -> str:
        assert main([*words, *more]) == 0, capsys.readouterr()
        return capsys.readouterr().out.splitlines()[-1]

    text = command()
    assert (
        "--gpus-per-node=a100:8 " in text
        and "--account=mine --constraint=ib --exclusive --mem=0 --time=8:00:00 " in text
    )
    assert "SHARDWISE_MODULES='cuda/12.4 gcc' SHARDWISE_PROLOG='source /etc/site.sh; x=1' sbatch" in text
    assert "MOUNTS" not in text
    text = command("devices=2", "account=other", "sbatch.constraint=null", "modules=[]", "prolog=null")
    assert "--exclusive" not in text and "--mem" not in text and "--constraint" not in text and "MODULES" not in text
    assert "--account=other" in text and "--gpus-per-node=a100:2" in text and "PROLOG" not in text
    text = command("accelerator=cpu", "devices=2", "container=/i.sqsh")
    assert "gpus" not in text and " CONTAINER=/i.sqsh CONTAINER_MOUNTS=/data:/data,/a:/b SHARDWISE_MODULES=" in text
    assert "CONTAINER_MOUNTS=/c:/c " in command("container=/i.sqsh", "mounts=[/c]")
    file = tmp_path / "cluster/mine.yaml"
    file.write_text(file.read_text().replace("'8:00:00'", "8:00:00"))
    assert main(words) == 2
    assert "YAML reads 24:00:00 as a number of seconds; quote it: time: '24:00:00'" in capsys.readouterr().err


def test_what_a_container_does_not_see_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = ["data._target_=my.Data", "data.directory=/data/tokens", "data.more=[/b/own/x]", "runs_dir=/scratch/runs"]
    _, said = asked(capsys, *data)
    assert "container" not in said
    _, said = asked(capsys, *data, "container=/i.sqsh", "mounts=[/c,/a:/b]")
    assert "data.directory=/data/tokens: is in no folder that the container sees" in said
    assert "give mounts=/data/tokens" in said and "data.more" not in said
    assert "runs_dir=/scratch/runs" in said and "is lost with the container" in said
    _, said = asked(capsys, *data[:2], "container=/i.sqsh", "mounts=/data")
    assert "container sees" not in said


def test_a_machine_that_is_not_named_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in DGX if not word.startswith("cluster=")]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "no cluster= is given, so it is not known what a node has: the job asks for 1 task and 1 GPU"
    )
    assert "each with one CPU (sbatch.cpus-per-task=N gives more); give cluster=NAME" in said
    assert main(DGX) == 0 and "is given" not in capsys.readouterr().out


def test_a_new_job_has_nothing_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = "resume=auto without name=: a new job is a new run, which starts from the seed"
    assert told in asked(capsys, "resume=auto")[1]
    assert told not in asked(capsys, "resume=auto", "name=first", f"runs_dir={tmp_path}")[1]


def test_a_sweep_prints_its_values_and_folders(capsys: pytest.CaptureFixture[str]) -> None:
    _, said = asked(capsys, "-m", "seed=1,2", "gradient_clip_val=1,2")
    assert "[0] seed=1 gradient_clip_val=1: run slurm-JOB_0: " in said and "/runs/slurm-JOB_3" in said
    assert "[3] seed=2 gradient_clip_val=2: run slurm-JOB_3: " in said
    assert "[1] seed=2: run own-1: " in asked(capsys, "-m", "seed=1,2", "name=own")[1]


def test_the_job_runs_the_python_that_has_made_the_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The batch script finds the repository's own by itself, and knows nothing of what is in a container."""
    monkeypatch.delenv("PYTHON", raising=False)
    for python, more, expected in [
        ("/my env/bin/python", [], "PYTHON='/my env/bin/python' sbatch "),
        ("/my env/bin/python", ["container=image"], "CONTAINER=image sbatch "),
        (f"{ROOT}/.venv/bin/python3", [], f"SHARDWISE_HOME={ROOT} sbatch "),
    ]:
        monkeypatch.setattr(sys, "executable", python)
        assert main([*DGX, *more]) == 0
        assert expected in capsys.readouterr().out.splitlines()[-1]


SBATCH = """#!{python}
import json, os, sys
names = ("SHARDWISE_HOME", "CONTAINER", "CONTAINER_MOUNTS", "SHARDWISE_MODULES", "SHARDWISE_PROLOG", "PYTHON")
print(json.dumps([sys.argv[1:], {{name: os.environ.get(name) for name in names}}]), file=open("given", "a"))
print(17)
"""


def test_the_printed_command_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a shell without the variables that were set where it was printed."""
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "bin/sbatch"
    program.parent.mkdir()
    program.write_text(SBATCH.format(python=sys.executable))
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv("PYTHON", "/my env/python")
    monkeypatch.setenv("CONTAINER", "/images/it's.sqsh")
    words = ["mounts=/da ta", "modules=a/1,b", "prolog=export A='b c'; echo \"$A\" `id`", "sbatch.comment=it's $HOME"]
    assert main([*(word for word in DGX if word != "--dry-run"), *words, "+module.text='a \"b\"'"]) == 0
    out = capsys.readouterr().out
    [command] = [line for line in out.splitlines() if " sbatch --parsable " in line]
    assert f"job 17; its log is {tmp_path}/slurm-17.log" in out
    done = subprocess.run(["sh", "-c", command], env={"PATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    submitted, pasted = map(json.loads, (tmp_path / "given").read_text().splitlines())
    assert submitted == pasted and pasted[1] == {
        "SHARDWISE_HOME": str(ROOT), "CONTAINER": "/images/it's.sqsh", "CONTAINER_MOUNTS": "/da ta:/da ta",
        "SHARDWISE_MODULES": "a/1 b", "SHARDWISE_PROLOG": words[2].partition("=")[2], "PYTHON": "/my env/python",
    }  # fmt: skip
