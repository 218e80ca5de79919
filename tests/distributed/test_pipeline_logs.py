"""What a module logs in a pipeline, and what it looks at, is that of one process, or one message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness.pipeline_logs import run_module, run_modules, run_test
from tests.harness.pipelines import INTERLEAVED
from tests.harness.processes import spawn

OTHER = "what a layer of another stage gives or has, and this stage of the pipeline does not have these numbers"
META = "computes with weights or buffers of a layer that is on another stage of the pipeline"
REFUSALS = {
    "LooksBackAtBuffer": "training_step reads the buffer 'center' before the layers that repeat and writes it behind",
    "ReadsOutputs": "on_train_batch_end of ReadsOutputs or of a callback finds no 'largest'",
    "LogsWeight": f"training_step logs 'own/weight', which comes from {OTHER}",
    "LogsBuffer": f"validation_step logs 'own/scale', which comes from {OTHER}",
    "ReadsBuffer": META,
    "Penalizes": "the loss is computed from what a layer gives or has that is on another stage",
    "LogsNorm": f"add is given {OTHER}",
    "LogsActivation": f"training_step logs 'own/activation', which comes from {OTHER}",
    "Validates": f"validation_step logs 'validation/loss', which comes from {OTHER}",
    "ValidatesNumbers": f"item looks at {OTHER}",
    "Measures": f"add_ writes into another tensor {OTHER}",
    "Collects": f"the metric kept is given {OTHER}",
    "LooksBack": "on_train_batch_end logs 'own/loss', which comes from what training_step returns, and in a pipeline",
    "LogsGradients": f"on_before_optimizer_step logs 'own/norm', which comes from {OTHER}",
    "Averages": r"whole_weights_in=\[on_before_zero_grad\]: in a pipeline this hook of Averages or of a callback",
    "AveragesBehind": "on_train_batch_end of AveragesBehind or of a callback computes with weights of all layers",
    "ClipsByNorm": f"[a-z_]+ is given {OTHER}",
    "Lists": "on_validation_epoch_end of Lists or of a callback failed on a stage of the pipeline that has no results",
}
RIGHT = ["Halves", "ClipsByValue", "ClipsAsLightning", "WritesInPlace", "LogsMuch", "Centers"]


@pytest.mark.parametrize("module", REFUSALS)
def test_what_a_stage_does_not_have_is_refused(tmp_path: Path, module: str) -> None:
    """Never a number that is wrong, nor a traceback."""
    with pytest.raises(AssertionError, match=f"ConfigError: ({module}: |{module} )?{REFUSALS[module]}"):
        spawn(2, run_module, tmp_path, module)


def test_it_is_refused_in_a_test_too(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ConfigError: Tests: test_step logs .test/loss., which comes from"):
        spawn(2, run_test, tmp_path, "Tests")


@pytest.mark.parametrize("words", [[], INTERLEAVED], ids=["1f1b", "interleaved"])
def test_what_is_logged_and_done_is_that_of_one_process(tmp_path: Path, words: list[str]) -> None:
    one = ["strategy.pipeline_parallel_size=1", "devices=1"]
    expected = spawn(1, run_modules, tmp_path / "one", RIGHT, one)[0]
    found = spawn(2, run_modules, tmp_path / "two", RIGHT, words)[0]
    for module in RIGHT:
        logged = found[module]["logged"]
        assert logged.keys() == expected[module]["logged"].keys(), module
        for name, values in expected[module]["logged"].items():
            bound = 1e-6 if name == "own/inputs" else 1e-10  # the metric is in fp32, and chunks give it a batch each
            assert logged[name] == pytest.approx(values, rel=bound), (module, name)
        for name, weight in expected[module]["final"].items():
            torch.testing.assert_close(found[module]["final"][name], weight, rtol=1e-9, atol=1e-12)
    assert expected["LogsMuch"]["logged"].keys() >= {"own/share", "own/before", "own/head", "own/batches"}
