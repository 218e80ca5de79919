"""`shardwise submit` for a machine of one's own: what it asks of sbatch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwise.config.paths import CONF, ROOT
from shardwise.tools import main

WORDS = ["submit", "--dry-run", "nodes=2", "cluster=mine", "recipe=custom", "module._target_=my.Module",
         "micro_batch_size=1", "global_batch_size=48"]  # fmt: skip


def own_machine(folder: Path, **replaced: str) -> list[str]:
    """The words for a machine of one's own, whose file is a copy of one of ours with some lines `replaced`."""
    lines = (CONF / "cluster/dgx_a100.yaml").read_text().splitlines()
    for key, value in replaced.items():
        lines = [f"{key}: {value}" if line.startswith(f"{key}:") else line for line in lines]
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
    assert main([*own_machine(tmp_path, name="mine"), "time=00:10:00"]) == 2
    said = capsys.readouterr().err
    [signal] = re.findall(r"sbatch --signal=USR2@\d+", said)
    assert signal in (ROOT / "docs/slurm.md").read_text() and "give more than 10 minutes" in said
