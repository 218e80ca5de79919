"""Telemetry of two ranks in real runs: one GPU a rank, whose NVML is made up (tests/harness/nvml.py)."""

from __future__ import annotations

import csv
import io
import json
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise.callbacks.telemetry import PrometheusExport
from shardwise.metrics.nvml import GPU_VALUES, HOST_VALUES, Nvml, Reader
from shardwise.metrics.prometheus import Exporter
from shardwise.metrics.telemetry import Gpu, Host
from shardwise.run_dir.events import read_events
from shardwise.run_dir.files import read_rows
from tests.harness.cells import cell_plan, fit
from tests.harness.commands import OWN, make_home, run
from tests.harness.nvml import PCI, UUID, FakeNvml, answering
from tests.harness.processes import spawn

WORDS = ["micro_batch_size=2", "global_batch_size=4", "max_steps=6", "schedule=none", "log_every_n_steps=2",
         "checkpoint=none"]  # fmt: skip
SAVES = ["checkpoint.asynchronous=false", "checkpoint.save_every_n_steps=2", "metrics.prometheus=http"]
LOOK = "metrics.telemetry_seconds=0.1"


class Slow(Callback):
    """Steps that take longer than a look, and a GPU that reports an error in the third."""

    def __init__(self, library: FakeNvml | None, error_in: int | None = None) -> None:
        self.library, self.error_in = library, error_in

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.library is not None and trainer.global_step == self.error_in:
            self.library.xids.append(79)
        time.sleep(0.15)


class Exported(Callback):
    """Keeps what hands the numbers to Prometheus, on rank 0."""

    exporter: Exporter | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (export,) = (one for one in trainer.callbacks if isinstance(one, PrometheusExport))  # type: ignore[attr-defined]
        self.exporter = export.exporter


def fit_with_gpus(run_dir: Path, rank: int, *words: str) -> dict[str, Any]:
    library, user_sees = FakeNvml(), io.StringIO()
    library.watts = 600.0 + 100 * rank

    def build_readers(gpu: Gpu | None) -> list[Reader]:
        return [Host(), Nvml(UUID, PCI)]

    where = "shardwise.callbacks.telemetry"
    with ExitStack() as patches:
        patches.enter_context(answering(library))
        patches.enter_context(patch(f"{where}.telemetry_values", lambda accelerator: GPU_VALUES | HOST_VALUES))
        patches.enter_context(patch(f"{where}.build_readers", build_readers))
        patches.enter_context(patch(f"{where}.console", lambda: user_sees))
        patches.enter_context(patch(f"{where}.gpu_of", lambda device: Gpu(UUID, PCI)))
        found = fit(cell_plan(run_dir, 2, *WORDS, *words), Slow(library, 3 if rank == 1 else None))
    names = {thread.name for thread in threading.enumerate()}
    return {
        "losses": found["losses"],
        "norms": found["norms"],
        "telemetry ended": "telemetry" not in names,
        "printed": user_sees.getvalue(),
    }


def run_all(folder: Path) -> dict[str, Any]:
    import os

    rank = int(os.environ["RANK"])
    gpus = fit_with_gpus(folder / "gpus", rank, LOOK)
    again = fit_with_gpus(folder / "gpus", rank, LOOK)  # as a restart that had saved nothing
    exported = Exported()
    hosts = fit(cell_plan(folder / "hosts", 2, *WORDS[:-1], *SAVES, LOOK), Slow(None), exported)
    off = fit(cell_plan(folder / "off", 2, *WORDS, "metrics.telemetry=false"))
    saves = None if exported.exporter is None else exported.exporter.numbers.of_run["saves"]
    return {
        "gpus": gpus, "again": again, "hosts": hosts["losses"], "off": (off["losses"], off["norms"]), "saves": saves
    }  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("telemetry")
    return folder, spawn(2, run_all, folder)


def rows_of(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_has_mean_and_extremes_with_their_ranks(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    last = rows_of(runs[0] / "gpus")[-1]
    found = {key: float(last[f"gpu/power_watts{key}"]) for key in ("", "_min", "_min_rank", "_max", "_max_rank")}
    assert found == {"": 650.0, "_min": 600.0, "_min_rank": 0.0, "_max": 700.0, "_max_rank": 1.0}
    assert float(last["gpu/sm_active"]) == pytest.approx(0.91) and float(last["host/rank_memory_gib"]) > 0
    watts = {row["rank"]: row["gpu/power_watts"] for row in read_rows(runs[0] / "gpus/ranks.csv")[-2:]}
    assert watts == {"0": "600", "1": "700"}
    hosts = rows_of(runs[0] / "hosts")[-1]
    assert float(hosts["host/cpu_busy"]) > 0 and not any(key.startswith("gpu/") for key in hosts)
    assert not any(key.startswith(("gpu/", "host/")) for key in rows_of(runs[0] / "off")[-1])


def test_an_error_of_one_gpu_is_an_event_with_its_rank_host_and_gpu(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    events = [event for event in read_events(runs[0] / "gpus") if event.kind == "xid"]
    assert [event.data["rank"] for event in events] == [1, 1]  # once in each of the two starts
    assert events[0].data["xid"] == 79 and events[0].data["gpu"] == f"GPU-{UUID}" and events[0].step == 3
    assert events[0].text.startswith("rank 1 on ") and "Xid 79" in events[0].text
    assert [rank["gpus"]["printed"] for rank in runs[1]] == ["", f"telemetry: {events[0].text}\n"]


def test_energy_is_that_of_all_gpus_and_adds_up_over_starts(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    summary = json.loads((runs[0] / "gpus/summary.json").read_text())
    kept = json.loads((runs[0] / "gpus/energy.json").read_text())
    of_rows = sum(float(row["gpu/energy_joules"] or 0) for row in read_rows(runs[0] / "gpus/ranks.csv"))
    assert summary["energy_kwh"] == pytest.approx(kept["joules"] / 3.6e6)
    # ranks.csv has the second start alone. Each look takes ten joules, and a start has more than six looks a rank.
    assert kept["joules"] % 10 == 0 and of_rows + 2 * 60 < kept["joules"]
    assert summary["joules_per_token"] == pytest.approx(kept["joules"] / kept["loss_weight"])
    tokens = summary["tokens_this_process"]
    assert kept["loss_weight"] == 2 * tokens
    assert "energy_kwh" in json.loads((runs[0] / "off/summary.json").read_text())


def test_a_run_is_the_same_with_and_without_and_ends_its_thread(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in runs[1]:
        assert rank["gpus"]["telemetry ended"]
    first = runs[1][0]
    assert first["off"] == (first["gpus"]["losses"], first["gpus"]["norms"])
    assert first["hosts"] == first["off"][0]


def test_prometheus_is_told_how_many_checkpoints_are_saved(runs: tuple[Path, list[dict[str, Any]]]) -> None:
    first, other = (rank["saves"] for rank in runs[1])
    assert first in (2, 3) and other is None  # the last row may come before the last of three saves


KILLER = """
from pathlib import Path
from lightning import Callback

class Killer(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 3 and os.environ["RANK"] == "0":
            found = [*Path("site").iterdir(), Path("runs/killed/metrics.prom")]
            Path("seen").write_text("\\n".join(f"{path.name} {path.stat().st_size > 20}" for path in found))
            os.kill(os.getpid(), 9)
"""


def test_the_launcher_removes_the_files_of_a_killed_rank(tmp_path: Path) -> None:
    home = make_home(tmp_path, KILLER)
    (home / "site").mkdir()
    words = ["callbacks.killer._target_=mine.Killer", "max_steps=9", "log_every_n_steps=1", "checkpoint=none",
             "metrics.prometheus=textfile", "metrics.prometheus_directory=site", "name=killed"]  # fmt: skip
    done = run(home, *OWN, *words)
    assert done.returncode == 137 and "prometheus: " in done.stdout and "rank 0 was killed" in done.stderr
    (site, own) = sorted((home / "seen").read_text().splitlines(), reverse=True)
    assert own == "metrics.prom True" and site.startswith("shardwise-killed-") and site.endswith(".prom True")
    assert list((home / "site").iterdir()) == [] and not (home / "runs/killed/metrics.prom").exists()
    refused = run(home, *OWN, *words[:-2], "metrics.prometheus_directory=absent", "name=refused")
    assert refused.returncode == 2 and not (home / "runs/refused").exists()
    assert "metrics.prometheus_directory=" in refused.stderr and "/absent is no folder: give" in refused.stderr
    assert "Traceback" not in refused.stderr
