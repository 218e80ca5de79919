"""A key of the environment reaches the class that needs it, and no file of the run."""

from pathlib import Path
from typing import Any

import pytest

from shardwise.config.compose import compose
from shardwise.config.targets import build
from shardwise.errors import ConfigError
from tests.harness.commands import check, run

SECRET = "sk-0123456789"
WORDS = [
    "recipe=custom", f"module._target_={__name__}.Keyed", "+module.address=http://me:${oc.env:MY_API_KEY}@there",
    "+module.key=${oc.env:MY_API_KEY}", "+module.other=${oc.env:HOME}",
]  # fmt: skip


class Keyed:
    def __init__(self, key: str, address: str, other: str) -> None:
        self.given = (key, address, other)


def test_files_have_a_reference_and_the_class_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", SECRET)
    monkeypatch.setenv("HOME", "/home/me")
    [job] = compose(WORDS).jobs
    assert SECRET not in job.yaml and SECRET not in str(job.config.module)
    assert job.config.module["key"] == "${oc.env:MY_API_KEY}" and job.config.module["other"] == "/home/me"
    assert build(job.config.module, "module").given == (SECRET, f"http://me:{SECRET}@there", "/home/me")


def test_a_node_without_the_key_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="module.key=.*the environment has no MY_API_KEY here; set it on every node"):
        build({"_target_": f"{__name__}.Keyed", "key": "${oc.env:MY_API_KEY}"}, "module")


def test_no_file_of_a_run_has_it(tmp_path: Path) -> None:
    """Not the checkpoint either, whose hyperparameters the module has saved."""
    (tmp_path / "keyed.py").write_text(MODULE)
    words = ["recipe=custom", "module._target_=keyed.Keyed", "+module.api_key=${oc.env:MY_API_KEY}", "units=[]",
             "micro_batch_size=4", "global_batch_size=4", "max_steps=2", "accelerator=cpu", "name=keyed"]  # fmt: skip
    done: Any = check(run(tmp_path, *words, MY_API_KEY=SECRET))
    assert f"got {SECRET[:2]} and {len(SECRET)}" in done.stdout
    files = [path for path in (tmp_path / "runs" / "keyed").rglob("*") if path.is_file()]
    assert any(path.name == "trainer.pt" for path in files)
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


MODULE = """
import torch
from lightning import LightningModule


class Keyed(LightningModule):
    def __init__(self, api_key):
        super().__init__()
        self.save_hyperparameters()
        print(f"got {api_key[:2]} and {len(api_key)}", flush=True)
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(64, 4), 4)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
"""
