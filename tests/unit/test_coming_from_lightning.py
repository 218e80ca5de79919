"""Every public name of the installed Lightning has a row, and every row a name."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.loggers import Logger
from torch import nn

from benchmarks.report import with_tables
from shardwise.config.coming_from_lightning import ROWS, Kind, Row
from shardwise.config.compose import compose
from shardwise.config.groups import PrecisionName
from shardwise.config.help import config_groups
from shardwise.config.paths import CONF
from shardwise.config.schema import RunConfig
from shardwise.config.translate import translate
from shardwise.errors import ConfigError
from shardwise.plan import Host
from shardwise.plan.resolve import make_plan
from shardwise.step.precision_plugin import PlannedPrecision

ROOT = Path(__file__).parents[2]
# Functions of Trainer, and what a module or its data overrides beside the hooks
METHODS = {"fit", "validate", "test", "predict", "save_checkpoint", "print", "init_module"}
STEPS = {"training_step", "validation_step", "test_step", "predict_step"}
CONFIGURES = {"configure_callbacks", "configure_optimizers", "configure_gradient_clipping"}
LOOP = {"backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"}
STATE = {"state_dict", "load_state_dict", "on_exception"}


def public(kind: type, *but: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_") and not any(hasattr(other, name) for other in but)}


def own(thing: object) -> set[str]:
    """What the constructor sets."""
    return {name for name in vars(thing) if not name.startswith("_")}


def names() -> dict[str, set[str]]:
    """Kind → the names of the installed Lightning."""
    hooks = public(ModelHooks) | public(DataHooks) | public(CheckpointHooks)
    module = hooks | STEPS | CONFIGURES | LOOP
    data = (public(DataHooks) | STATE) & public(LightningDataModule)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    # Keys of a checkpoint, not for modules
    keys = {"CHECKPOINT_HYPER_PARAMS_KEY", "CHECKPOINT_HYPER_PARAMS_NAME", "CHECKPOINT_HYPER_PARAMS_TYPE"}
    in_module = public(LightningModule, nn.Module) | own(LightningModule()) - {"training"}
    return {
        "argument": set(inspect.signature(Trainer).parameters),
        "method": METHODS,
        "attribute": public(Trainer) - METHODS | own(trainer),
        "module hook": module,
        "data hook": data,
        "callback hook": public(Callback),
        "module": in_module - module - keys,
        "data": public(LightningDataModule) - data - keys | own(LightningDataModule()),
        "log": {*inspect.signature(LightningModule.log).parameters} - {"self"}
        | {*inspect.signature(LightningModule.log_dict).parameters} - {"self"},
        "logger": public(Logger),
    }


@pytest.mark.filterwarnings("ignore")
def test_every_name_of_lightning_has_a_row_and_every_row_a_name() -> None:
    rows: dict[str, set[str]] = {}
    for row in ROWS:
        rows.setdefault(row.kind, set()).add(row.name)
    there = names()
    assert public(Trainer) >= METHODS and public(LightningModule) >= STEPS | CONFIGURES | LOOP
    without = {kind: there[kind] - rows.get(kind, set()) for kind in there}
    unknown = {kind: rows[kind] - there.get(kind, set()) for kind in rows}
    assert not any(without.values()), f"no row: {without}"
    assert not any(unknown.values()), f"not in Lightning: {unknown}"


def nodes_there() -> set[str]:
    """The node of every test function of the tree, as pytest names it, without its parameters."""
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.add(f"{path.relative_to(ROOT).as_posix()}::{node.name}")
    return found


def test_every_row_names_a_test_that_is_there() -> None:
    missing = {row.test for row in ROWS} - nodes_there()
    assert not missing


def test_the_page_is_made_from_the_rows() -> None:
    page = (ROOT / "docs" / "lightning.md").read_text()
    assert page.count("<!-- table: lightning_") == len(get_args(Kind))
    assert with_tables(page) == page, "run python benchmarks/report.py"
    for row in ROWS:
        assert f"`{row.name}`" in page


@pytest.mark.parametrize("row", [row for row in ROWS if row.kind == "argument"], ids=lambda row: row.name)
def test_every_argument_of_trainer_is_answered_on_the_command_line(row: Row) -> None:
    """By our word, told; by a message that names it or says why not; never by silence."""
    said = f"trainer.{row.name}=1"
    try:
        read = translate([said])
    except ConfigError:
        with pytest.raises(ConfigError, match=rf"\b{row.name}=1: "):
            translate([said])
    else:
        assert (
            read.messages
            and read.overrides
            and not read.overrides[0].startswith("trainer.")
            and row.answer != "refused"
        )


def test_our_words_are_words_of_the_command_line() -> None:
    known = {*(field.name for field in dataclasses.fields(RunConfig)), *config_groups([CONF])}
    known |= {"loggers"}  # beside the group
    for row in ROWS:
        if row.kind == "argument":
            for word in re.findall(r"`(\w+)[.=]", row.text):
                assert word in known | {"torch"}, f"{row.name}: {word}"


@pytest.mark.parametrize("word", [word for word in get_args(PrecisionName) if word not in ("tf32", "fp8")])
def test_trainer_precision_is_lightnings_word(word: str) -> None:
    """The one that the command line reads as ours."""
    plan = make_plan(compose(["accelerator=cpu", "name=run"]).jobs[0].config, Host(cuda_devices=0))
    plan = dataclasses.replace(plan, precision=dataclasses.replace(plan.precision, name=word))
    assert translate([f"precision={PlannedPrecision(plan).precision}"]).overrides == [f"precision={word}"]


def test_a_name_has_one_row_and_what_is_no_longer_the_same_says_what_it_is() -> None:
    assert Counter((row.kind, row.name) for row in ROWS).most_common(1)[0][1] == 1
    assert [row.name for row in ROWS if row.answer != "same" and not row.text] == []
