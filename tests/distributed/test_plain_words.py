"""What a run says to somebody who has not read the code: how to go on, which values hold, and names of their own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shardwise.data.tokens import write_token_shards
from shardwise.run_dir.checkpoints import list_checkpoints
from tests.harness.commands import OWN, RECIPE, check, make_home, metrics, run

PICKY = """
from shardwise.errors import DataError

class Picky(Module):
    def __init__(self, does="", lr=0.1):
        super().__init__()
        self.does, self.lr = does, lr
    def training_step(self, batch, batch_idx):
        if self.global_step == 2 and os.environ["RANK"] == "1":
            if self.does == "is refused":
                raise DataError("one.png cannot be decoded; mend it")
            if self.does == "raises":
                raise ValueError("broken by hand")
        if self.does == "lacks":
            self.nothing
        return super().training_step(batch, batch_idx)
    def on_train_batch_end(self, *_):
        if self.does == "stops":
            self.trainer.should_stop = True

class Weighs(Picky):
    def loss_weight(self, batch):
        return -1

class Unoptimized(Picky):
    configure_optimizers = LightningModule.configure_optimizers
"""
WORDS = [*OWN, "module._target_=mine.Picky", "max_steps=4"]
LR = [*WORDS, "module._target_=mine.Unoptimized", "devices=1", "global_batch_size=2", "log_every_n_steps=1",
      "optimizer=adamw"]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("words"), PICKY)


@pytest.mark.parametrize(
    ("does", "saves", "said"),
    [
        ("is refused", "checkpoint.save_every_n_steps=1", "NAME resume=auto goes on from step-00000002.ckpt"),
        ("is refused", "checkpoint=none", "nothing was saved, as checkpoint=none asks for: another name= begins anew"),
        ("is refused", "checkpoint.save_every_n_steps=3", "no checkpoint was saved yet: NAME resume=auto begins anew"),
        ("raises", "checkpoint.save_every_n_steps=2", "NAME resume=auto goes on from step-00000002.ckpt"),
    ],
)
def test_a_mistake_in_mid_training_says_how_to_go_on(home: Path, does: str, saves: str, said: str) -> None:
    name = f"{does.replace(' ', '-')}-{saves[-1]}"
    done = run(home, *WORDS, f"module.does={does}", f"name={name}", saves, "checkpoint.monitor=null")
    said = said.replace("NAME", f"name={name}")
    if does == "is refused":
        assert check(done, 2).stderr == f"error: one.png cannot be decoded; mend it; {said}\n"
        return
    lines = check(done, 1).stderr.splitlines()
    assert lines[0] == "error: ValueError: broken by hand" and f"  {said}" in lines


def test_a_mistake_before_the_first_step_says_nothing_of_going_on(home: Path) -> None:
    done = run(home, *WORDS, "module._target_=mine.Weighs", "strategy=fsdp", "name=weighs")
    assert check(done, 2).stderr.startswith("error: Weighs.loss_weight gave -1: it must give one number from 0 on")
    assert "resume=auto" not in done.stderr


def test_modules_have_their_authors_names_under_fsdp(home: Path) -> None:
    lacks = run(home, *WORDS, "module.does=lacks", "strategy=fsdp", "name=lacks")
    assert check(lacks, 2).stderr.startswith("error: AttributeError: 'Picky' object has no attribute 'nothing'\n")
    check(run(home, *WORDS, "module.does=stops", "strategy=fsdp", "name=stops"))
    assert json.loads((home / "runs/stops/summary.json").read_text())["stopped_early"]["by"] == "Picky"


def test_resume_auto_says_that_it_has_found_no_checkpoint(home: Path) -> None:
    words = [*WORDS, "name=auto", "resume=auto", "max_steps=2"]
    none = f"resume=auto: {home / 'runs/auto'} holds no checkpoint, so the run begins anew"
    assert check(run(home, *words)).stdout.splitlines().count(none) == 1
    assert none not in check(run(home, *words, "max_steps=3")).stdout


def test_a_run_that_goes_on_says_of_each_value_of_its_optimizer_whether_it_holds(home: Path) -> None:
    """What holds is the checkpoint's, whatever the start before was given."""
    check(run(home, *LR, "name=lr", "max_steps=2", "optimizer.lr=0.25"))
    for step in (3, 4):
        done = check(run(home, *LR, "name=lr", "resume=auto", f"max_steps={step}", "optimizer.lr=0.125"))
        (line,) = [line for line in done.stdout.splitlines() if "optimizer" in line]
        assert line.startswith(
            "the checkpoint's optimizer state, its learning rate included, is kept: optimizer.lr=0.125 (it is 0.25) "
            "has no effect; a new run from its weights takes such values: shardwise export "
        )
    own = [*WORDS, "name=own", "devices=1", "global_batch_size=2"]
    check(run(home, *own, "max_steps=2", "module.lr=0.25"))
    done = check(run(home, *own, "resume=auto", "max_steps=3", "module.lr=0.125"))
    assert "the checkpoint's optimizer state, its learning rate included, is kept\n" in done.stdout


def test_callbacks_that_were_there_before_are_named(home: Path) -> None:
    timer = "callbacks.timer._target_=lightning.pytorch.callbacks.Timer"
    words = [*WORDS, "name=timer", "devices=1", "global_batch_size=2"]
    check(run(home, *words, timer, "callbacks.timer.duration=01:00:00:00", "max_steps=2"))
    done = check(run(home, *words, "resume=auto", "max_steps=3"))
    (line,) = [line for line in done.stdout.splitlines() if "Timer" in line]
    assert line.startswith("the checkpoint has the state of Timer, which this run has not")
    assert "ckpt_path" not in done.stdout + done.stderr


def test_every_damaged_checkpoint_is_named(home: Path) -> None:
    words = [*WORDS, "name=damaged", "devices=1", "global_batch_size=2", "checkpoint.save_every_n_steps=1",
             "checkpoint.keep_last=3", "checkpoint.monitor=null"]  # fmt: skip
    check(run(home, *words, "max_steps=3"))
    for path in list_checkpoints(home / "runs/damaged"):
        content = (path / "trainer.pt").read_bytes()
        short = path.name == "step-00000003.ckpt"  # which the sizes tell, before anything is read
        (path / "trainer.pt").write_bytes(content[:10] if short else content[:200] + b"X" + content[201:])
    done = check(run(home, *words, "max_steps=5", "resume=auto"), 2)
    changed = "trainer.pt is not what was written (another checksum)"
    assert f"step-00000002.ckpt: {changed}; step-00000001.ckpt: {changed}); another name= starts anew" in done.stderr
    assert "is whole (step-00000003.ckpt: trainer.pt has 10 bytes, and manifest.json says " in done.stderr


def test_shards_without_a_validation_split_are_tried_without_validation(home: Path) -> None:
    write_token_shards(home / "alone", {"train": [np.tile(np.arange(97, 123), 40)]}, vocab_size=256)
    words = [*RECIPE, "data.directory=alone", "quick_check=true", "name=alone"]
    refused = check(run(home, *words), 2)
    assert "alone has no validation split" in refused.stderr and "max_validation_batches=0" in refused.stderr
    done = check(run(home, *words, "max_validation_batches=0"))
    assert "quick check: test has no data, since none were held out from training" in done.stdout
    assert "quick check: every stage that is defined has run" in done.stdout


def test_what_deepspeed_prints_stays_out_of_the_log(home: Path) -> None:
    done = check(run(home, *WORDS, "name=deepspeed", "strategy=zero1", "precision=bf16"))
    assert len(metrics(home / "runs/deepspeed", "train/loss")) and "step 4/4" in done.stdout
    for word in ("DeepSpeed", "MA ", "Virtual Memory", "bf16_optimizer"):
        assert word not in done.stdout
