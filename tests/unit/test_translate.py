"""Words of Lightning's on the command line are read as ours, the user is told, and the composed config has our word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import shardwise.config.translate
from shardwise.cli import train
from shardwise.config.compose import compose
from shardwise.config.translate import Translated, translate
from shardwise.errors import ConfigError
from shardwise.plan import Host
from shardwise.plan.plan import headline
from shardwise.plan.resolve import make_plan
from shardwise_tools import main

# What is typed, and what it is read as
READ = {
    "accelerator=gpu": ["accelerator=cuda"],
    "precision=bf16-mixed": ["precision=bf16"],
    "precision=16-mixed": ["precision=fp16"],
    "precision=16": ["precision=fp16"],
    "precision=bf16-true": ["precision=bf16_true"],
    "precision=32": ["precision=fp32"],
    "precision='32-true'": ["precision=fp32"],
    "precision=64": ["precision=fp64"],
    "precision=64-true": ["precision=fp64"],
    "strategy=auto": ["strategy=ddp"],
    "strategy=fsdp2": ["strategy=fsdp"],
    "strategy=fsdp_native": ["strategy=fsdp"],
    "strategy=deepspeed": ["strategy=zero2"],
    "strategy=deepspeed_stage_1": ["strategy=zero1"],
    "strategy=deepspeed_stage_2": ["strategy=zero2"],
    "strategy=deepspeed_stage_3": ["strategy=zero3"],
    "strategy=deepspeed_stage_2_offload": ["strategy=zero2", "strategy.offload_optimizer=true"],
    "strategy=deepspeed_stage_3_offload": [
        "strategy=zero3", "strategy.offload_optimizer=true", "strategy.offload_parameters=true",
    ],
    "strategy=ddp_find_unused_parameters_true": ["strategy=ddp", "strategy.find_unused_parameters=true"],
    "strategy=ddp_find_unused_parameters_false": ["strategy=ddp"],
    "strategy=ddp,deepspeed_stage_2": ["strategy=ddp,zero2"],
    "num_nodes=2": ["nodes=2"],
    "epochs=3": ["max_epochs=3"],
    "lr=1e-4": ["optimizer.lr=1e-4"],
    "learning_rate=1e-4": ["optimizer.lr=1e-4"],
    "num_workers=4": ["data.num_workers=4"],
    "default_root_dir=here": ["runs_dir=here"],
    "ckpt_path=last": ["resume=auto"],
    "ckpt_path=a.ckpt": ["resume=a.ckpt"],
    "fast_dev_run=True": ["quick_check=true"],
    "max_time=00:12:00:00": [
        "callbacks.timer._target_=lightning.pytorch.callbacks.Timer", "callbacks.timer.duration=00:12:00:00",
    ],
    "limit_train_batches=10": ["max_train_batches=10"],
    "enable_checkpointing=false": ["checkpoint=none"],
    "trainer.max_steps=3": ["max_steps=3"],
    "+trainer.precision=bf16-mixed": ["precision=bf16"],
    "trainer.num_nodes=2": ["nodes=2"],
    "trainer.logger=wandb": ["logger=wandb"],
    "benchmark=true": ["cudnn_benchmark=true"],
    "trainer.benchmark=false": ["cudnn_benchmark=false"],
    "detect_anomaly=true": ["debug.anomaly=true"],
    "logger=false": ["logger=csv"],
    "trainer.logger=False": ["logger=csv"],
    "enable_progress_bar=false": ["progress_bar=false"],
    "limit_val_batches=0": ["max_validation_batches=0"],
    "limit_val_batches=1.0": ["max_validation_batches=null"],
    "limit_train_batches=1.0": ["max_train_batches=null"],
    "val_check_interval=1.0": ["validate_every_n_steps=null"],
    "check_val_every_n_epoch=2": ["validate_every_n_epochs=2"],
}  # fmt: skip
ANYWAY = [
    "num_sanity_val_steps=0", "limit_test_batches=1.0", "limit_predict_batches=1.0", "overfit_batches=0.0",
    "overfit_batches=0", "use_distributed_sampler=true", "enable_model_summary=False", "sync_batchnorm=false",
    "reload_dataloaders_every_n_epochs=0", "trainer.inference_mode=false", "barebones=false",
]  # fmt: skip
OURS = [
    "accelerator=cpu", "precision=bf16", "strategy=zero2", "strategy.offload_optimizer=true", "max_epochs=3",
    "devices=4",     "log_every_n_steps=3", "gradient_clip_val=1", "deterministic=true", "callbacks.stop.monitor=x",
    "min_epochs=2", "min_steps=9", "gradient_clip_algorithm=value",
    "strategy=a,b", "foo",
    "module.batch_size=3", "precision=[16]", "-m", "callbacks={stop: null}", "profiler=simple",
]  # fmt: skip


@pytest.mark.parametrize(("word", "ours"), READ.items())
def test_a_word_of_lightnings_is_read_as_ours_and_told(word: str, ours: list[str]) -> None:
    found = translate([word, "seed=1"])
    assert found.overrides == [*ours, "seed=1"]
    assert len(found.messages) == 1 and found.messages[0].startswith(f"{word} is read as {' '.join(ours)}")


def test_epochs_bring_validation_after_each_of_them() -> None:
    job = compose(["max_epochs=2", "accelerator=cpu"]).jobs[0]
    assert job.config.validate_every_n_steps is None and "validate_every_n_steps=100 does not count" in job.messages[1]
    given = compose(["max_epochs=2", "validate_every_n_steps=3", "accelerator=cpu"]).jobs[0]
    assert given.config.validate_every_n_steps == 3


def test_a_parallel_axis_alone_takes_fsdp() -> None:
    found = translate(["strategy.pipeline_parallel_size=2"])
    assert found.overrides == ["strategy.pipeline_parallel_size=2", "strategy=fsdp"] and len(found.messages) == 1
    for given in (["strategy=fsdp_hybrid", "strategy.tensor_parallel_size=2"], ["strategy.tensor_parallel_size=1"]):
        assert translate(given).overrides == given


@pytest.mark.parametrize("word", ANYWAY)
def test_what_happens_anyway_is_taken_and_told(word: str) -> None:
    assert translate([word, "seed=1"]) == Translated(["seed=1"], (f"{word} is what happens here anyway",))


def test_a_progress_bar_is_the_terminals_unless_said() -> None:
    for words, in_terminal, elsewhere in (([], True, False), (["progress_bar=false"], False, False),
                                          (["progress_bar=true"], True, True)):  # fmt: skip
        config = compose([*words, "accelerator=cpu", "name=run"]).jobs[0].config
        plans = [make_plan(config, Host(cuda_devices=0, is_terminal=there)) for there in (True, False)]
        assert [plan.progress_bar for plan in plans] == [in_terminal, elsewhere]


def test_the_headline_counts_epochs() -> None:
    config = compose(["max_epochs=3", "schedule=none", "accelerator=cpu", "name=run"]).jobs[0].config
    assert "\n3 epochs, global batch" in headline(make_plan(config, Host(cuda_devices=0)))


def test_our_own_words_stay_what_they_are() -> None:
    assert translate(OURS).overrides == OURS and translate(OURS).messages == ()


def test_all_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardwise.config.translate, "count_cuda_devices", lambda: 8)
    assert translate(["devices=-1"]).overrides == translate(["devices=auto"]).overrides == ["devices=8"]
    assert translate(["gpus=2"]).overrides == ["accelerator=cuda", "devices=2"]
    assert translate(["gpus=-1"]).overrides == ["accelerator=cuda", "devices=8"]


def test_the_config_has_our_word_and_the_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["precision=bf16-mixed", "strategy=ddp_find_unused_parameters_true", "max_samples=64", "accelerator=cpu"]
    short = ["schedule=none", "checkpoint.monitor=null"]  # nothing that so few steps do not reach
    assert train([*words, *short, "dry_run=true", f"runs_dir={tmp_path}"]) == 0
    said, _, config = capsys.readouterr().out.partition("# config\n")
    assert said.splitlines() == [
        "# precision=bf16-mixed is read as precision=bf16",
        "# strategy=ddp_find_unused_parameters_true is read as strategy=ddp strategy.find_unused_parameters=true",
        "# max_samples=64 is given, so the recipe's max_steps=500 does not count",
    ]
    written: dict[str, Any] = yaml.safe_load(config.partition("# plan\n")[0])
    assert written["precision"]["name"] == "bf16" and written["strategy"]["find_unused_parameters"] is True
    assert (written["max_steps"], written["max_samples"]) == (None, 64)


def test_a_length_on_the_command_line_takes_the_place_of_the_recipes() -> None:
    for words, lengths in (
        (["max_epochs=3"], (None, 3, None)),
        (["max_steps=null", "max_epochs=3"], (None, 3, None)),
        (["max_steps=7"], (7, None, None)),
        (["max_steps=7", "max_epochs=3"], (7, 3, None)),
    ):
        config = compose([*words, "schedule=none"]).jobs[0].config
        assert (config.max_steps, config.max_epochs, config.max_samples) == lengths
    images = compose(["recipe=image_classification", "validate_every_n_epochs=2", "schedule.warmup_ratio=0.1"]).jobs[0]
    assert (images.config.validate_every_n_steps, images.config.schedule["warmup_steps"]) == (None, None)
    assert (
        images.messages[0]
        == "validate_every_n_epochs=2 is given, so the recipe's validate_every_n_steps=100 does not count"
    )
    sweep = compose(["-m", "max_steps=1,2"]).jobs
    assert [job.config.max_steps for job in sweep] == [1, 2] and {job.messages for job in sweep} == {()}


def test_submit_reads_them_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", "--dry-run", "num_nodes=2", "cluster=dgx_h100", "precision=bf16-mixed", "global_batch_size=64"]
    assert main([*words, f"runs_dir={tmp_path}", "optimizer.lr=abc"]) == 2
    assert capsys.readouterr().err == "error: optimizer.lr=abc: must be a number, as it is in conf/optimizer/\n"
    assert main([*words, f"runs_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert (
        "num_nodes=2 is read as nodes=2\n" in out and "--nodes=2" in out and "bf16-mixed" not in out.split("sbatch")[1]
    )


def test_words_of_lightning_hydra_template_name_ours() -> None:
    assert translate(["tags=[a,b]", "task_name=x"]).overrides == ["logger.tags=[a,b]", "name=x"]
    for word, ours in (("debug=fdr", "quick_check=true"), ("hydra/sweeper=optuna", "a loop of ten lines"),
                       ("callbacks=early_stopping", "callbacks.stop._target_=")):  # fmt: skip
        with pytest.raises(ConfigError, match=re.escape(ours)):
            translate([word])


def test_an_own_backbone_alone_takes_model_custom() -> None:
    words = ["recipe=image_classification", "model._target_=mine.Backbone"]
    assert translate(words).overrides == [*words, "model=custom"]
    assert translate([*words, "model=vit_tiny"]).messages == ()
