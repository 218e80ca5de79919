"""What Slurm's variables say, without a Slurm; tests/slurm has a real one."""

from pathlib import Path

import pytest

from shardwise.cli import train
from shardwise.config.compose import compose
from shardwise.devices import count_granted_cpus
from shardwise.errors import ConfigError
from shardwise.launch.host import inspect_host
from shardwise.launch.slurm import first_host, read_array_member, read_cpus_per_task, read_run_id, read_task
from shardwise.plan import Host
from shardwise.run_dir.events import claim_exit_code, has_begun, job_folder, note_begun, write_job_file
from shardwise.start.plans import make_run_plans

JOB = {"SLURM_JOB_ID": "42", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
STEP = JOB | {
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_NODELIST": "dgx[03-04]",
    "SLURM_PROCID": "11", "SLURM_LOCALID": "3", "SLURM_NODEID": "1",
}  # fmt: skip


def test_a_task_is_a_rank() -> None:
    task = read_task(STEP)
    assert task is not None
    assert (task.rank, task.local_rank, task.node, task.nodes, task.devices) == (11, 3, 1, 2, 8)
    assert task.master == "dgx03"
    said = task.environment()
    assert said["WORLD_SIZE"] == "16" and said["LOCAL_WORLD_SIZE"] == "8" and said["MASTER_PORT"] == str(task.port)
    host = inspect_host(STEP | {"CUDA_VISIBLE_DEVICES": ""})
    assert (host.launcher, host.nodes, host.devices, host.run_id) == ("slurm", 2, 8, "slurm-42")


@pytest.mark.parametrize(
    ("said", "each"),
    [({}, None), ({"SLURM_CPUS_PER_TASK": "14"}, 14), ({"SLURM_CPUS_ON_NODE": "112"}, 14),
     ({"SLURM_CPUS_ON_NODE": "4"}, 1), ({"SLURM_CPUS_PER_TASK": "1", "SLURM_CPUS_ON_NODE": "112"}, 1)],
)  # fmt: skip
def test_the_cpus_of_a_task_are_those_that_the_job_gives(said: dict[str, str], each: int | None) -> None:
    environ = STEP | {"CUDA_VISIBLE_DEVICES": ""} | said
    assert read_cpus_per_task(environ) == each
    usable = count_granted_cpus()  # a task may be bound to fewer
    assert inspect_host(environ).cpus_per_rank == min(usable, each or usable)


def test_ports_of_jobs_steps_and_restarts_differ_and_are_not_the_systems() -> None:
    ports = set()
    for job in range(100, 140):
        for step in range(3):
            for restart in range(3):
                more = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_RESTART_COUNT": str(restart)}
                task = read_task(STEP | more)
                assert task is not None and 25_000 <= task.port < 32_768
                ports.add(task.port)
    assert len(ports) == 40 * 3 * 3
    task = read_task(STEP | {"MASTER_PORT": "7", "MASTER_ADDR": "ib-dgx03"})
    assert task is not None and (task.master, task.port) == ("ib-dgx03", 7)


@pytest.mark.parametrize(
    ("environ", "run_id"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "42"}, None),  # salloc's shell
        (JOB, "slurm-42"),  # a batch script
        (JOB | {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "2"}, "slurm-40_2"),
        (JOB | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "16"}, None),  # salloc's shell on a node
        (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, "slurm-42"),
        (STEP | {"SLURM_PTY_PORT": "1", "SLURM_STEP_NUM_TASKS": "1"}, None),  # srun --pty bash
        (STEP | {"SLURM_PTY_PORT": "1"}, None),
    ],
)
def test_a_shell_and_a_batch_script_are_no_ranks(environ: dict[str, str], run_id: str | None) -> None:
    assert read_task(environ) is None
    assert read_run_id(environ) == run_id
    host = inspect_host(environ)
    assert (host.launcher, host.run_id_is_new) == ("local", run_id is None)  # a batch script's outlives a requeue


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "8,4"}, "--ntasks-per-node=N"),
        ({"SLURM_PROCID": "7"}, "--distribution=block"),
    ],
)
def test_ranks_that_are_laid_out_otherwise_are_refused(more: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_task(STEP | more)


@pytest.mark.parametrize("name", sorted(STEP.keys() - {"SLURM_STEP_ID"}))  # without it this is a shell of the job
def test_a_variable_that_srun_sets_and_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for key, value in STEP.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv(name)
    assert train(["dry_run=true"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {name} is not set") and "start train.py by srun itself" in said


def test_a_launchers_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ConfigError, match="SLURM_PROCID=first: srun sets it to a whole number"):
        read_task(STEP | {"SLURM_PROCID": "first"})
    elastic = {"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE is not set.*start train.py by torchrun itself"):
        inspect_host(elastic)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("dgx01", "dgx01"),
        ("dgx01,dgx07", "dgx01"),
        ("dgx[01-04,07]", "dgx01"),
        ("dgx[07,09],login1", "dgx07"),
        ("rack[1-2]node[03-04]-ib", "rack1node03-ib"),
    ],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_an_array_and_a_sweep_have_one_size() -> None:
    array = JOB | {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "2"}
    assert read_array_member(3, array) == 2 and read_array_member(3, JOB) is None and read_array_member(3, {}) is None
    with pytest.raises(ConfigError, match="--array=0-1"):
        read_array_member(2, array)


def test_what_the_batch_script_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_job_file("done", "")  # nobody waits
    assert claim_exit_code(1, "") and claim_exit_code(1, "")
    monkeypatch.setenv("SHARDWISE_JOB_DIR", str(tmp_path))
    monkeypatch.setenv("SHARDWISE_START", "3")
    assert job_folder() == tmp_path
    assert not has_begun("/runs/a")
    note_begun("/runs/a")
    assert has_begun("/runs/a") and not has_begun("/runs/b")
    note_begun("/runs/b")
    note_begun("/runs/c")
    note_begun("/runs/b", is_ours=False)
    assert has_begun("/runs/a") and has_begun("/runs/c") and not has_begun("/runs/b")
    assert claim_exit_code(1, "rank 1:\nTraceback\n  File\nValueError: x\n") and not claim_exit_code(1, "another")
    assert claim_exit_code(2, "error: y\nmore\n")
    assert (tmp_path / "start-3" / "code-1").read_text() == "ValueError: x\n"
    assert (tmp_path / "start-3" / "code-2").read_text() == "error: y\n"


@pytest.mark.parametrize(
    ("words", "step"),
    [([], 20), (["resume=STEP5"], 20), (["stage=validate", "resume=STEP5"], 5), (["name=another", "resume=STEP5"], 5)],
)
def test_a_requeued_job_goes_on_with_its_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], step: int
) -> None:
    """Whatever it was begun from; what looks at a checkpoint looks at the same one again."""
    for number in (5, 20):
        folder = tmp_path / f"runs/own/checkpoints/step-{number:08d}.ckpt"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text('{"format": 1, "files": {}}')
    monkeypatch.setenv("SHARDWISE_JOB_DIR", str(tmp_path))
    note_begun(str(tmp_path / "runs/own"))
    first = str(tmp_path / "runs/own/checkpoints/step-00000005.ckpt")
    words = ["name=own", *(word.replace("STEP5", first) for word in words)]
    _, [plan] = make_run_plans(compose([f"runs_dir={tmp_path}/runs", *words]).jobs, Host(0))
    assert plan.resume is not None and plan.resume.endswith(f"step-{step:08d}.ckpt")
