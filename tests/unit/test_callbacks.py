"""Callbacks of the user's own are looked at before anything starts."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks as lightning_callbacks
import pytest

from shardwise.callbacks.configured import build_callbacks, check_callbacks
from shardwise.config.compose import compose
from shardwise.config.lightning_callbacks import LIGHTNING, WORKS
from shardwise.errors import ConfigError
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.rank import quiet_lightning

THEIRS = "lightning.pytorch.callbacks"
STOP = [f"callbacks.stop._target_={THEIRS}.EarlyStopping", "callbacks.stop.monitor=validation/loss"]


def plan(*words: str, **more: Any) -> Plan:
    return make_plan(
        compose([*words, "name=x", "micro_batch_size=2", "global_batch_size=2"]).jobs[0].config, Host(0, **more)
    )


def test_callbacks_need_no_plus_and_keep_their_order(tmp_path: Path) -> None:
    made = plan(*STOP, "callbacks.stop.patience=7", f"callbacks.rates._target_={THEIRS}.LearningRateMonitor")
    stop, rates = build_callbacks(made)
    assert (type(stop).__name__, stop.patience, type(rates).__name__) == ("EarlyStopping", 7, "LearningRateMonitor")  # type: ignore[attr-defined]
    assert Plan.from_json(made.to_json()) == made
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(
        f"# @package _global_\ncallbacks:\n  stop: {{_target_: {THEIRS}.EarlyStopping, monitor: validation/loss}}\n"
    )
    from_file = ["experiment=mine", f"--config-dir={tmp_path / 'conf'}"]
    assert list(plan(*from_file).callbacks) == ["stop"]
    assert plan(*from_file, "callbacks.stop.patience=9").callbacks["stop"]["patience"] == 9
    assert plan(*from_file, "callbacks.stop=null").callbacks == {}


def test_a_plan_from_before_there_were_callbacks_is_read() -> None:
    old = dataclasses.asdict(plan())
    del old["callbacks"]
    assert Plan.from_json(json.dumps(old)).callbacks == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*STOP, "callbacks.stop.patienc=3"], "unexpected keyword argument 'patienc'"),
        ([*STOP, "callbacks.stop.patience=soon"], "callbacks.stop.patience=soon"),
        (["callbacks.x._target_=os.system"], "os.system is of Python's standard library"),
        ([f"callbacks.x._target_={THEIRS}.EarlyStoping"], "did you mean EarlyStopping"),
        (["callbacks.x.monitor=a"], "callbacks.x names no class"),
    ],
)
def test_a_mistake_is_one_message(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", ".")):
        check_callbacks(plan(*words))


def test_two_that_would_share_a_state_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"callbacks\.stop and callbacks\.again .* under one name"):
        build_callbacks(plan(*STOP, *[word.replace(".stop.", ".again.") for word in STOP]))


def test_every_callback_of_lightnings_works_or_is_refused_by_name() -> None:
    assert set(LIGHTNING) == set(lightning_callbacks.__all__)
    for name, answer in LIGHTNING.items():
        made = plan(f"callbacks.x._target_={THEIRS}.{name}")
        if answer != WORKS:
            with pytest.raises(ConfigError, match=f"{name} is refused: "):
                check_callbacks(made)
        elif name != "EarlyStopping":  # which needs an argument
            check_callbacks(made)


def test_lightnings_callbacks_are_heard_and_its_advice_is_not() -> None:
    quiet_lightning()
    assert logging.getLogger("lightning.pytorch.callbacks.model_summary").isEnabledFor(logging.INFO)
    assert not logging.getLogger("lightning.pytorch.utilities").isEnabledFor(logging.INFO)
