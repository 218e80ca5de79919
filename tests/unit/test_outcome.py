"""What a launcher makes of its ranks' ends."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.launch import local
from shardwise.launch.local import launch, outcome

CRASH, USER, SAVED, HANG = 1, 2, 5, 6


def rank(number: int, code: int, said: tuple[float, int, str] | None = None, killed: bool = False) -> Any:
    report = None if said is None else dict(zip(("time", "code", "text"), said, strict=True))
    return SimpleNamespace(number=number, code=code, killed=killed, report=lambda: report)


@pytest.mark.parametrize(
    ("ranks", "told", "code", "text"),
    [
        ([rank(0, 0), rank(1, 0)], None, 0, ""),
        # The first that said something; what the other says is its consequence
        ([rank(0, 1, (2.0, CRASH, "late")), rank(1, 1, (1.0, CRASH, "first"))], None, 1, "first"),
        # A known reason is nobody's consequence
        ([rank(0, 1, (1.0, CRASH, "lost rank 1")), rank(1, 2, (2.0, USER, "odd data"))], None, 2, "odd data"),
        # Nor is a death without a word
        ([rank(0, 1, (1.0, CRASH, "lost rank 1")), rank(1, -9)], None, 137, "rank 1 was killed by SIGKILL (out of"),
        ([rank(0, -9, killed=True), rank(1, 4, (1.0, 4, "memory"))], None, 4, "memory"),
        ([rank(0, 5), rank(1, -9, killed=True)], None, 1, "rank 0 ended by itself with exit code 5"),
        ([rank(0, 1, (1.0, CRASH, "lost rank 1")), rank(1, 0)], None, 1, "rank 1 ended by itself with exit code 0"),
        ([rank(0, -9, killed=True), rank(1, -11)], None, 139, "rank 1 was killed by SIGSEGV"),
        ([rank(0, 6, (1.0, HANG, "no progress")), rank(1, -9, killed=True)], None, 6, "no progress"),
        # Told to stop
        ([rank(0, 5, (2.0, SAVED, "saved")), rank(1, 5, (1.0, SAVED, "saved"))], signal.SIGTERM, 5, "saved"),
        ([rank(0, -15), rank(1, 1, (1.0, CRASH, "lost rank 0"))], signal.SIGTERM, 143, "stopped by SIGTERM"),
        ([rank(0, -9, killed=True), rank(1, -9, killed=True)], signal.SIGINT, 130, "stopped by Ctrl-C"),
        ([rank(0, 0), rank(1, 0)], signal.SIGTERM, 0, ""),  # it was through
        ([rank(0, 1, (1.0, CRASH, "a bug")), rank(1, -9, killed=True)], signal.SIGTERM, 1, "a bug"),
        # One rank alone was told, before there was anything to save
        ([rank(0, 1, (1.0, CRASH, "lost rank 1")), rank(1, -15)], None, 143, "rank 1 was killed by SIGTERM"),
    ],
)
def test_the_outcome_of_a_start(ranks: list[Any], told: int | None, code: int, text: str) -> None:
    found, said = outcome(ranks, told)
    assert found == code
    assert text in said and bool(text) == bool(said)


ENDS = [(143, 1), (140, 1), (SAVED, 1), (USER, 1), (CRASH, 2), (HANG, 2), (137, 2)]


@pytest.mark.parametrize(("code", "starts"), ENDS)
def test_what_is_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, starts: int) -> None:
    """Not what a signal has told to leave, though it had nothing to save yet."""
    aside = tmp_path / "checkpoints" / "step-00000001.ckpt.old.partial"  # killed while another one was to get its name
    aside.mkdir(parents=True)
    begun: list[Any] = []
    monkeypatch.setattr(local._Start, "run", lambda self, plan: begun.append(plan) or code)
    size = SimpleNamespace(world_size=2)
    plan: Any = SimpleNamespace(
        launcher="local",
        topology=size,
        max_restarts=1,
        stage="fit",
        run_dir=str(tmp_path),
        resume=None,
        environment={},
        profile=SimpleNamespace(tool="torch"),
    )
    assert launch(plan, True) == code and len(begun) == starts
    assert aside.exists() == (starts == 1)


def test_nobody_else_reaches_the_store_of_ranks_on_one_node() -> None:
    store = local.local_store()
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    port = f"{store.port:04X}"
    assert {row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port}")} == {f"0100007F:{port}"}
    given = local.rank_environment(2, store.port)
    client = dist.TCPStore(given["MASTER_ADDR"], int(given["MASTER_PORT"]), wait_for_workers=False)
    client.set("asked", "yes")
    assert store.get("asked") == b"yes"
