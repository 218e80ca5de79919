"""Every public name of the installed Lightning has a row, and every row a name."""

from __future__ import annotations

import inspect
from collections import Counter

import pytest
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.loggers import Logger
from torch import nn

from shardwise.coming_from_lightning import ROWS

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


def test_a_name_has_one_row_and_what_is_no_longer_the_same_says_what_it_is() -> None:
    assert Counter((row.kind, row.name) for row in ROWS).most_common(1)[0][1] == 1
    assert [row.name for row in ROWS if row.answer != "same" and not row.text] == []
