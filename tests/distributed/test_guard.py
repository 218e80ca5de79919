"""A step that is not finite changes nothing, is named, and stops the run or is passed over; so is a loss that leaps."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shardwise.callbacks.guard import RollBack
from shardwise.config.compose import compose
from shardwise.errors import NonFiniteError
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.rank import run_until_rolled_back
from shardwise.step.verdict import robust_z, robust_z_of
from tests.harness import gradient_hooks
from tests.harness.cells import Capture, fit
from tests.harness.commands import check, make_home, run
from tests.harness.modules import Bare, Layer, samples
from tests.harness.processes import spawn
from tests.harness.selected import needed

BATCH, STEPS = 8, 5  # two micro-batches of two samples on each of two ranks
ODD = 23  # a sample of the third window: its rank 1's last
MARK, BEYOND = 7.25, 8.5  # samples whose gradient is not a number, and whose loss is infinite while its gradient is not

CONFIGS = {
    "ddp, sgd": ["strategy=ddp"],
    "ddp, adamw fused": ["strategy=ddp", "module.fused=true"],
    "fsdp, adamw fused": ["strategy=fsdp", "module.fused=true"],
    "fsdp_hybrid, sgd": ["strategy=fsdp_hybrid", "strategy.shard_size=1"],
    "zero1, bf16": ["strategy=zero1", "precision=bf16"],
    "zero2, bf16": ["strategy=zero2", "precision=bf16"],
    "zero3": ["strategy=zero3"],
}


class Odd(Layer):
    """Its gradient is not a number for a marked sample; what it computes always is."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.1)
            self.batches += 1
        out = super().forward(x)
        if (x[:, 0] == MARK).any():
            bias = self.linear.bias
            out = out + (bias - bias.detach()).abs().sqrt()
        return out


class Fragile(Bare):
    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.layers, self.last = nn.Sequential(Odd(6), Odd(6)), nn.ModuleList()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        return loss + math.inf if (batch[0][:, 0] == BEYOND).any() else loss

    def configure_optimizers(self) -> Any:
        if not self.fused:
            optimizer: Any = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Marked(LightningDataModule):
    """In order; sample `at` holds `value`."""

    def __init__(self, batch_size: int, value: float, at: int = ODD, count: int = 80) -> None:
        super().__init__()
        self.batch_size, self.value, self.at, self.count = batch_size, value, at, count

    def train_dataloader(self) -> DataLoader[Any]:
        rows = samples("pairs", self.count, 0).tensors[0].clone()
        rows[self.at, 0] = self.value
        return DataLoader(TensorDataset(rows), batch_size=self.batch_size, shuffle=False)


class Look(Callback):
    """After each step: the weights and where the run stands."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Any]] = {}

    def _note(self, trainer: Any) -> None:
        self.steps[trainer.global_step] = {
            "weights": trainer.strategy.sharded.full_parameters(),
            "buffers": {name: buffer.clone() for name, buffer in trainer.lightning_module.named_buffers()},
            "samples": trainer.strategy.train_loader.consumed,
            "rate": trainer.strategy.step.learning_rate,
            "average": {name: part.clone() for name, part in (trainer.strategy.sharded.average or {}).items()},
        }

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._note(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            self._note(trainer)


def plan_for(run_dir: Path, *words: str, ranks: int = 2) -> Plan:
    run_dir.mkdir(parents=True, exist_ok=True)
    argv = [
        "recipe=custom", "module._target_=tests.distributed.test_guard.Fragile",
        "data._target_=tests.distributed.test_guard.Marked", "+data.batch_size=${micro_batch_size}",
        f"runs_dir={run_dir.parent}", f"name={run_dir.name}", "accelerator=cpu", f"devices={ranks}",
        f"micro_batch_size={BATCH // 2 // ranks}", f"global_batch_size={BATCH}", f"max_steps={STEPS}",
        "checkpoint.save_every_n_steps=null", "checkpoint.monitor=null", "validate_every_n_steps=1000",
        "log_every_n_steps=1",
    ]  # fmt: skip
    return make_plan(compose([*argv, *words]).jobs[0].config, Host(cuda_devices=torch.cuda.device_count()))


def watched(plan: Plan) -> dict[str, Any]:
    look, out, error = Look(), io.StringIO(), None
    with redirect_stdout(out):
        try:
            fit(plan, look)
        except NonFiniteError as raised:
            error = str(raised)
    lines = Path(plan.run_dir, "guard.jsonl")
    # A bare NaN is not JSON
    read = json.JSONDecoder(parse_constant=pytest.fail).decode
    noted = [read(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    return {"steps": look.steps, "error": error, "out": out.getvalue(), "noted": noted}


def run_all(
    folder: Path, names: set[str] | None = None, accelerator: str = "cpu"
) -> dict[tuple[str, str], dict[str, Any]]:
    """In each rank: every configuration of these names stops, goes on from what it has saved, and skips."""
    cells = {}
    for number, (name, config) in enumerate(CONFIGS.items()):
        if names is not None and name not in names:
            continue
        for kind, value in (("loss", BEYOND), ("gradient", MARK)):
            words = [*config, f"+data.value={value}", f"accelerator={accelerator}"]
            stop, skip = folder / f"{number}-{kind}", [*words, "guard.on_nonfinite=skip"]
            saved = f"resume={stop / 'checkpoints' / 'step-00000002.ckpt'}"
            cells[name, kind] = {
                "stopped": watched(plan_for(stop, *words)),
                "resumed": watched(plan_for(folder / f"{number}-{kind}-resumed", *skip, saved)),
                "skipped": watched(plan_for(folder / f"{number}-{kind}-skipped", *skip)),
            }
    return cells


@pytest.fixture(scope="module")
def cells(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[tuple[str, str], dict[str, Any]]]:
    return spawn(2, run_all, tmp_path_factory.mktemp("guard"), needed(request, "name"), timeout_seconds=400)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_step_that_is_not_finite_changes_nothing(cells: Any, name: str, kind: str) -> None:
    check_nothing_changed(cells, name, kind)


def check_nothing_changed(cells: Any, name: str, kind: str) -> None:
    for cell in (ranks[name, kind] for ranks in cells):
        stopped, resumed, skipped = (cell[word] for word in ("stopped", "resumed", "skipped"))
        steps = skipped["steps"]
        assert sorted(steps) == list(range(STEPS + 1))  # a step that is passed over is counted
        assert same(steps[3]["weights"], steps[2]["weights"])
        assert same(steps[3]["buffers"], steps[2]["buffers"])
        assert [int(steps[n]["buffers"]["layers.0.batches"]) for n in range(STEPS + 1)] == [0, 2, 4, 4, 6, 8]
        assert not same(steps[4]["buffers"], steps[3]["buffers"])
        assert not same(steps[4]["weights"], steps[3]["weights"])
        assert all(torch.isfinite(t).all() for t in steps[STEPS]["weights"].values())
        assert not same(steps[2]["weights"], steps[1]["weights"])

        assert stopped["error"] is not None and skipped["error"] is None and resumed["error"] is None
        for word in ("weights", "buffers"):
            assert all(same(s[word], steps[2][word]) for n, s in stopped["steps"].items() if n > 2)
        assert min(resumed["steps"]) == 2, "what was saved is the state before"
        for number, step in resumed["steps"].items():  # and goes on as if nothing had happened
            assert same(step["weights"], steps[number]["weights"]), number
            assert step["samples"] == steps[number]["samples"] == number * BATCH
            assert number == 2 or step["rate"] == steps[number]["rate"]


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_samples_and_parameters_are_named(cells: Any, name: str, kind: str) -> None:
    check_names(cells, name, kind)


def check_names(cells: Any, name: str, kind: str) -> None:
    cell = cells[0][name, kind]
    for run_, action in (("stopped", "stop"), ("skipped", "skip")):
        (noted,) = cell[run_]["noted"]
        assert (noted["what"], noted["action"], noted["step"]) == (f"non-finite {kind}", action, 3)
        assert [r["rank"] for r in noted["ranks"]] == [0, 1]
        micro_batches = noted["ranks"][1]["micro_batches"]
        assert micro_batches[1]["samples"] == [22, 23]
        bad = [not math.isfinite(float(m["loss"])) for r in noted["ranks"] for m in r["micro_batches"]]
        parameters = {name for r in noted["ranks"] for name in r["parameters"]}
        if kind == "loss":
            assert bad == [False, False, False, True]
        else:
            assert bad == [False] * 4
            assert parameters == {"layers.0.linear.bias"}
    said = {"loss": "step 3: the loss is not finite (micro-batch 1 of rank 1, samples 22, 23)",
            "gradient": "step 3: the gradients are not finite (layers.0.linear.bias)"}[kind]  # fmt: skip
    assert cell["stopped"]["error"].startswith(said)
    assert "checkpoints/step-00000002.ckpt" in cell["stopped"]["error"]
    assert f"guard: {said}; passed over" in cell["skipped"]["out"]
    assert all(c[name, kind]["stopped"]["error"] == cell["stopped"]["error"] for c in cells)
    assert "guard:" not in cells[1][name, kind]["skipped"]["out"]


def run_too_many(folder: Path) -> dict[str, Any]:
    """The third to fifth windows are bad, of which two may be."""
    words = ["+data.value=nan", "guard.on_nonfinite=skip", "guard.max_in_a_row=2", "module.fused=true", "max_steps=9"]
    bad = {"data._target_": "tests.distributed.test_guard.Worse"}
    cells = {}
    for name, every in (("at the end", "null"), ("every step", "1")):
        plan = plan_for(folder / name.replace(" ", "-"), *words, *(f"{k}={v}" for k, v in bad.items()),
                        f"checkpoint.save_every_n_steps={every}", "ema_decay=0.5")  # fmt: skip
        saved = Path(plan.run_dir) / "checkpoints"
        cells[name] = {**watched(plan), "saved": sorted(path.name for path in saved.glob("step-*"))}
    return cells


class Worse(Marked):
    def train_dataloader(self) -> DataLoader[Any]:
        rows = samples("pairs", self.count, 0).tensors[0].clone()
        rows[2 * BATCH : 5 * BATCH] = math.nan
        return DataLoader(TensorDataset(rows), batch_size=self.batch_size, shuffle=False)


def test_too_many_in_a_row_stop_the_run(tmp_path: Path) -> None:
    for cell in spawn(2, run_too_many, tmp_path)[0].values():
        assert "3 in a row" in cell["error"] and "step-00000002.ckpt" in cell["error"]
        assert [(n["step"], n["action"]) for n in cell["noted"]] == [(3, "skip"), (4, "skip"), (5, "stop")]
        # Later ones, of steps that were passed over, would be taken by resume=auto
        assert cell["saved"] == ["step-00000002.ckpt"]
        averages = [step["average"] for number, step in sorted(cell["steps"].items()) if number >= 2]
        assert len(averages) > 2 and all(same(average, averages[0]) for average in averages[1:])


# A loss that leaps

SPIKE_AT = 36 * BATCH + 1  # a sample of step 37


def spike_words(action: str) -> list[str]:
    return ["+data.value=900.0", f"+data.at={SPIKE_AT}", "+data.count=400", "max_steps=39", f"guard.on_spike={action}",
            "module.fused=true"]  # fmt: skip


def run_spikes(folder: Path) -> dict[str, Any]:
    cells = {action: watched(plan_for(folder / action, *spike_words(action))) for action in ("ignore", "warn", "skip")}
    words = [*spike_words("rollback"), "checkpoint.save_every_n_steps=30", "checkpoint.keep_last=9"]
    plan, capture, out = plan_for(folder / "rollback", *words), Capture(), io.StringIO()
    with redirect_stdout(out):
        again = run_until_rolled_back(plan)
        assert again is not None and again.resume is not None
        assert run_until_rolled_back(again, capture) is None
    cells["rollback"] = {"resume": again.resume, "pass_over": again.guard.pass_over, "final": capture.final,
                         "out": out.getvalue()}  # fmt: skip
    # What it must come to: a run that passes over the window from the start
    guard = dataclasses.replace(plan.guard, pass_over=(36 * BATCH,))
    straight = dataclasses.replace(plan, run_dir=str(folder / "straight"), guard=guard)
    Path(straight.run_dir).mkdir(exist_ok=True)
    cells["straight"] = watched(straight)
    return cells


@pytest.fixture(scope="module")
def spikes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return spawn(2, run_spikes, tmp_path_factory.mktemp("spikes"))[0]


def test_a_leap_is_told_or_passed_over(spikes: Any) -> None:
    leapt = "guard: step 37: the loss leapt to "
    assert leapt not in spikes["ignore"]["out"] and spikes["ignore"]["noted"] == []
    assert leapt in spikes["warn"]["out"]
    (noted,) = spikes["warn"]["noted"]
    assert (noted["step"], noted["what"], noted["action"]) == (37, "spike", "warn") and noted["z"] > 8
    assert same(spikes["warn"]["steps"][39]["weights"], spikes["ignore"]["steps"][39]["weights"])
    steps = spikes["skip"]["steps"]
    assert same(steps[37]["weights"], steps[36]["weights"]) and not same(steps[38]["weights"], steps[37]["weights"])
    assert [(n["step"], n["what"]) for n in spikes["skip"]["noted"]] == [(37, "spike")]
    assert leapt in spikes["skip"]["out"]


def test_a_leap_rolls_back_to_the_last_checkpoint(spikes: Any) -> None:
    cell = spikes["rollback"]
    assert cell["resume"].endswith("step-00000030.ckpt") and cell["pass_over"] == (36 * BATCH,)
    assert "back to the last checkpoint" in cell["out"] and "step 37: its window is passed over" in cell["out"]
    assert same(cell["final"], spikes["straight"]["steps"][39]["weights"])
    assert same(spikes["straight"]["steps"][39]["weights"], spikes["skip"]["steps"][39]["weights"])


BEFORE = [1.0, 1.1, 0.9, 1.05, 0.95, 50.0]


@pytest.mark.parametrize("z", [robust_z_of, lambda loss, b: float(robust_z(torch.tensor(loss), torch.tensor(b)))])
def test_robust_z(z: Any) -> None:
    assert z(1.2, BEFORE) < 4 < 8 < z(3.0, BEFORE)
    assert z(0.1, BEFORE) < 0  # below is no spike
    assert z(1.0005, [1.0] * 5) < 1  # nor is what cannot be told from the others
    assert math.isfinite(z(1.2, [1.0, 1.1, math.nan, 0.9, 1.0]))
    assert z(1.7, BEFORE) == pytest.approx((1.7 - 1.0) / (1.4826 * 0.05), rel=1e-4)
    assert not z(3.0, [math.inf, math.nan, 1.0]) > 8


def test_roll_back_is_no_error_of_the_users() -> None:
    assert not isinstance(RollBack(0), NonFiniteError)


# As a user meets it

FRAGILE = """
import torch
from lightning.pytorch import LightningModule, LightningDataModule
from torch.utils.data import DataLoader, TensorDataset
class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
class Data(LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        self.batch_size = batch_size
    def train_dataloader(self):
        rows = torch.ones(32, 4)
        rows[9] = float("nan")
        return DataLoader(TensorDataset(rows), batch_size=self.batch_size)
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_exit_code_and_message(tmp_path: Path, devices: int) -> None:
    home = make_home(tmp_path)
    (home / "fragile.py").write_text(FRAGILE)
    words = ["recipe=custom", "module._target_=fragile.Module", "data._target_=fragile.Data", "runs_dir=runs",
             "+data.batch_size=${micro_batch_size}", "max_steps=6", "micro_batch_size=2", "global_batch_size=4",
             f"devices={devices}", "accelerator=cpu", "name=a", "units=[]", "checkpoint.monitor=null"]  # fmt: skip
    done = check(run(home, *words), 3)
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: step 3: the loss is not finite (micro-batch ")
    assert done.stderr.count("\n") == 1 and "guard.on_nonfinite=skip" in done.stderr
    assert (home / "runs/a/checkpoints/step-00000002.ckpt").exists()
    went_on = check(run(home, *words, "resume=auto", "guard.on_nonfinite=skip"))
    assert "guard: step 3: the loss is not finite" in went_on.stdout


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_loss_that_is_not_a_number_with_gradients_that_are_finite(tmp_path: Path, strategy: str) -> None:
    words = [f"strategy={strategy}", "global_batch_size=2", "devices=1"]
    with pytest.raises(AssertionError, match="is nan, and all gradients are finite, as if no target counted"):
        spawn(1, gradient_hooks.run, tmp_path / "stop", "Ignores", words)
    spawn(1, gradient_hooks.run, tmp_path / "skip", "Ignores", [*words, "guard.on_nonfinite=skip"])
