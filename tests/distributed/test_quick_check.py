"""Short looks at a run: a few batches of every stage, a part of the training set, a profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.config.compose import compose
from shardwise.data.order import GlobalOrder
from shardwise.errors import ConfigError
from shardwise.plan import Host
from shardwise.plan.resolve import make_plan
from tests.harness.commands import OWN, check, make_home, metrics, run

STAGES = """
class Stages(Module):
    def validation_step(self, batch, batch_idx):
        self.log("validation/loss", self.net(batch).mean(), sync_dist=True)
    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.net(batch).mean(), sync_dist=True)
        self.logger.experiment.add_image("x", batch)
        print(f"tested {batch_idx}", flush=True)

class Deep(Stages):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()) for _ in range(3)),
                                       torch.nn.Linear(4, 1))

class All(Data):
    val_dataloader = test_dataloader = Data.train_dataloader
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("quick"), STAGES)


def test_a_quick_check_runs_every_stage_and_keeps_nothing(home: Path) -> None:
    words = [*OWN, "module._target_=mine.Stages", "data._target_=mine.All", "quick_check=true", "name=quick",
             "checkpoint.monitor=validation/loss"]  # fmt: skip
    done = check(run(home, *words, "strategy=fsdp"))
    assert "step 3/3" in done.stdout and "validation/loss" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("tested")] == [f"tested {n}" for n in range(3)]
    assert "quick check: test runs" in done.stdout and "quick check: predict is not defined" in done.stdout
    assert list((home / "runs").iterdir()) == [] and str(home / "runs") not in done.stdout


def test_a_module_of_several_sharded_layers_is_tested_behind_its_training(home: Path) -> None:
    words = [*OWN, "module._target_=mine.Deep", "data._target_=mine.All", "quick_check=true", "units=[Linear]"]
    for strategy in ("fsdp", "zero3"):
        assert "quick check: test runs" in check(run(home, *words, f"strategy={strategy}")).stdout


def test_an_epoch_is_so_many_batches_and_a_profile_is_written(home: Path) -> None:
    words = [*OWN, "global_batch_size=8", "max_steps=null", "max_epochs=2", "log_every_n_steps=1", "name=few"]
    with pytest.raises(ConfigError, match="max_train_batches=5: must be a multiple of the 2 micro-batches .* 4 or 6"):
        make_plan(compose([*words, "max_train_batches=5"]).jobs[0].config, Host(cuda_devices=0))
    check(run(home, *words, "max_train_batches=4", "profiler=simple"))
    assert list(metrics(home / "runs/few", "train/samples").items()) == [(n, [8.0 * n]) for n in range(1, 5)]
    report = (home / "runs/few/fit-profile-0.txt").read_text()
    assert "run_training_batch" in report and "DdpStrategy.backward" in report


def test_every_shortened_epoch_draws_from_the_whole_data_set() -> None:
    order = GlobalOrder(samples=40, global_batch_size=4, shuffle=True, seed=0, max_steps_per_epoch=2)
    first, second = set(order.indices(0, 8).tolist()), set(order.indices(8, 8).tolist())
    assert (order.steps_per_epoch, len(first), len(second)) == (2, 8, 8)
    assert first != second and max(first | second) > 8
