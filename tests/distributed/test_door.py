"""Modules of strangers as they come: by Lightning's other name, from a class method, with loaders of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.commands import check, metrics, run

STRANGER = """
import importlib.util
import pytorch_lightning as pl
import pytorch_lightning.utilities.rank_zero
import torch
from lightning.pytorch import LightningModule
from pytorch_lightning.callbacks import EarlyStopping
from torch.utils.data import DataLoader, Dataset

assert issubclass(EarlyStopping, __import__("lightning").pytorch.Callback)
assert pytorch_lightning.utilities.rank_zero.__name__ == "lightning.pytorch.utilities.rank_zero"
assert importlib.util.find_spec("pytorch_lightning.no_such_module") is None
assert importlib.util.find_spec("pytorch_lightning.callbacks.timer").name.startswith("pytorch_lightning.")

class Samples(Dataset):
    def __getitem__(self, index):
        assert pl.LightningModule is LightningModule  # in a data worker too
        return torch.full((4,), float(index))
    def __len__(self):
        return 64

class Module(pl.LightningModule):
    def __init__(self, width, optimizer="sgd"):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(width, 1)
        self.optimizer = optimizer  # a name that a Trainer's module may use as it likes
    @classmethod
    def from_samples(cls, samples, **options):
        return cls(len(samples[0]), **options)
    def training_step(self, batch, batch_idx):
        loss = self.net(batch).pow(2).mean()
        self.log("its_own", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-4)
    def train_dataloader(self):
        return DataLoader(Samples(), batch_size=2, num_workers=1, multiprocessing_context="spawn")

class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Samples(), batch_size=2)

def make_nothing():
    return 3
"""
WORDS = ["recipe=custom", "micro_batch_size=2", "global_batch_size=4", "max_steps=2", "accelerator=cpu",
         "runs_dir=runs", "log_every_n_steps=1"]  # fmt: skip
ALIAS = "pytorch_lightning is read as lightning.pytorch (version 2."


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "stranger.py").write_text(STRANGER)
    return folder


def test_a_class_method_of_lightnings_other_name_with_loaders_of_its_own(home: Path) -> None:
    words = ["module._target_=stranger.Module.from_samples", "module.samples._target_=stranger.Samples",
             "module.optimizer=sgd", "name=own", "devices=2", "strategy=fsdp"]  # fmt: skip
    done = check(run(home, *WORDS, *words))
    assert done.stdout.count(ALIAS) == 1
    assert (
        "layers that repeat: none, with 0.0% of 5 parameters" in done.stdout
        and "the other 5 are gathered as one piece" in done.stdout
    )
    assert len(metrics(home / "runs/own", "train/loss")) == 2


def test_one_process_a_datamodule_of_the_other_name_and_what_a_function_returns(home: Path) -> None:
    data = "data._target_=stranger.Data"
    done = check(run(home, *WORDS, "module._target_=stranger.Module", "module.width=4", data, "name=one"))
    assert done.stdout.count(ALIAS) == 1
    both = run(home, *WORDS, "module._target_=stranger.Module.from_samples", "name=both", "optimizer=sgd",
               "module.samples._target_=stranger.Samples", data)  # fmt: skip
    assert check(both, 2).stderr.startswith(
        "error: stranger.Module.from_samples has configure_optimizers, and optimizer="
    )
    nothing = run(home, *WORDS, "module._target_=stranger.make_nothing", data, "name=nothing")
    assert "stranger.make_nothing is or returns an int: a LightningModule is needed" in check(nothing, 2).stderr
    lacking = run(home, *WORDS, "module._target_=stranger.Module", "module.width=4", "name=lacking", "stage=validate")
    assert "stranger.Module has no val_dataloader, and no data is given" in check(lacking, 2).stderr
    assert sorted(path.name for path in (home / "runs").iterdir() if path.name != "own") == ["one"]


MISTAKEN = """
import torch
from lightning import LightningModule
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __init__(self, does):
        self.does = does
    def __getitem__(self, index):
        return [0.0][index] if self.does == "indexes" else torch.ones(4)
    def __len__(self):
        return 3 if self.does == "is_short" else 64

def learning_rate(does):
    return {"works": 0.1}[does if does == "looks_up" else "works"]

class Module(LightningModule):
    def __init__(self, does):
        super().__init__()
        self.does, self.net = does, torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        if self.does == "raises_late" and self.global_step == 1:
            raise ValueError("later")
        return self.net(batch).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), learning_rate(self.does))
    def train_dataloader(self):
        return DataLoader(Samples(self.does), batch_size=2, num_workers=int(self.does == "indexes"))
"""


def test_a_mistake_of_the_modules_author_is_his_line_and_a_start_that_trained_nothing_keeps_no_name(home: Path) -> None:
    (home / "mistaken.py").write_text(MISTAKEN)
    words = [*WORDS, "module._target_=mistaken.Module", "checkpoint=none"]
    done = check(run(home, *words, "-m", "module.does=looks_up,indexes,is_short,raises_late", "name=wrong"), 2)
    looks_up, indexes, is_short, raises_late = done.stderr.partition("shardwise: ")[0].split("error: ")[1:]
    log = "  the whole traceback is in runs/wrong-{}/logs/rank-00000.log\n"
    assert looks_up == (
        "KeyError: 'looks_up'\n  in learning_rate, mistaken.py line 15: "
        """return {"works": 0.1}[does if does == "looks_up" else "works"]\n"""
        "  called by configure_optimizers, mistaken.py line 26: "
        "return torch.optim.SGD(self.parameters(), learning_rate(self.does))\n" + log.format(0)
    )
    assert indexes == (
        "IndexError: list index out of range\n  in __getitem__, mistaken.py line 10: "
        'return [0.0][index] if self.does == "indexes" else torch.ones(4)\n' + log.format(1)
    )
    assert is_short.startswith("the training set has 3 samples, less than one global_batch_size=4")
    assert raises_late.startswith("ValueError: later\n  in training_step, mistaken.py line 23: raise ValueError(")
    assert "wrong-1 (exit code 2), wrong-2 (exit code 2), wrong-3 (exit code 1)\n" in done.stderr
    for job in (0, 1, 3):
        assert "Traceback (most recent" in (home / f"runs/wrong-{job}/logs/rank-00000.log").read_text()
    assert not (home / "runs/wrong-2").exists()

    check(run(home, *words, "module.does=works", "name=wrong-0"))
    assert len(metrics(home / "runs/wrong-0", "train/loss")) == 2
    assert '"looks_up"' in (home / "runs/wrong-0/plan-1.json").read_text()
    taken = check(run(home, *words, "module.does=works", "name=wrong-3"), 2)
    assert "wrong-3 already holds a run" in taken.stderr
    (home / "bad.py").write_text("import lightning\n\nwidth = lightning.no_such_name\n")
    bad = check(run(home, *WORDS, "module._target_=bad.Module", "name=bad"), 2)
    assert bad.stderr == (
        "error: AttributeError: module 'lightning' has no attribute 'no_such_name'\n"
        "  in bad.py line 3: width = lightning.no_such_name\n"
    )
