"""Callbacks of the user's own under two ranks: what works, in which order, and their state in the checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from shardwise.errors import ConfigError
from tests.harness.cells import cell_plan, fit
from tests.harness.processes import spawn
from tests.harness.selected import needed

THEIRS = "lightning.pytorch.callbacks"
CELLS = {"ddp": ["strategy=ddp"], "fsdp": ["strategy=fsdp"]}
# Validation never improves by so much: with a patience of 2 the third validation stops the run.
STOP = [
    f"callbacks.stop._target_={THEIRS}.EarlyStopping", "callbacks.stop.monitor=validation/loss",
    "callbacks.stop.min_delta=1000", "callbacks.stop.patience=2",
    f"callbacks.other._target_={THEIRS}.EarlyStopping", "callbacks.other.monitor=validation/loss",
    "callbacks.other.mode=max", "callbacks.other.patience=50",
]  # fmt: skip
OTHERS = [
    f"callbacks.{name}._target_={THEIRS}.{name}"
    for name in ("LearningRateMonitor", "DeviceStatsMonitor", "ModelSummary", "LambdaCallback", "Timer")
]
COMMON = ["micro_batch_size=2", "global_batch_size=8", "validate_every_n_steps=1", "checkpoint.save_at_end=true"]


class StopsInWindow(Callback):
    """Asks to stop after the first of two micro-batches of step 2."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            trainer.should_stop = True


def stops(folder: Path, words: list[str]) -> dict[str, Any]:
    """Interrupted after its second validation, the run stops where one that was not interrupted does."""
    whole = cell_plan(folder / "whole", 2, *words, *COMMON, *STOP, *OTHERS, "max_steps=9")
    fit(whole)
    fit(cell_plan(folder / "parts", 2, *words, *COMMON, *STOP, "max_steps=2"))
    resume = f"resume={folder / 'parts/checkpoints/step-00000002.ckpt'}"
    fit(cell_plan(folder / "parts", 2, *words, *COMMON, *STOP, resume, "max_steps=9"))
    plan = cell_plan(folder / "window", 2, *words, *COMMON, "max_steps=9", "checkpoint=none",
                     "callbacks.mine._target_=tests.distributed.test_callbacks.StopsInWindow")  # fmt: skip
    fit(plan)
    fit(cell_plan(folder / "waits", 2, *words, *COMMON, "max_steps=9", "checkpoint=none", "min_steps=6",
                  "callbacks.mine._target_=tests.distributed.test_callbacks.StopsInWindow"))  # fmt: skip
    names = ("whole", "parts", "window", "waits") if os.environ["RANK"] == "0" else ()  # rank 0 has written them
    summaries: dict[str, Any] = {n: json.loads((folder / n / "summary.json").read_text()) for n in names}
    for kind in ("ModelCheckpoint", "StochasticWeightAveraging"):
        try:
            fit(cell_plan(folder / kind, 2, *words, *COMMON, "max_steps=1", "checkpoint=none", f"+module.brings={kind}",
                          "module._target_=tests.distributed.test_callbacks.bring"))  # fmt: skip
            summaries[kind] = "trained"
        except ConfigError as error:
            summaries[kind] = str(error)
    return summaries


def bring(brings: str, **words: Any) -> Any:
    """A module with a `configure_callbacks` of its own."""
    from lightning.pytorch import callbacks

    from recipes.language_modeling.module import LanguageModel

    class Brings(LanguageModel):
        def configure_callbacks(self) -> Any:
            more = {"swa_lrs": 0.1} if brings == "StochasticWeightAveraging" else {"monitor": "validation/loss"}
            return getattr(callbacks, brings)(**more)

    return Brings(**words)


def run_all(folder: Path, names: set[str] | None) -> dict[str, Any]:
    return {name: stops(folder / name, CELLS[name]) for name in CELLS if names is None or name in names}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return spawn(2, run_all, tmp_path_factory.mktemp("callbacks"), needed(request, "name"))[0]


@pytest.mark.parametrize("name", CELLS)
def test_an_early_stop_is_told_and_its_count_survives_a_resume(runs: Any, name: str) -> None:
    for run in ("whole", "parts"):
        stop = runs[name][run]["stopped_early"]
        assert (stop["step"], stop["by"], runs[name][run]["steps"]) == (3, "EarlyStopping", 3), run
        assert "did not improve in the last 2 records" in stop["reason"]


@pytest.mark.parametrize("name", CELLS)
def test_an_early_stop_waits_for_the_end_of_the_window(runs: Any, name: str) -> None:
    summary = runs[name]["window"]
    assert (summary["steps"], summary["samples"], summary["stopped_early"]["by"]) == (2, 16, "StopsInWindow")


@pytest.mark.parametrize("name", CELLS)
def test_an_early_stop_waits_for_min_steps(runs: Any, name: str) -> None:
    summary = runs[name]["waits"]
    assert (summary["steps"], summary["stopped_early"]["by"]) == (6, "StopsInWindow")


@pytest.mark.parametrize("name", CELLS)
def test_of_the_modules_own_callbacks_a_model_checkpoint_is_left_out_and_others_are_refused(
    runs: Any, name: str
) -> None:
    assert runs[name]["ModelCheckpoint"] == "trained"
    assert runs[name]["StochasticWeightAveraging"].startswith("callback StochasticWeightAveraging is refused: ")
