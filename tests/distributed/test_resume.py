"""A run that was stopped and goes on equals one that was not; what a kill left behind is no checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardwise.checkpoint.publish import describe
from shardwise.config.compose import compose
from shardwise.data.tokens import TokenSequences, TokenShards
from shardwise.distributed.mesh import init_process_group
from shardwise.errors import ConfigError
from shardwise.plan import Host
from shardwise.plan.resolve import make_plan
from shardwise.rank import quiet_lightning, run_stage
from shardwise.run_dir.checkpoints import list_checkpoints
from shardwise.run_dir.resume import resolve_resume
from tests.harness.commands import RECIPE, make_home, metrics
from tests.harness.processes import spawn

# 5 steps an epoch; 8 steps cross its border
WORDS = [*RECIPE, "global_batch_size=4", "validate_every_n_steps=2", "checkpoint.save_every_n_steps=2", "max_steps=8"]
STRATEGIES = ["ddp", "fsdp"]
# One micro-batch a step, and two
WORDS_OF = {"ddp": ["strategy=ddp", "micro_batch_size=2"], "fsdp": ["strategy=fsdp", "micro_batch_size=1"]}
ZERO = {
    "zero1": ["strategy=zero1", "precision=bf16", "micro_batch_size=1"],
    "zero3": ["strategy=zero3", "micro_batch_size=1"],
}
STOPS = [4, 5]  # within an epoch, at its end
COLUMNS = ("train/loss", "train/gradient_norm", "train/samples")


def start(ranks: int, name: str, *words: str) -> None:
    """In each rank: what train.py does there, without a process of its own for each run."""
    quiet_lightning()
    plan = make_plan(compose([*WORDS, f"devices={ranks}", f"name={name}", *words]).jobs[0].config, Host(0))
    plan = dataclasses.replace(plan, resume=resolve_resume(plan.resume, plan.run_dir, plan.stage))
    if not dist.is_initialized():
        init_process_group(plan)
    dist.barrier()
    if dist.get_rank() == 0:
        Path(plan.run_dir).mkdir(parents=True, exist_ok=True)
        if plan.stage == "fit":
            (Path(plan.run_dir) / "plan.json").write_text(plan.to_json())
    dist.barrier()
    with patch("shardwise.callbacks.summary.plot_losses", return_value=None):  # half of the time of such a run
        run_stage(plan)


def on_two_ranks(home: Path) -> None:
    os.chdir(home)
    for strategy in STRATEGIES:
        words = WORDS_OF[strategy]
        start(2, strategy, *words)
        for stop in STOPS:
            start(2, f"{strategy}-{stop}", *words, f"max_steps={stop}")
            start(2, f"{strategy}-{stop}", *words, "resume=auto")
        start(2, strategy, *words, "stage=validate", "resume=auto")
        start(2, strategy, *words, "stage=predict", "resume=auto", "module.sample_tokens=1")
        start(2, f"{strategy}-branch", *words, f"resume=runs/{strategy}/checkpoints/step-00000006.ckpt")
    for strategy, words in ZERO.items():
        start(2, strategy, *words)
        start(2, f"{strategy}-4", *words, "max_steps=4")
        start(2, f"{strategy}-4", *words, "resume=auto")
        start(2, strategy, *words, "stage=validate", "resume=auto")
    for stop in (3, 5):  # with validation at the end of an epoch, which a resumed run must find
        words = [*WORDS_OF["fsdp"], "validate_every_n_steps=null", "checkpoint.save_every_n_steps=null", "max_steps=12"]
        start(2, f"epochs-{stop}", *words, f"max_steps={stop}")
        start(2, f"epochs-{stop}", *words, "resume=auto")
    start(2, "epochs", *words)
    # A run killed at step 7: rows beyond its last checkpoint, a row cut short, and a checkpoint half written
    start(2, "killed", "strategy=fsdp", "max_steps=7", "checkpoint.keep_last=3")
    if dist.get_rank() == 0:
        checkpoints = home / "runs" / "killed" / "checkpoints"
        (checkpoints / "step-00000007.ckpt" / "manifest.json").unlink()
        shutil.copytree(checkpoints / "step-00000006.ckpt", checkpoints / "step-00000008.ckpt.partial")
        with (home / "runs" / "killed" / "metrics.csv").open("a") as file:
            file.write("8,64.0,5.1")
    start(2, "killed", "strategy=fsdp", "resume=auto")
    start(2, "fresh", "max_steps=2", "resume=auto")


def on_one_rank(home: Path) -> list[str]:
    os.chdir(home)
    errors = []
    for strategy, words in ZERO.items():
        shutil.copytree(f"runs/{strategy}", f"runs/{strategy}-alone")
        start(1, f"{strategy}-alone", *words, "stage=validate", "resume=auto")
    for strategy in STRATEGIES:
        shutil.copytree(f"runs/{strategy}", f"runs/{strategy}-alone")
        start(1, f"{strategy}-alone", f"strategy={strategy}", "stage=validate", "resume=auto")
        start(1, f"{strategy}-alone", f"strategy={strategy}", "stage=predict", "resume=auto", "module.sample_tokens=1")
        newest = list_checkpoints(f"runs/{strategy}-alone")[-1]
        file, manifest = newest / "trainer.pt", newest / "manifest.json"
        torch.save({**torch.load(file, weights_only=True), "foreign": argparse.Namespace()}, file)
        about = json.loads(manifest.read_text())
        about["files"][file.name] = describe(file)
        manifest.write_text(json.dumps(about))
        try:
            start(1, f"{strategy}-alone", f"strategy={strategy}", "resume=auto", "max_steps=9")
        except ConfigError as error:
            errors.append(str(error))
        try:
            step = f"runs/{strategy}/checkpoints/step-00000008.ckpt"
            start(1, f"{strategy}-other", f"strategy={strategy}", f"resume={step}", "max_steps=9", "model.ffn_dim=96")
        except ConfigError as error:
            errors.append(str(error))
    return errors


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = make_home(tmp_path_factory.mktemp("resume"))
    spawn(2, on_two_ranks, home)
    (home / "unsafe").write_text("\n".join(spawn(1, on_one_rank, home)[0]))
    return home / "runs"


def check_equal(measured: dict[int, list[float]], expected: dict[int, list[float]]) -> None:
    assert sorted(measured) == sorted(expected)
    for step, values in expected.items():
        assert measured[step] == pytest.approx(values, rel=1e-6), step


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("stop", STOPS)
def test_a_resumed_run_equals_an_uninterrupted_one(runs: Path, strategy: str, stop: int) -> None:
    expected = metrics(runs / strategy, *COLUMNS)
    assert [values[2] for values in expected.values()] == [4.0 * step for step in range(1, 9)]
    check_equal(metrics(runs / f"{strategy}-{stop}", *COLUMNS), expected)
    validations = metrics(runs / strategy, "validation/loss")
    assert list(validations) == [2, 4, 6, 8]
    check_equal(metrics(runs / f"{strategy}-{stop}", "validation/loss"), validations)
    assert (runs / f"{strategy}-{stop}" / "metrics.csv").read_text().count("train/loss") == 1
    assert json.loads((runs / f"{strategy}-{stop}" / "summary.json").read_text())["steps"] == 8


@pytest.mark.parametrize("stop", [3, 5])
def test_a_resumed_run_validates_at_the_end_of_its_epochs(runs: Path, stop: int) -> None:
    expected = metrics(runs / "epochs", "validation/loss")
    assert list(expected) == [5, 10]
    check_equal(metrics(runs / f"epochs-{stop}", "validation/loss"), expected)


@pytest.mark.parametrize("strategy", ZERO)
def test_a_run_resumed_under_deepspeed_equals_an_uninterrupted_one(runs: Path, strategy: str) -> None:
    check_equal(metrics(runs / f"{strategy}-4", *COLUMNS), metrics(runs / strategy, *COLUMNS))
    validations = metrics(runs / strategy, "validation/loss")
    check_equal(metrics(runs / f"{strategy}-4", "validation/loss"), validations)
    measured = json.loads((runs / strategy / "validate.json").read_text())["validation/loss"]
    assert measured == pytest.approx(validations[8][0], rel=1e-6)
    losses = metrics(runs / "fsdp", "train/loss")
    for step, values in metrics(runs / strategy, "train/loss").items():
        assert values == pytest.approx(losses[step], rel=1e-5 if strategy == "zero3" else 1e-2)


def test_strategies_agree(runs: Path) -> None:
    check_equal_to = metrics(runs / "fsdp", "train/loss")
    for step, values in metrics(runs / "ddp", "train/loss").items():
        assert values == pytest.approx(check_equal_to[step], rel=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_last_and_the_best_are_kept(runs: Path, strategy: str) -> None:
    losses = {step: values[0] for step, values in metrics(runs / strategy, "validation/loss").items()}
    best = min(losses, key=lambda step: losses[step])
    kept = {"step-00000006.ckpt", "step-00000008.ckpt", f"best-{best:08d}.ckpt", "best.json"}
    for name in (strategy, f"{strategy}-4"):
        assert {path.name for path in (runs / name / "checkpoints").iterdir()} == kept
        found = json.loads((runs / name / "summary.json").read_text())["best"]
        assert Path(found["checkpoint"]).name == f"best-{best:08d}.ckpt"
        assert found["validation/loss"] == pytest.approx(losses[best])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_branch_leaves_the_run_it_came_from_alone(runs: Path, strategy: str) -> None:
    expected = {step: values for step, values in metrics(runs / strategy, *COLUMNS).items() if step > 6}
    check_equal(metrics(runs / f"{strategy}-branch", *COLUMNS), expected)
    assert (runs / strategy / "checkpoints" / "best.json").exists()
    assert list((runs / strategy / "checkpoints").glob("best-*.ckpt"))


@pytest.mark.parametrize("strategy", [*STRATEGIES, *ZERO])
@pytest.mark.parametrize("ranks", [1, 2])
def test_validation_measures_what_fit_logged(runs: Path, strategy: str, ranks: int) -> None:
    folder = runs / (strategy if ranks == 2 else f"{strategy}-alone")
    measured = json.loads((folder / "validate.json").read_text())["validation/loss"]
    assert measured == pytest.approx(metrics(runs / strategy, "validation/loss")[8][0], rel=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_predictions_are_those_of_every_sample_once_in_order(runs: Path, strategy: str, ranks: int) -> None:
    folder = runs / (strategy if ranks == 2 else f"{strategy}-alone")
    rows = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    texts = [row["prediction"] for row in rows]
    assert [row["sample"] for row in rows] == list(range(7))
    sequences = TokenSequences(TokenShards(runs.parent / "shards", "validation"), 32)
    assert [text[:32] for text in texts] == [bytes(sequences[n]["tokens"].tolist()).decode() for n in range(7)]


def test_a_killed_run_goes_on_from_its_last_whole_checkpoint(runs: Path) -> None:
    check_equal(metrics(runs / "killed", *COLUMNS), metrics(runs / "fsdp", *COLUMNS))
    names = {path.name for path in (runs / "killed" / "checkpoints").iterdir()}
    assert "step-00000008.ckpt" in names and not [name for name in names if name.endswith(".partial")]


def test_auto_starts_from_the_seed_where_there_is_nothing(runs: Path) -> None:
    expected = metrics(runs / "ddp", *COLUMNS)
    check_equal(metrics(runs / "fresh", *COLUMNS), {step: expected[step] for step in (1, 2)})


def test_a_checkpoint_of_another_model_is_refused_in_one_message(runs: Path) -> None:
    told = (runs.parent / "unsafe").read_text()
    assert told.count(".ckpt is of another model: ") == told.count("size mismatch") // 6 == len(STRATEGIES)
    assert told.count("; the model's options (recipe=, model=, module.… and so on) must be") == len(STRATEGIES)


def test_checkpoints_hold_no_code(runs: Path) -> None:
    assert (runs.parent / "unsafe").read_text().count("Weights only load failed") == len(STRATEGIES)
