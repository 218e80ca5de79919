"""Hooks, what they find in `trainer` and what `self.log` comes to: stock Lightning and this library run the same
module, and both write everything down."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from shardwise.config.coming_from_lightning import ROWS
from shardwise.config.compose import compose
from shardwise.distributed.mesh import init_process_group
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.rank import quiet_lightning
from shardwise.run_dir.checkpoints import list_checkpoints, step_of
from shardwise.trainer import build_data, build_module, build_trainer
from tests.distributed import recording
from tests.harness.processes import spawn
from tests.harness.selected import needed

BATCH = 2  # of all ranks: a micro-batch on each of two ranks has one sample
STRATEGIES = {1: ["ddp"], 2: ["ddp", "fsdp", "zero2", "zero3"]}  # zero1 is as zero2
LOADING = {("callback", "load_state_dict"), ("data", "load_state_dict"), ("callback", "on_load_checkpoint"),
           ("module", "on_load_checkpoint")}  # fmt: skip
# What is run: the stage, stock Lightning's arguments, our words for the same
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "epochs": (
        "fit",
        {"max_epochs": 2, "accumulate_grad_batches": 2, "val_check_interval": 6, "check_val_every_n_epoch": None},
        ["max_epochs=2", "max_steps=null", "global_batch_size=4", "validate_every_n_steps=3"],
    ),
    "steps": (
        "fit",
        {"max_steps": 8, "max_epochs": -1, "accumulate_grad_batches": 2},
        ["max_steps=8", "global_batch_size=4"],
    ),
    "plain": ("fit", {"max_epochs": 1}, ["max_epochs=1", "max_steps=null", "global_batch_size=2"]),
    "validate": ("validate", {}, ["global_batch_size=2"]),
    "test": ("test", {}, ["global_batch_size=2"]),
    "predict": ("predict", {}, ["global_batch_size=2"]),
}
# Saving has its own test: when is not stock Lightning's, which has a callback for it
SAVING = {("callback", "state_dict"), ("data", "state_dict"), ("callback", "on_save_checkpoint"),
          ("module", "on_save_checkpoint")}  # fmt: skip
# Events, what `trainer` said at each, what the module was told, and a logger's rows and other calls
Recorded = tuple[list[recording.Event], list[dict[str, Any]], list[dict[str, Any]], list[Any], list[Any]]
RESUME = 4  # the step that stock Lightning's goes on from; an epoch has six
AGAIN = (4, 6, 8)  # ours: in the middle of an epoch, at its end, and in the middle of the next


class Saver(Callback):
    """Stock Lightning's checkpoint, where ours comes as well."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == RESUME and not self.path.exists():
            trainer.save_checkpoint(self.path)


def stock(
    folder: Path,
    ranks: int,
    stage: str,
    arguments: dict[str, Any],
    resume: str | None = None,
    kind: type[LightningModule] = recording.Recorded,
) -> Recorded:
    """Of a run under stock Lightning, in each rank."""
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        plugins=[TorchElasticEnvironment()],
        logger=(rows := recording.Rows()),
        callbacks=[Saver(folder / "stock.ckpt")],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        inference_mode=False,
        default_root_dir=folder,
        **arguments,
    )
    verbose = {"verbose": False} if stage in ("validate", "test") else {}
    data = None if kind is recording.RecordedOwner else recording.RecordedData(BATCH // ranks, ranks)
    with suppress(ValueError):  # of the module that raises it
        getattr(trainer, stage)(kind(), datamodule=data, ckpt_path=resume, **verbose)
    return *recording.read(), rows.rows, rows.calls


def plan_for(folder: Path, ranks: int, module: str, *words: str, resume: str | None = None) -> Plan:
    folder.mkdir(parents=True, exist_ok=True)
    argv = [
        "recipe=custom", f"module._target_={module}", "data._target_=tests.distributed.recording.RecordedData",
        "data.batch_size=${micro_batch_size}", f"runs_dir={folder.parent}", f"name={folder.name}", "accelerator=cpu",
        f"devices={ranks}", f"micro_batch_size={BATCH // ranks}", "log_every_n_steps=1",
    ]  # fmt: skip
    plan = make_plan(compose([*argv, *words]).jobs[0].config, Host(cuda_devices=0))
    return dataclasses.replace(plan, resume=resume)


def ours(plan: Plan) -> Recorded:
    """Of the same run here, in each rank."""
    if not torch.distributed.is_initialized():
        init_process_group(plan)
    module = build_module(plan)
    trainer = build_trainer(plan, module)
    trainer.loggers.append(rows := recording.Rows())
    verbose = {"verbose": False} if plan.stage in ("validate", "test") else {}
    with suppress(ValueError), patch("shardwise.callbacks.summary.plot_losses", return_value=None):
        data = None if isinstance(module, recording.Owner) else build_data(plan)
        getattr(trainer, plan.stage)(module, datamodule=data, ckpt_path=plan.resume, **verbose)
    return *recording.read(), rows.rows, rows.calls


def recorded_module(strategy: str) -> str:
    return "tests.distributed.recording." + ("Ungradient" if strategy.startswith("zero") else "Recorded")


def run_all(folder: Path, ranks: int) -> dict[tuple[str, str], Recorded]:
    """In each rank: every case, under stock Lightning and under every strategy."""
    warnings.simplefilter("ignore")  # stock Lightning's advice
    quiet_lightning()
    done = {}
    for case, (stage, arguments, words) in CASES.items():
        done[case, "stock"] = stock(folder / "stock", ranks, stage, arguments)
        for strategy in strategies_of(case, ranks):
            plan = plan_for(
                folder / f"{case}-{strategy}", ranks, recorded_module(strategy), f"strategy={strategy}",
                f"stage={stage}", "checkpoint=none", *words,
            )  # fmt: skip
            done[case, strategy] = ours(plan)
    if ranks == 1:
        _, arguments, words = CASES["plain"]
        for name in ("RecordedRaises", "RecordedOwner", "OldName"):
            done[name, "stock"] = stock(folder / "stock", 1, "fit", arguments, kind=getattr(recording, name))
            plan = plan_for(folder / name, 1, f"tests.distributed.recording.{name}", "checkpoint=none", *words)
            done[name, "ddp"] = ours(plan)
    _, arguments, words = CASES["epochs"]
    done["resumed", "stock"] = stock(folder / "stock", ranks, "fit", arguments, str(folder / "stock/stock.ckpt"))
    for strategy in STRATEGIES[ranks]:
        run_dir, module = folder / f"saved-{strategy}", recorded_module(strategy)
        saving = [*words, f"strategy={strategy}", "checkpoint.save_every_n_steps=2", "checkpoint.keep_last=9"]
        done["saved", strategy] = ours(plan_for(run_dir, ranks, module, *saving))
        for path in list_checkpoints(run_dir):
            if step_of(path) in AGAIN:
                folder_again = folder / f"again-{strategy}-{step_of(path)}"
                again = plan_for(folder_again, ranks, module, *saving, resume=str(path))
                done[f"again-{step_of(path)}", strategy] = ours(again)
    return done


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[dict[tuple[str, str], Recorded]]]:
    numbers = needed(request, "ranks") or STRATEGIES
    return {ranks: spawn(ranks, run_all, tmp_path_factory.mktemp(f"r{ranks}"), ranks) for ranks in numbers}


def strategies_of(case: str, ranks: int) -> list[str]:
    """ZeRO's stages evaluate alike."""
    return [s for s in STRATEGIES[ranks] if CASES[case][0] == "fit" or s != "zero2"]


def cells(ranks: int) -> Iterator[tuple[str, str]]:
    return ((case, strategy) for case in CASES for strategy in strategies_of(case, ranks))


def without(events: list[recording.Event], strategy: str) -> list[recording.Event]:
    """Those that the run was to have: a module under ZeRO does no work of its own on gradients."""
    refused = recording.GRADIENT_WORK if strategy.startswith("zero") else set()
    return [event for event in events if event[:2] not in SAVING | LOADING and event[1] not in refused]


@pytest.mark.parametrize("ranks", STRATEGIES)
def test_hooks_come_in_lightnings_order_and_as_often(runs: dict[int, Any], ranks: int) -> None:
    for rank, done in enumerate(runs[ranks]):
        for case, strategy in cells(ranks):
            expected = without(done[case, "stock"][0], strategy)
            assert without(done[case, strategy][0], strategy) == expected, (case, strategy, rank)


def test_the_recording_has_every_hook(runs: dict[int, Any]) -> None:
    """A hook that nobody calls would be equal, too."""
    seen = {event[:2] for (_, who), (events, *_) in runs[1][0].items() if who == "stock" for event in events}
    for who, kind in (
        ("module", recording.Recorded),
        ("data", recording.RecordedData),
        ("callback", recording.RECORDER),
    ):
        hooks = {name for name in vars(kind) if not name.startswith("_")}
        missing = hooks - {name for whose, name in seen if whose == who}
        assert missing <= NOT_IN_THESE_RUNS, who


# A checkpoint, an exception and a sanity check are needed for them
NOT_IN_THESE_RUNS = {"on_load_checkpoint", "load_state_dict", "on_exception", "on_sanity_check_start",
                     "on_sanity_check_end"}  # fmt: skip
SAME_ATTRIBUTES = [row.name for row in ROWS if row.kind == "attribute" and row.answer == "same"]
METRICS = {"callback_metrics", "logged_metrics", "progress_bar_metrics"}


@pytest.mark.parametrize("ranks", STRATEGIES)
def test_what_hooks_find_in_trainer_is_what_lightning_has_there(runs: dict[int, Any], ranks: int) -> None:
    """Every attribute that the table calls the same, in every hook; metrics where a window is one micro-batch."""
    others: dict[str, Any] = {}
    for rank, done in enumerate(runs[ranks]):
        for case, strategy in cells(ranks):
            pairs = zip(kept(done[case, "stock"], strategy), kept(done[case, strategy], strategy), strict=True)
            accumulates = CASES[case][1].get("accumulate_grad_batches", 1) > 1
            for (event, expected), (_, found) in pairs:
                for name in SAME_ATTRIBUTES:
                    if not (accumulates and name in METRICS) and found.get(name) != near(expected.get(name)):
                        where = (case, strategy, rank, *event[:2])
                        others.setdefault(name, (where, expected.get(name), found.get(name)))
                for name, expected_here in {"checkpoint_callback": None, "checkpoint_callbacks": []}.items():
                    assert found[name] == expected_here
    assert others == {}


def kept(recorded: Recorded, strategy: str) -> list[tuple[recording.Event, dict[str, Any]]]:
    """Without saving, and without what a module under ZeRO may not have."""
    events, values, *_ = recorded
    wanted = without(events, strategy)
    pairs = iter(zip(events, values, strict=True))
    return [next(pair for pair in pairs if pair[0] == event) for event in wanted]


def near(value: Any) -> Any:
    """Sums come in another order on two ranks."""
    if isinstance(value, dict):
        return {key: near(item) for key, item in value.items()}
    return pytest.approx(value, rel=1e-5) if isinstance(value, float) else value


@pytest.mark.parametrize("ranks", STRATEGIES)
def test_a_module_is_told_of_itself_what_lightning_tells_it(runs: dict[int, Any], ranks: int) -> None:
    for done in runs[ranks]:
        for case, strategy in cells(ranks):
            # ZeRO's optimizer is DeepSpeed's around the module's own
            left_out = {"optimizers"} if strategy.startswith("zero") else set()
            expected, found = ([{key: value for key, value in told.items() if key not in left_out}
                                for told in done[case, who][2]] for who in ("stock", strategy))  # fmt: skip
            assert found == expected, (case, strategy)
        assert done["epochs", "stock"][2][0]["all_gather"] == [rank + 1 for rank in range(ranks)]


@pytest.mark.parametrize("ranks", STRATEGIES)
def test_a_logger_gets_the_rows_that_lightning_gives_it(runs: dict[int, Any], ranks: int) -> None:
    """Everything that `self.log` can do is in them. Steps are counted from 1 here; a step is one row."""
    for case, strategy in cells(ranks):
        if case in ("plain", "validate", "test"):
            expected, found = (runs[ranks][0][case, who][3] for who in ("stock", strategy))
            assert by_step(found) == near(by_step(expected, 1 if case == "plain" else 0)), (case, strategy)


def by_step(rows: list[tuple[dict[str, float], int | None]], first: int = 0) -> dict[tuple[str, int], dict[str, Any]]:
    """What was logged for each step; batches of validation are counted by themselves."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for metrics, step in rows:
        of_batch = any(name.startswith("validation/") and "_step" in name for name in metrics)
        place = ("batch of validation", int(step or 0)) if of_batch else ("step", int(step or 0) + first)
        found.setdefault(place, {}).update({key: value for key, value in metrics.items() if key != "epoch"})
    return found


@pytest.mark.parametrize("ranks", STRATEGIES)
def test_hooks_of_a_resumed_run_come_as_lightnings_and_as_if_it_had_not_stopped(
    runs: dict[int, Any], ranks: int
) -> None:
    for done in runs[ranks]:
        for strategy in STRATEGIES[ranks]:
            expected = without(done["resumed", "stock"][0], strategy)
            found = done[f"again-{RESUME}", strategy][0]
            assert without(found, strategy) == expected, strategy
            # Before on_fit_start, as under the strategies of Lightning's that restore before set-up
            loading = [[event for event in events if event[:2] in LOADING or event[1] == "on_fit_start"]
                       for events in (found, done["resumed", "stock"][0])]  # fmt: skip
            assert loading[0] == loading[1] and len(loading[0]) == len(LOADING) + 2
            whole = kept(done["saved", strategy], strategy)
            for step in AGAIN:
                again = kept(done[f"again-{step}", strategy], strategy)
                begin = next(i for i, (event, _) in enumerate(again) if event[:2] == ("module", "on_train_start"))
                rest = [counted(*pair) for pair in again[begin + 1 :]]
                ends = [i for i, (event, _) in enumerate(whole) if event[:2] == ("module", "on_train_batch_end")]
                last = min(i for i in ends if whole[i][1]["global_step"] == step)
                assert rest == [counted(*pair) for pair in whole[last + 1 :]], (strategy, step)


def counted(event: recording.Event, values: dict[str, Any]) -> Any:
    names = ("global_step", "current_epoch", "is_last_batch", "num_training_batches", "estimated_stepping_batches")
    return event, {name: values.get(name) for name in names}


@pytest.mark.parametrize("ranks", STRATEGIES)
def test_saving_calls_lightnings_hooks_in_its_order(runs: dict[int, Any], ranks: int) -> None:
    """When is another question: a callback of Lightning's saves there, and the run itself here."""
    for done in runs[ranks]:
        expected = [event for event in done["epochs", "stock"][0] if event[:2] in SAVING]
        assert expected  # of one save
        for strategy in STRATEGIES[ranks]:
            found = [event for event in done["saved", strategy][0] if event[:2] in SAVING]
            assert found == expected * (len(found) // len(expected)) and found


def test_log_dir_is_the_runs_folder(runs: dict[int, Any]) -> None:
    for ranks, strategies in STRATEGIES.items():
        for strategy in strategies:
            events, values, *_ = runs[ranks][0]["plain", strategy]
            at_start = [seen["log_dir"] for (_, name, _), seen in zip(events, values, strict=True)
                        if name == "on_train_start" and "log_dir" in seen]  # fmt: skip
            assert at_start and all(Path(folder).name == f"plain-{strategy}" for folder in at_start)


def test_an_exception_is_told_as_under_lightning(runs: dict[int, Any]) -> None:
    expected, found = (runs[1][0]["RecordedRaises", who][0] for who in ("stock", "ddp"))
    assert found == expected
    assert [event[:2] for event in found if event[1] == "on_exception"] == [
        ("callback", "on_exception"), ("data", "on_exception"),
    ]  # fmt: skip


def test_the_old_name_of_configure_model_is_called(runs: dict[int, Any]) -> None:
    for who in ("stock", "ddp"):
        assert runs[1][0]["OldName", who][2][0] == {"configure_sharded_model": True}


def test_a_module_with_loaders_of_its_own_is_asked_as_under_lightning(runs: dict[int, Any]) -> None:
    expected, found = ([event for event in runs[1][0]["RecordedOwner", who][0] if event[0] == "module"]
                       for who in ("stock", "ddp"))  # fmt: skip
    assert found == expected and {name for _, name, _ in found} > recording.TRANSFERS


@pytest.mark.parametrize("ranks", STRATEGIES)
def test_a_logger_hears_of_begin_and_end_as_under_lightning(runs: dict[int, Any], ranks: int) -> None:
    for case, strategy in cells(ranks):
        assert runs[ranks][0][case, strategy][4] == runs[ranks][0][case, "stock"][4], (case, strategy)


def test_a_module_saves_by_trainer_save_checkpoint(runs: dict[int, Any]) -> None:
    assert {"saved": True} in runs[1][0]["RecordedOwner", "ddp"][2]
