"""An exception in a module author's code is told by his frame and his line."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.config.compose import compose
from shardwise.config.targets import build
from shardwise.errors import ConfigError
from shardwise.mistakes import describe_mistake
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.process.report import report
from shardwise.run_dir.files import rank_log
from shardwise.trainer import build_data, build_module

FOREIGN = "tests.configs.foreign"


def plan_for(folder: Path, module: str = "Own", data: str = "Data") -> Plan:
    words = ["recipe=custom", f"module._target_={FOREIGN}.{module}", f"data._target_={FOREIGN}.{data}", "name=run"]
    config = compose([*words, f"runs_dir={folder}", "accelerator=cpu"]).jobs[0].config
    return make_plan(config, Host(cuda_devices=0))


class Mistyped:
    def on_train_batch_end(self, outputs: Any) -> None: ...


def test_a_hook_that_takes_other_arguments_is_told_by_the_line_where_it_begins() -> None:
    with ThreadPoolExecutor() as pool:  # as Lightning's, its frames are no author's
        error: Any = pool.submit(Mistyped().on_train_batch_end, 1, 2, 3).exception()  # type: ignore[call-arg]
    said = describe_mistake(error, None)
    assert said is not None
    assert said.startswith(
        "error: TypeError: Mistyped.on_train_batch_end() takes 2 positional arguments but 4 were given\n"
    )
    assert "test_mistakes.py line 32: def on_train_batch_end(self, outputs: Any) -> None: ...\n" in said


def test_what_we_add_to_an_authors_error_is_told_and_what_others_add_is_not() -> None:
    try:
        torch.zeros(2) + torch.zeros(3)
    except RuntimeError as error:
        error.add_note("strategy.tensor_parallel_size=2: a rank has a half")
        error.add_note("of torch's compiler")
        said = describe_mistake(error, None)
    assert said is not None and said.splitlines()[-1] == "  strategy.tensor_parallel_size=2: a rank has a half"


def test_a_constructor_that_does_not_call_lightnings_is_named(tmp_path: Path) -> None:
    said = "is no whole {}: its __init__ does not call super().__init__(); add that as its first line"
    with pytest.raises(ConfigError) as error:
        build_module(plan_for(tmp_path, module="NoSuper"))
    assert str(error.value) == "NoSuper " + said.format("LightningModule")
    with pytest.raises(ConfigError) as error:
        build_data(plan_for(tmp_path, data="NoSuperData"))
    assert str(error.value) == "NoSuperData " + said.format("LightningDataModule")


@pytest.mark.parametrize(
    ("text", "more", "package"),
    [
        ("`Bar` requires `rich` >= 10. Install it by running `pip install -U rich`.", {}, "rich"),
        ("Module not found. HINT: Try running `pip install -U 'some-thing[all]>=1.0'`", {}, "some-thing[all]"),
        ("No module named 'mlflow'", {"name": "mlflow"}, "mlflow"),
    ],
)
def test_a_package_that_a_constructor_asks_for_is_named(
    text: str, more: dict[str, str], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needs_a_package() -> None:
        raise ModuleNotFoundError(text, **more)

    monkeypatch.setattr("shardwise.config.targets.locate", lambda path, where: needs_a_package)
    monkeypatch.setattr("shardwise.mistakes.is_authors", lambda file, package: False)  # a library's
    with pytest.raises(ConfigError) as error:
        build({"_target_": "a.Bar"}, "callbacks.bar")
    assert str(error.value) == f"callbacks.bar._target_=a.Bar needs a package that is not there: pip install {package}"


def test_an_import_that_fails_in_the_authors_constructor_keeps_his_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def imports() -> None:
        import no_such_package  # type: ignore[import-not-found] # noqa: F401

    monkeypatch.setattr("shardwise.config.targets.locate", lambda path, where: imports)
    with pytest.raises(ModuleNotFoundError) as error:
        build({"_target_": "a.Bar"}, "callbacks.bar")
    assert "in imports, " in (describe_mistake(error.value, None) or "")


def test_a_traceback_that_is_shown_is_in_the_log_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for word in ("RANK", "WORLD_SIZE", "SHARDWISE_REPORT", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(word, raising=False)
    plan = plan_for(tmp_path)
    log = rank_log(plan.run_dir, 0)
    log.parent.mkdir(parents=True)
    error = RuntimeError("gloo: Connection reset by peer")  # of nobody's code
    assert report(error, plan) == 1
    shown = capsys.readouterr().err
    assert "RuntimeError: gloo: Connection reset by peer\n" in shown and "the whole traceback is in" in shown
    assert "RuntimeError: gloo: Connection reset by peer\n" in log.read_text()
