"""What Slurm does to a job, done by a real one."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.harness.chaos import SUBJECT, compare
from tests.harness.commands import check, metrics, run
from tests.harness.slurm_jobs import (
    ROOT,
    WARNED,
    Fault,
    Submitted,
    all_tasks,
    call,
    node_failure,
    one_task,
    preemption,
    requeue,
    time_limit,
    whole_job,
    words,
)

STEPS = 200
WORDS = words(STEPS)


@pytest.fixture(scope="module", autouse=True)
def slurm_environment(slurm: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ |= slurm
    yield
    os.environ.clear()
    os.environ |= before


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "subject.py").write_text(SUBJECT)
    return folder


@pytest.fixture(scope="module")
def undisturbed(home: Path) -> Path:
    check(run(home, *WORDS, "devices=2", "name=undisturbed"))
    return home / "runs" / "undisturbed"


# On nodes of its own each; the two are disturbed at the same time
DISTURBED: dict[str, tuple[list[str], tuple[Fault, ...]]] = {
    "signalled": (["--nodelist=dgx[01-02]"], (one_task, all_tasks, whole_job, requeue)),
    "withdrawn": (["--nodelist=dgx[03-04]", "--partition=scavenge"], (preemption, time_limit, node_failure)),
}


def disturb(home: Path, name: str) -> Submitted:
    options, faults = DISTURBED[name]
    job = Submitted(
        home, ["--nodes=2", f"--signal=USR2@{WARNED}", *options], *WORDS, f"name={name}", "preflight=false", PAUSE="0.1"
    )
    for number, fault in enumerate(faults):
        job.wait(lambda at=STEPS * (number + 1) // 8: job.step() > at, f"the steps before {fault.__name__}")
        before = job.starts()
        fault(job)
        job.wait(lambda before=before: job.starts() > before, f"another start after {fault.__name__}")
    job.wait_for_end()
    return job


@pytest.mark.timeout(500)
def test_a_job_comes_back_and_is_the_run_that_nobody_touched(home: Path, undisturbed: Path) -> None:
    with ThreadPoolExecutor() as threads:
        jobs = list(threads.map(lambda name: disturb(home, name), DISTURBED))
    for job, (name, (_, faults)) in zip(jobs, DISTURBED.items(), strict=True):
        assert job.state() == "COMPLETED" and job.text().endswith("shardwise: done\n"), job.text()[-3000:]
        assert job.starts() == len(faults) + 1
        # All but a node's failure and Slurm's own requeue, which may kill first, have saved
        assert job.text().count("shardwise: exit code 5: stopped by ") >= len(faults) - 1, job.text()
        compare(home / "runs" / name, undisturbed)


def last_line(job: Submitted) -> str:
    return job.text().splitlines()[-1]


def test_the_readmes_line_and_what_reaches_the_plan(home: Path) -> None:
    """Two nodes × two tasks; `shardwise submit` says the same as sbatch would, and shows the log."""
    words = [*WORDS, "max_steps=20", "name=two-by-two", "strategy=fsdp", "preflight=false"]
    said = call(
        sys.executable, "-m", "shardwise", "submit", "nodes=2", "devices=2", "time=00:20:00", "follow=true", *words,
        cwd=home, PYTHONPATH=f"{ROOT}/src:{ROOT}",
    )  # fmt: skip
    assert "--nodes=2 --ntasks-per-node=2 --time=00:20:00" in said and said.endswith("shardwise: done")
    plan = json.loads((home / "runs/two-by-two/plan.json").read_text())
    assert (plan["launcher"], plan["topology"]["nodes"], plan["topology"]["devices"]) == ("slurm", 2, 2)
    assert plan["topology"]["shard"] == 4
    assert metrics(home / "runs/two-by-two", "train/loss").keys() == set(range(1, 21))
    assert said.count("step 20/20") == 1  # one rank speaks


def test_what_cannot_work_never_queues(home: Path) -> None:
    done = check(
        run(home, "submit", "nodes=2", "devices=2", *WORDS, "global_batch_size=7",
            command=[sys.executable, "-c", "import sys; sys.argv[1:2] = []; from shardwise_tools import main; "
                     "sys.exit(main())"], PYTHONPATH=f"{ROOT}/src:{ROOT}"), 2)  # fmt: skip
    assert "global_batch_size=7 is not a multiple of micro_batch_size * data_parallel_size = 2 * 4" in done.stderr
    assert "sbatch" not in done.stdout


@pytest.mark.parametrize("template", sorted((ROOT / "slurm").glob("*.sbatch")), ids=lambda path: path.stem)
def test_every_template_is_accepted(home: Path, template: Path) -> None:
    call("sbatch", "--test-only", "--nodes=4", template, "recipe=custom", cwd=home)
    with pytest.raises(AssertionError):
        call("sbatch", "--test-only", "--nodes=5", template, "recipe=custom", cwd=home)
    if template.stem != "generic":
        text = template.read_text()
        assert f"CLUSTER={template.stem}\n" in text and (ROOT / "conf/cluster" / f"{template.stem}.yaml").exists()
        assert "--ntasks-per-node=8" in text and "--gpus-per-node=8" in text


RECORDER = """#!{python}
import json, os, sys
with open({target!r} + os.environ["SLURM_PROCID"], "w") as file:
    json.dump({{"words": sys.argv[1:], "environment": dict(os.environ), "cwd": os.getcwd()}}, file)
{then}
"""
DONE = "open(os.environ['SHARDWISE_JOB_DIR'] + '/done', 'w').close()"


def recorder(home: Path, then: str = DONE) -> tuple[Path, Path]:
    """A program in Python's place, which writes down what it was started with; and where."""
    program, target = home / f"recorder-{len(list(home.glob('recorder-*')))}", home / "recorded-"
    program.write_text(RECORDER.format(python=sys.executable, target=str(target), then=then))
    program.chmod(0o755)
    return program, target.with_name("recorded-0")


@pytest.fixture(scope="module")
def record(home: Path) -> tuple[Path, Path]:
    return recorder(home)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    words=st.lists(
        st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=30),
        max_size=20,
    )
)
def test_overrides_arrive_unchanged_and_are_never_run(home: Path, record: tuple[Path, Path], words: list[str]) -> None:
    trap = home / "trap"
    words = [*words, f"name='a b' $(touch {trap}) `touch {trap}`; touch {trap} & \"$HOME\" \\", "a=[b,c]", "d={e: f}",
             "two\nlines\n", "*", "~", "!x", "# no comment", "--nodes=7", "-m", f"| touch {trap}"]  # fmt: skip
    program, recorded = record
    recorded.unlink(missing_ok=True)
    job = Submitted(home, ["--nodes=1"], *words, PYTHON=str(program))
    assert job.wait_for_end() == "COMPLETED", job.text()
    assert json.loads(recorded.read_text())["words"] == [f"{ROOT}/train.py", *words]
    assert not trap.exists()


def test_a_container_gets_what_the_bare_run_gets(home: Path, record: tuple[Path, Path]) -> None:
    """As pyxis is asked for it; the testbed's stand-in writes into the task's environment what it was asked."""
    program, recorded = record
    job = Submitted(
        home, ["--nodes=1"], "seed=1", PYTHON=str(program), CONTAINER="registry/image:24.01", NCCL_DEBUG="INFO",
        CONTAINER_MOUNTS="/data:/data:ro", template=ROOT / "slurm/dgx_h100.sbatch",
    )  # fmt: skip
    assert job.wait_for_end() == "COMPLETED", job.text()
    found = json.loads(recorded.read_text())["environment"]
    assert json.loads(recorded.read_text())["words"] == [f"{ROOT}/train.py", "cluster=dgx_h100", "seed=1"]
    assert found["SHARDWISE_STUB_CONTAINER_IMAGE"] == "registry/image:24.01"
    assert found["SHARDWISE_STUB_CONTAINER_MOUNTS"] == f"{ROOT}:{ROOT},{home}:{home},/data:/data:ro"
    assert found["SHARDWISE_STUB_CONTAINER_WORKDIR"] == str(home)
    passed = set(found["SHARDWISE_STUB_CONTAINER_ENV"].split(","))
    assert {"NCCL_DEBUG", "SHARDWISE_JOB_DIR", "SHARDWISE_START", "OMP_NUM_THREADS", "PYTHONPATH"} <= passed
    assert found["SLURM_CPUS_PER_TASK"] == "28"  # of the node's 224, for eight tasks


def test_a_users_mistake_is_not_requeued(home: Path) -> None:
    job = Submitted(home, ["--nodes=2"], *WORDS, "global_batch_size=7", "name=mistake", "preflight=false")
    assert job.wait_for_end() == "FAILED"
    told = "error: global_batch_size=7 is not a multiple of micro_batch_size * data_parallel_size = 2 * 2; use 4 or 8"
    assert last_line(job) == f"shardwise: not requeued: exit code 2: {told}"
    assert job.text().splitlines().count(told) == 1 and job.starts() == 1  # of two ranks


def test_a_loss_that_is_no_number_is_not_requeued(home: Path) -> None:
    (home / "nan.py").write_text(
        "from subject import *\n\nclass Bad(Subject):\n    def training_step(self, batch, batch_idx):\n"
        "        return self.loss(batch) * (float('nan') if self.global_step == 4 else 1)\n"
    )
    job = Submitted(home, ["--nodes=1"], *WORDS, "module._target_=nan.Bad", "name=no-number")
    assert job.wait_for_end() == "FAILED"
    assert last_line(job).startswith("shardwise: not requeued: exit code 3: error: "), job.text()
    assert job.starts() == 1


def test_a_crash_is_tried_again_while_it_makes_progress(home: Path) -> None:
    (home / "crashing.py").write_text(
        "from subject import *\n\nclass Bad(Subject):\n    def training_step(self, batch, batch_idx):\n"
        "        if self.global_step in (15, 16): raise RuntimeError('broken by hand')\n"
        "        return self.loss(batch)\n"
    )
    job = Submitted(
        home, ["--nodes=1"], *WORDS, "module._target_=crashing.Bad", "name=crash", RESTARTS_WITHOUT_PROGRESS="1"
    )
    assert job.wait_for_end() == "FAILED"
    told = "not requeued: 1 restart has saved nothing new: exit code 1: error: RuntimeError: broken by hand"
    assert last_line(job) == f"shardwise: {told}", job.text()
    assert job.starts() == 3  # the first has saved step 10, the second begins there, and the third does
    assert job.text().count("RuntimeError: broken by hand; requeued") == 2


def test_an_end_with_0_that_nobody_has_announced_is_no_end(home: Path) -> None:
    """As a stopped Lightning job ends."""
    program, _ = recorder(home, then="")
    job = Submitted(home, ["--nodes=1"], PYTHON=str(program), RESTARTS_WITHOUT_PROGRESS="0")
    assert job.wait_for_end() == "FAILED"
    assert "srun ended with 0, and the run has not said that it is done" in job.text()


SICK = """
import os, sys
words = sys.argv[1:]
if words[:3] == ["-m", "shardwise", "preflight"]:
    from shardwise.preflight import node_report
    from shardwise_tools import main
    healthy = node_report.read_versions
    if os.uname().nodename == "dgx02":
        node_report.read_versions = lambda: healthy() | {"lightning": "another"}
    sys.exit(main(words[2:]))
"""


@pytest.mark.parametrize(
    ("options", "words", "told"),
    [
        ([], [], None),
        ([], ["exclude_bad_nodes=false"], "the others"),
        (["--exclude=dgx04"], [], "too few nodes are left without it"),
    ],
)
def test_a_bad_node_is_named_and_left_out(home: Path, options: list[str], words: list[str], told: str | None) -> None:
    program, _ = recorder(home, then=SICK + DONE)
    job = Submitted(home, ["--nodes=3", *options], "accelerator=cpu", *words, PYTHON=str(program))
    assert job.wait_for_end() == ("FAILED" if told else "COMPLETED"), job.text()
    assert "preflight: dgx02: lightning another, the others" in job.text(), job.text()
    first, *later = re.findall(r"start \d of \S+ on (\S+) ", job.text())
    assert first == "dgx[01-03]" and later == ["dgx[01,03-04]"] * (told is None)
    if told:
        assert last_line(job).startswith("shardwise: not requeued: exit code 7: ") and told in last_line(job)


def test_a_sweep_is_a_job_array(home: Path) -> None:
    """And a member is a job of its own: the last has the array's number, and comes back alone."""
    (home / "third.py").write_text(
        "from subject import *\n\nclass Own(Subject):\n    def training_step(self, batch, batch_idx):\n"
        "        bad = self.global_step == 4 and self.trainer.loggers[0].version == 'sweep-0'\n"
        "        return super().training_step(batch, batch_idx) * (float('nan') if bad else 1)\n"
    )
    words = [*WORDS, "module._target_=third.Own", "max_steps=30", "name=sweep", "-m", "seed=5,6,7"]
    job = Submitted(home, ["--nodes=1", "--array=0-2", "--output=slurm-%A_%a.log"], *words, PAUSE="0.1")
    logs = [home / f"slurm-{job.id}_{member}.log" for member in range(3)]
    job.wait(lambda: logs[2].exists() and "\nstep 5/" in logs[2].read_text(), "the last member's fifth step")
    call("scancel", "--signal=TERM", f"{job.id}_2")
    job.wait(lambda: not call("squeue", "--noheader", f"--jobs={job.id}", check=False), "the array's end")
    texts = [log.read_text() for log in logs]
    assert [text.count("shardwise: start ") for text in texts] == [1, 1, 2], texts
    assert "not requeued: exit code 3: " in texts[0].splitlines()[-1]
    for member, seed in ((1, 6), (2, 7)):
        assert texts[member].endswith("shardwise: done\n")
        assert json.loads((home / f"runs/sweep-{member}/plan.json").read_text())["seed"] == seed
        assert metrics(home / f"runs/sweep-{member}", "train/loss").keys() == set(range(1, 31))
    table = texts[2].partition("the sweep, best first:\n")[2]  # of the member that ended last
    assert "seed=5  failed, exit code 3" in table and f"curves: {home}/runs/sweep.png" in table, texts[2]
    assert (home / "runs/sweep.png").exists()


DRY = f"{sys.executable} {ROOT}/train.py recipe=custom module._target_=a.B data._target_=a.C micro_batch_size=1 " \
      "global_batch_size=8 max_steps=1 accelerator=cpu dry_run=true devices=2; true"  # fmt: skip


@pytest.mark.parametrize(
    "started",
    [
        ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", "bash", "-c", DRY],
        ["salloc", "--quiet", "--ntasks=4", "bash", "-c", DRY],
        ["script", "-qec", shlex.join(["srun", "--pty", "--ntasks=1", "bash", "-c", DRY]), "/dev/null"],
        ["script", "-qec", shlex.join(["srun", "--pty", "--ntasks=2", "bash", "-c", DRY]), "/dev/null"],
    ],
    ids=["salloc", "salloc, four tasks", "a shell in a terminal", "a shell in a terminal, two tasks"],
)
def test_a_shell_in_a_job_starts_its_own_ranks(home: Path, started: list[str]) -> None:
    said = call(*started, cwd=home)
    assert '"launcher": "local"' in said and '"run_id": "slurm-' not in said and '"devices": 2' in said


def test_a_single_task_starts_its_own_ranks(home: Path) -> None:
    said = call("srun", "--ntasks=1", "bash", "-c", DRY, cwd=home)
    assert '"launcher": "local"' in said and '"run_id": "slurm-' in said and '"devices": 2' in said


def test_srun_alone_starts_ranks(home: Path) -> None:
    said = call("srun", "--nodes=2", "--ntasks-per-node=1", "bash", "-c", DRY.replace("devices=2", ""), cwd=home)
    assert (
        said.count('"launcher": "slurm"') == 2 and said.count('"nodes": 2') == 4
    )  # in the options and in the topology
