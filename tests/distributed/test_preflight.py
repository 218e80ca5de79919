"""Preflights of several nodes that are pretended: real ranks over gloo, each of which is told by Slurm's own variables
which node it is on. What is broken is broken in the ranks themselves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.preflight.place import Limits
from tests.harness.commands import RECIPE, check, environment, make_home, run
from tests.harness.patience import Patience, slowness
from tests.harness.processes import _context

WORDS = ["accelerator=cpu", "runs_dir=runs"]
LIMITS = Limits(arrive=40.0, total=60.0, grace=2.0)


class Done:
    def __init__(self, folder: Path, codes: list[int | None], seconds: float) -> None:
        self.folder, self.codes, self.seconds = folder, codes, seconds
        self.out, self.err = ((folder / f"0.{name}").read_text() for name in ("out", "err"))
        self.others = "".join((folder / f"{rank}.{name}").read_text() for rank in range(1, len(codes))
                              for name in ("out", "err") if (folder / f"{rank}.{name}").exists())  # fmt: skip
        self.job = folder / "job"

    @property
    def said(self) -> str:
        return "".join(f"{line}\n" for line in self.err.splitlines() if line.startswith("preflight: "))

    @property
    def record(self) -> Any:
        return json.loads((self.job / "preflight.json").read_text())


def fly(
    folder: Path, nodes: int, breaks: Callable[[int], None] | None = None, *words: str, devices: int = 2,
    limits: Limits = LIMITS, absent: tuple[int, ...] = (), told: bool = True,
) -> Done:  # fmt: skip
    """`srun … python -m shardwise preflight …` on dgx01, dgx02 …; `breaks(rank)` runs in each rank before."""
    (folder / "job").mkdir()
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    slow = slowness()
    limits = Limits(limits.arrive * slow, limits.total * slow, limits.grace * slow)
    context, patience = _context(), Patience(90)
    ranks = {
        rank: context.Process(target=_rank, args=(rank, nodes, devices, port, folder, breaks, [*WORDS, *words], limits))
        for rank in range(nodes * devices) if rank not in absent
    }  # fmt: skip
    try:
        for process in ranks.values():
            process.start()
        while any(process.is_alive() for process in ranks.values()) and not patience.is_over():
            time.sleep(0.05)
        codes = [ranks[rank].exitcode if rank in ranks else None for rank in range(nodes * devices)]
    finally:
        for process in ranks.values():
            process.kill()
            process.join()
    done = Done(folder, codes, patience.spent)
    expected = {code for rank, code in enumerate(codes) if rank not in absent and code != -signal.SIGKILL}
    assert len(expected) == 1, (codes, done.out, done.err, done.others)
    if told:
        assert done.others == "", done.others
    return done


def _rank(
    rank: int, nodes: int, devices: int, port: int, folder: Path, breaks: Any, words: list[str], limits: Limits
) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(folder)
    os.environ |= {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(nodes * devices),
        "SLURM_STEP_TASKS_PER_NODE": f"{devices}(x{nodes})", "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NODELIST": f"dgx[01-{nodes:02}]", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % devices),
        "SLURM_NODEID": str(rank // devices), "SLURMD_NODENAME": f"dgx{rank // devices + 1:02}",
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "SHARDWISE_JOB_DIR": str(folder / "job"),
    }  # fmt: skip
    import torch

    from shardwise.preflight import place, verdict
    from shardwise.preflight.run import run

    verdict.SHARE_OF_OTHERS = {False: 0.0}  # six ranks on two cores are not equally fast
    torch.set_num_threads(1)
    place.STARTED = time.monotonic()  # this is a fork
    if breaks is not None:
        breaks(rank)
    run(words, limits)


def test_nodes_that_are_well(tmp_path: Path) -> None:
    done = fly(tmp_path, 3)
    assert done.codes == [0] * 6 and done.said == "" and "preflight: well, in " in done.out
    rows = [line.split() for line in done.out.splitlines() if line.startswith("dgx")]
    assert [row[0] for row in rows] == ["dgx01", "dgx02", "dgx03"] and {row[-1] for row in rows} == {"well"}
    record = done.record
    assert record["exit_code"] == 0 and record["pairs_are_of"] == "nodes"
    assert [pair[:2] for pair in record["pairs_gb_per_second"]] == [[0, 1], [0, 2], [1, 2]]
    assert all(pair[2] > 0 for pair in record["pairs_gb_per_second"])
    assert all(node["in_node_gb_per_second"] > 0 and abs(node["skew_seconds"]) < 0.5 for node in record["nodes"])
    assert (done.job / "preflight.png").read_bytes().startswith(b"\x89PNG")
    assert not (done.job / "bad-nodes").exists() and not (tmp_path / "runs").exists()


def _another_version(rank: int) -> None:
    import shardwise.preflight.node_report

    real = shardwise.preflight.node_report.read_versions
    if rank == 4:
        shardwise.preflight.node_report.read_versions = lambda: real() | {"lightning": "2.6.5"}


def test_another_version_is_named_and_its_node_left_out(tmp_path: Path) -> None:
    done = fly(tmp_path, 3, _another_version)
    assert done.codes == [7] * 6
    assert done.said == "preflight: dgx03: lightning 2.6.5, the others 2.6.6\npreflight: bad: dgx03\n"
    assert (done.job / "bad-nodes").read_text() == "dgx03\n"
    assert (done.job / "start-1" / "code-7").read_text() == "preflight: dgx03: lightning 2.6.5, the others 2.6.6\n"
    assert done.record["bad_nodes"] == ["dgx03"] and done.record["pairs_gb_per_second"]


def test_who_never_arrives_is_named(tmp_path: Path) -> None:
    done = fly(tmp_path, 2, absent=(3,), limits=Limits(arrive=6.0, total=60.0, grace=1.0))
    assert done.codes == [7, 7, 7, None] and done.seconds < 40
    assert "preflight: dgx02: rank 3 did not arrive in " in done.said
    assert (done.job / "bad-nodes").read_text() == "dgx02\n"
    assert "silent" not in done.out and done.record["pairs_gb_per_second"] == []


def test_without_rank_0_the_others_end_and_say_whom_they_miss(tmp_path: Path) -> None:
    (tmp_path / "0.out").touch()
    (tmp_path / "0.err").touch()
    done = fly(tmp_path, 2, absent=(0,), devices=1, limits=Limits(arrive=2.0, total=20.0, grace=0.5), told=False)
    assert done.codes == [None, 7] and done.seconds < 20
    assert "dgx02: rank 1 cannot reach rank 0 at localhost:" in done.others


def _gives_something_else(rank: int) -> None:
    from shardwise.preflight.measure import Measures

    real = Measures.fill

    def fill(self: Measures, rank: int) -> None:
        real(self, rank)
        if rank == 3:
            self.buffer[100] += 1

    Measures.fill = fill  # type: ignore[method-assign]


def _gets_something_else(rank: int) -> None:
    import torch.distributed as dist

    real = dist.all_reduce

    def all_reduce(tensor: Any, *more: Any, **words: Any) -> None:
        real(tensor, *more, **words)
        if rank == 3 and dist.get_world_size() == 4 and len(tensor) > 1:
            tensor[7:9] += 1

    dist.all_reduce = all_reduce


@pytest.mark.parametrize(
    ("breaks", "text"),
    [(_gives_something_else, "1 wrong value of its own in an all-reduce inside the node"),
     (_gets_something_else, "2 wrong sums in an all-reduce over all ranks")],
)  # fmt: skip
def test_a_wrong_sum_is_seen_and_named(tmp_path: Path, breaks: Any, text: str) -> None:
    done = fly(tmp_path, 2, breaks)
    assert done.codes == [7] * 4
    assert f"preflight: dgx02: rank 3 has {text}\n" in done.said and "dgx01:" not in done.said
    assert (done.job / "bad-nodes").read_text() == "dgx02\n"


def _is_killed(rank: int) -> None:
    from shardwise.preflight.measure import Measures

    if rank == 2:
        Measures.pairs = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign]


def _hangs(rank: int) -> None:
    from shardwise.preflight.measure import Measures

    if rank == 2:
        Measures.check_sum = lambda *_: threading.Event().wait()  # type: ignore[assignment,method-assign,return-value]


def _raises(rank: int) -> None:
    from shardwise.preflight.measure import Measures

    def raises(*_: Any) -> Any:
        raise RuntimeError("no such adapter")

    if rank == 2:
        Measures.all_reduce_bandwidth = raises  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("breaks", "text"),
    [(_is_killed, "dgx02: rank 2 fell silent, at "), (_raises, "dgx02: rank 2: no such adapter (RuntimeError)"),
     (_hangs, "dgx02: ranks 2, 3 came no further than a sum inside its node; the others are at a process")],
)  # fmt: skip
def test_a_rank_that_is_lost_on_the_way_is_named(tmp_path: Path, breaks: Any, text: str) -> None:
    limits = Limits(arrive=30.0, total=11.0 if breaks is _hangs else 60.0, grace=1.0)
    done = fly(tmp_path, 2, breaks, limits=limits)
    assert set(done.codes) <= {7, -signal.SIGKILL} and done.seconds < 40
    assert f"preflight: {text}" in done.said and "dgx01:" not in done.said
    assert (done.job / "bad-nodes").read_text() == "dgx02\n"


def test_nobody_is_left_out_against_the_users_word(tmp_path: Path) -> None:
    done = fly(tmp_path, 3, _another_version, "exclude_bad_nodes=false", devices=2)
    assert done.codes == [7] * 6 and "preflight: exclude_bad_nodes=false: none is left out" in done.said
    assert not (done.job / "bad-nodes").exists()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("home"))


def test_alone_it_starts_its_own_processes(home: Path) -> None:
    command = [sys.executable, "-m", "shardwise", "preflight", *WORDS, "devices=2"]
    done = check(subprocess.run(command, cwd=home, env=_with_source(), capture_output=True, text=True, check=False))
    assert "preflight: well" in done.stdout and done.stderr == ""
    [folder] = (home / "runs").glob("preflight-*")
    assert {path.name for path in folder.iterdir()} == {"preflight.json", "preflight.png"}
    assert json.loads((folder / "preflight.json").read_text())["pairs_are_of"] == "processes"


def test_under_torchrun(home: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "shardwise",
               "preflight", *WORDS]  # fmt: skip
    done = check(subprocess.run(command, cwd=home, env=_with_source(), capture_output=True, text=True, check=False))
    assert done.stdout.count("preflight: well") == 1


def test_a_run_does_not_start_on_what_is_not_well(home: Path) -> None:
    words = [*RECIPE, "max_steps=1", "preflight=true", "name=not-well", "accelerator=auto", "cluster=dgx_h100"]
    done = check(run(home, *words, CUDA_VISIBLE_DEVICES=""), 7)
    assert "0 GPUs, cluster=dgx_h100 has 8" in done.stderr and not (home / "runs/not-well").exists()


def _with_source() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    return environment(PYTHONPATH=os.pathsep.join([str(root / "src"), str(root)]))
