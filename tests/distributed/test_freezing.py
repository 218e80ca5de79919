"""Weights that hooks freeze, or let be trained, in the course of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.tools import main
from shardwise.weights.saved import SavedWeights
from tests.distributed.test_drawn_alike import plan_of
from tests.harness.cells import cell_plan, fit
from tests.harness.exact_resume import unlike
from tests.harness.modules import Layer
from tests.harness.processes import spawn

LAYER = "model.blocks.0."
UNUSED = "strategy.find_unused_parameters=true"
FROZEN_LATER = {  # hook → strategies that must have the same weights in the end
    hook: {
        "ddp": ["strategy=ddp", UNUSED],
        "fused": ["strategy=ddp", UNUSED, "+optimizer.fused=true"],  # as on GPUs
        "fsdp": ["strategy=fsdp"],
        "zero2": ["strategy=zero2", UNUSED],
        "zero3": ["strategy=zero3", UNUSED],
    }
    for hook in ("on_fit_start", "on_train_batch_start")
}
REFUSED = {"ddp": ["strategy=ddp", UNUSED], "zero2": ["strategy=zero2", UNUSED], "zero3": ["strategy=zero3", UNUSED]}

# What freezes in which hook → whether DeepSpeed's optimizer would go on changing it, by its decay or what it remembers
BEHIND = {
    "zero1-decays": ("on_fit_start", ["strategy=zero1", "optimizer.weight_decay=0.1"], True),
    "zero3-remembers": ("on_train_batch_end", ["strategy=zero3"], True),
    "zero1-keeps-nothing": ("on_train_batch_end", ["strategy=zero1", "optimizer.momentum=0"], False),
    "zero1-counts-steps": (
        "on_train_batch_end",
        ["strategy=zero1", "optimizer=adamw", "optimizer.weight_decay=0"],
        True,
    ),
    "zero2-keeps-nothing": ("on_train_batch_end", ["strategy=zero2", "optimizer.momentum=0"], False),
}


class Freezes(Callback):
    """Freezes the first layer in a hook; behind the second step it is to be trained again, if `thaws`."""

    def __init__(self, hook: str, thaws: bool) -> None:
        self.hook, self.thaws = hook, thaws

    def act(self, hook: str, module: Any, step: int = 0) -> None:
        if hook == self.hook and step < 2:
            module.model.blocks[0].requires_grad_(False)
        elif self.thaws and hook == "on_train_batch_start" and step >= 2:
            module.model.blocks[0].requires_grad_(True)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.act("setup", pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.act("on_fit_start", pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.act("on_train_batch_start", pl_module, trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.act("on_train_batch_end", pl_module)


class Adversarial(LightningModule):
    """Takes a gradient with regard to its inputs while weights are frozen, in one place or another."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.net, self.head = where, nn.Sequential(Layer(4), Layer(4)), nn.Linear(4, 1)

    def loss(self, x: Tensor) -> Tensor:
        return self.head(self.net(x)).square().mean()

    def push(self, x: Tensor) -> Tensor:
        self.requires_grad_(False)
        with torch.enable_grad():
            x = x.clone().requires_grad_(True)
            (gradient,) = torch.autograd.grad(self.loss(x), x)
        self.requires_grad_(True)
        return gradient

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[1]
        if self.where == "before":
            x = x + 0.1 * self.push(x)
        loss = self.loss(x)
        if self.where == "behind":
            self.push(x)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.where == "validation":
            self.log("pushed", self.push(batch[1]).square().mean(), sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.where == "hook":
            self.push(batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


WHERE = ("before", "behind", "validation", "hook")


def run_adversarial(folder: Path) -> dict[str, Any]:
    return {
        f"{where} {strategy}": fit(plan_of(
            folder / f"{where}-{strategy}", "Adversarial", f"module.where={where}", f"strategy={strategy}",
            "units=[Layer]", "max_steps=4", "validate_every_n_steps=2", "global_batch_size=4", "checkpoint=none",
            file=__name__,
        ))["final"]
        for where in WHERE for strategy in ("ddp", "fsdp")
    }  # fmt: skip


@pytest.fixture(scope="module")
def adversarial(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = spawn(2, run_adversarial, tmp_path_factory.mktemp("adversarial"))[0]
    return found


@pytest.mark.parametrize("where", WHERE)
def test_weights_that_are_frozen_for_a_moment_are_trained(adversarial: dict[str, Any], where: str) -> None:
    for name, tensor in adversarial[f"{where} ddp"].items():
        assert torch.allclose(adversarial[f"{where} fsdp"][name], tensor, atol=1e-6), name


class TakesGradients(Callback):
    """Takes a gradient with regard to the inputs in a hook."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def take(self, hook: str, module: Any, batch: Any) -> None:
        if hook == self.hook:
            x = batch[1].clone().requires_grad_(True)
            torch.autograd.grad(module.loss(x), x)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.take("on_train_batch_start", pl_module, batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.take("on_train_batch_end", pl_module, batch)


def take_gradients(folder: Path) -> list[str]:
    said = []
    for hook in ("on_train_batch_start", "on_train_batch_end"):
        plan = plan_of(folder / hook, "Adversarial", "module.where=nowhere", "strategy=zero3", "units=[Layer]",
                       "max_steps=4", "global_batch_size=4", "checkpoint=none", file=__name__)  # fmt: skip
        with pytest.raises(ConfigError) as refused:
            fit(plan, TakesGradients(hook))
        said.append(str(refused.value))
    return said


def test_zero3_names_the_hook_that_takes_a_gradient(tmp_path: Path) -> None:
    """DeepSpeed would end the hook with a traceback, or the message would blame training_step."""
    for said in spawn(2, take_gradients, tmp_path):
        for hook, told in zip(("on_train_batch_start", "on_train_batch_end"), said, strict=True):
            assert told.startswith(f"Adversarial or a callback, in {hook}, takes a gradient (torch.autograd.grad)")


def run(folder: Path, ranks: int, words: list[str], hook: str, thaws: bool) -> Any:
    plan = cell_plan(folder, ranks, "micro_batch_size=2", "global_batch_size=4", "max_steps=4", "schedule=none",
                     "optimizer=sgd", "optimizer.lr=0.1", *words)  # fmt: skip
    try:
        return fit(plan, Freezes(hook, thaws))["final"]
    except ConfigError as error:
        return str(error)


def run_all(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for hook, cells in FROZEN_LATER.items():
        for name, words in cells.items():
            found[f"{hook} {name}"] = run(
                folder / f"{hook}-{name}", 2, words, hook, thaws=hook == "on_train_batch_start"
            )
    found["thawed fsdp"] = run(folder / "fsdp", 2, ["strategy=fsdp"], "setup", thaws=True)
    for name, words in REFUSED.items():
        found[f"thawed {name}"] = run(folder / name, 2, words, "setup", thaws=True)
    found["ddp"] = run(
        folder / "ddp-later", 2, ["strategy=ddp", UNUSED, "optimizer.momentum=0"], "on_train_batch_end", False
    )
    for name, (hook, words, _) in BEHIND.items():
        found[name] = run(folder / name, 2, [*words, UNUSED], hook, thaws=False)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(2, run_all, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def thawed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """On one rank under ddp, which reduces nothing."""
    found: dict[str, torch.Tensor] = spawn(
        1, run, tmp_path_factory.mktemp("one") / "a", 1, ["strategy=ddp"], "setup", True
    )[0]
    return found


@pytest.mark.parametrize("hook", FROZEN_LATER)
@pytest.mark.parametrize("name", ["fused", "fsdp", "zero2", "zero3"])
def test_what_a_hook_freezes_is_frozen(runs: Any, hook: str, name: str) -> None:
    ddp, found = runs[0][f"{hook} ddp"], runs[0][f"{hook} {name}"]
    for parameter, tensor in ddp.items():
        assert torch.allclose(found[parameter], tensor, atol=1e-6), parameter


def test_fsdp_trains_what_was_frozen_at_the_set_up(runs: Any, thawed: dict[str, torch.Tensor]) -> None:
    for rank in runs:
        for parameter, tensor in thawed.items():
            assert torch.allclose(rank["thawed fsdp"][parameter], tensor, atol=1e-6), parameter


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_be_reduced_is_refused(runs: Any, name: str) -> None:
    for rank in runs:
        told = rank[f"thawed {name}"]
        assert isinstance(told, str) and f"requires_grad=False when {name} was set up" in told and LAYER in told


@pytest.mark.parametrize("name", BEHIND)
def test_what_would_go_on_changing_is_refused(runs: Any, name: str) -> None:
    for rank in runs:
        found, strategy = rank[name], name.partition("-")[0]
        if BEHIND[name][2]:
            assert isinstance(found, str) and f"requires_grad=True when {strategy} was set up" in found
            assert LAYER in found and "freeze it before training starts" in found
            continue
        for parameter, tensor in rank["ddp"].items():
            assert torch.allclose(found[parameter], tensor, atol=1e-6), parameter


class Changes(LightningModule):
    """Its hooks change all that is neither a weight nor a number in one, and leave a frozen teacher out of checkpoints.

    `thaws`: whether the backbone is trained in the second epoch, and not in the first; else the other way round.
    `groups`: what becomes of the groups of the optimizer in the second epoch; `split`: what groups it begins with.
    `bank`: how many rows a buffer begins with that grows.
    """

    def __init__(self, thaws: bool = False, groups: str = "", split: bool = False, bank: int = 0) -> None:
        super().__init__()
        self.thaws, self.groups, self.split, self.strict_loading = thaws, groups, split, False
        self.net, self.other, self.head = nn.Sequential(Layer(4), nn.Dropout(0.5)), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.teacher = nn.Sequential(Layer(4)).requires_grad_(False)
        self.register_buffer("bank", torch.zeros(bank, 4))
        self.register_buffer("late", None)

    def setup(self, stage: str) -> None:
        self.net.requires_grad_(not self.thaws)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "teacher" not in name}

    def on_train_epoch_start(self) -> None:
        if self.current_epoch != 1:
            return
        self.net.requires_grad_(self.thaws)
        self.net.eval()
        self.other.track_running_stats = False
        self.late = torch.full((3,), 2.0)
        (optimizer,) = self.trainer.optimizers
        if self.groups == "moves":
            moved = optimizer.param_groups[0]["params"].pop()
            del optimizer.param_groups[-1]
            optimizer.add_param_group({"params": [moved], "lr": 0.03})
        elif self.groups == "adds":
            optimizer.add_param_group({"params": list(self.head.parameters()), "lr": 0.03})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[1]
        self.bank = torch.cat([self.bank, torch.ones(1, 4)])
        late = 1.0 if self.late is None else self.late.mean()
        out = self.head(self.other(self.net(x))) * late - self.teacher(x)
        return (out - self.bank.sum() / 40).square().mean()

    def configure_optimizers(self) -> Any:
        groups = [[*self.net.parameters(), *self.other.parameters()], [*self.head.parameters()]]
        if self.split:
            groups = [groups[0][:1], groups[0][1:], groups[1]]
        groups = groups[:1] if self.groups == "adds" else groups
        return torch.optim.SGD([{"params": of, "lr": 0.1 / (1 + i)} for i, of in enumerate(groups)], 0.1,
                               momentum=0.9 if self.groups else 0)  # fmt: skip


# ZeRO trains what is frozen later only without momentum, and neither ddp nor ZeRO what is thawed later
CHANGES = {
    "ddp": ["strategy=ddp", UNUSED, "+module.groups=moves"],
    "fsdp": ["strategy=fsdp", "+module.groups=adds", "+module.thaws=true"],
    "zero1": ["strategy=zero1", UNUSED],
    "zero2": ["strategy=zero2", UNUSED],
    "zero3": ["strategy=zero3", UNUSED],
}


def change(folder: Path) -> dict[str, Any]:
    """In each rank: a run of three epochs of five steps, one that goes on from its second, and what is refused."""
    common = ("global_batch_size=8", "micro_batch_size=4", "units=[Layer]", "max_steps=15",
              "checkpoint.save_every_n_steps=8", "checkpoint.keep_last=9")  # fmt: skip

    def go(name: str, *words: str) -> Any:
        return fit(plan_of(folder / name, "Changes", *common, *words, file=__name__))

    found: dict[str, Any] = {}
    for name, words in CHANGES.items():
        straight = go(name, *words)
        resume = f"resume={folder / name / 'checkpoints' / 'step-00000008.ckpt'}"
        found[name] = straight, go(f"{name}-resumed", *words, resume), SavedWeights(Path(resume[7:])).shapes
    with pytest.raises(ConfigError) as refused:
        go("other", *words, resume, "+module.split=true")
    if dist.get_rank() == 0:
        main(["export", resume[7:], "format=safetensors", f"out={folder / 'exported'}"])
    dist.barrier()
    begun = go("begun", "strategy=fsdp", "+module.bank=8", f"init_from={folder / 'exported'}", "max_steps=1")["start"]
    return {**found, "refused": str(refused.value), "begun": begun}


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(2, change, tmp_path_factory.mktemp("changes"))


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_goes_on_with_what_hooks_changed(changed: Any, name: str) -> None:
    """Which weights are trained, modes of layers, groups of the optimizer, shapes of buffers."""
    for rank in changed:
        straight, resumed, saved = rank[name]
        assert unlike(straight, {**resumed, "losses": straight["losses"], "norms": straight["norms"],
                                 "rates": straight["rates"]}) == []  # fmt: skip
        assert resumed["losses"] == straight["losses"][8:] and resumed["rates"] == straight["rates"][8:]
        assert straight["buffers"]["bank"].shape == (15, 4) and saved["bank"] == (8, 4) and saved["late"] == (3,)
        assert "head.weight" in saved and not any("teacher" in parameter for parameter in saved)


def test_a_run_begins_with_an_export_that_lacks_what_was_left_out(changed: Any) -> None:
    for rank in changed:
        straight, begun = rank["zero3"][0], rank["begun"]
        for name, tensor in straight["start"].items():
            assert torch.equal(begun[name], tensor) == ("teacher" in name), name


def test_other_groups_of_the_optimizer_than_were_saved_are_refused(changed: Any) -> None:
    one, rest = "net.0.linear.weight", "net.0.linear.bias, other.weight, other.bias]"
    for rank in changed:
        assert (
            f"configure_optimizers gave SGD the groups [{one}, {rest}, 1 group in common when it was saved, and gives "
            f"[{one}], [{rest}, 1 group in common now: "
        ) in rank["refused"] and "resume_allow=[optimizer]" in rank["refused"]
