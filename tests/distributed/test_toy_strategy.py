"""A new strategy is a file, a YAML file and a row: a copy of the program is given one, and trains with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.harness.commands import OWN, TRAIN, check, make_home, metrics, run

TOY = '''
"""`toy`: a sum over all ranks and a division, in place of DistributedDataParallel."""

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from shardwise.strategies.base import PlannedStrategy
from shardwise.weights.initialize import Materializer


class ToyStrategy(PlannedStrategy, DDPStrategy):
    def __init__(self, plan):
        super().__init__()
        self._use(plan)

    def setup(self, trainer):
        self._begin_setup(self.lightning_module)
        group = self.mesh.group("world")
        Materializer(self.lightning_module, self.root_device, self.plan.seed, group).materialize(self.lightning_module)
        self.parallelize(self.lightning_module, self.units, casts_inputs=True)
        super().setup(trainer)
        self._end_setup()

    def configure_ddp(self):
        self.runs_inside_forward = False

    def keeps_whole(self, parameter):
        return True

    def post_backward(self, loss):
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad, group=self.mesh.group("loss"))
            parameter.grad /= self.world_size
'''
ROW = """
STRATEGIES["toy"] = Capabilities(entry="shardwise.strategies.toy.ToyStrategy", fp8="toys have no fp8")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """train.py of a copy of the program that has one more strategy."""
    root = tmp_path / "program"
    for name in ("src/shardwise", "conf", "recipes"):
        shutil.copytree(TRAIN.parent / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "src/shardwise/strategies/toy.py").write_text(TOY)
    (root / "conf/strategy/toy.yaml").write_text("name: toy\ntimeout_minutes: 10\n")
    with (root / "src/shardwise/plan/capabilities.py").open("a") as table:
        table.write(ROW)
    return Path(shutil.copy(TRAIN, root))


def test_a_file_and_a_row_are_a_strategy_that_trains_like_ddp(program: Path, tmp_path: Path) -> None:
    home = make_home(tmp_path / "home")
    for name, path in (("toy", program), ("ddp", TRAIN)):
        check(run(home, *OWN, f"strategy={name}", f"name={name}", program=path, anew=path is program))
    losses = [metrics(home / "runs" / name, "train/loss", "train/gradient_norm") for name in ("toy", "ddp")]
    assert losses[0].keys() == {1, 3} and losses[0] == losses[1]
    assert json.loads((home / "runs/toy/plan.json").read_text())["strategy"]["name"] == "toy"
    refused = check(run(home, *OWN, "strategy=toy", "precision=fp8", program=program, anew=True), 2)
    assert "strategy=toy precision=fp8: toys have no fp8" in refused.stderr
