"""Weights that hooks freeze, or let be trained, in the course of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from safetensors.torch import save_file
from torch import Tensor, nn

from recipes.image_classification.model import ResNet
from shardwise.config.compose import compose
from shardwise.errors import ConfigError
from shardwise.plan import Host
from shardwise.plan.resolve import make_plan
from shardwise.run_dir.checkpoints import list_checkpoints
from shardwise.weights.loading import SavedWeights
from shardwise_tools import main
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

    whole_weights_in = ("on_train_batch_end",)

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


# Parts that `freeze=` names, and weights of a model with another head

IMAGES = [
    "recipe=image_classification", "accelerator=cpu", "micro_batch_size=16", "global_batch_size=32",
    "max_train_batches=2", "max_validation_batches=0", "validate_every_n_steps=null", "checkpoint.monitor=null",
    "optimizer.lr=0.01", "optimizer.weight_decay=0.1", "schedule=none", "log_every_n_steps=1", "model.width=8",
    "freeze=backbone",
]  # fmt: skip
STRATEGIES = ("ddp", "fsdp", "zero2", "zero3")


def image_plan(folder: Path, name: str, *words: str) -> Any:
    (folder / name).mkdir(exist_ok=True)
    command = compose([*IMAGES, f"runs_dir={folder}", f"name={name}", "devices=2", *words])
    plan = make_plan(command.jobs[0].config, Host(cuda_devices=0))
    (folder / name / "plan.json").write_text(plan.to_json())  # the launcher does
    return plan


class BuffersAtStart(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.buffers = {name: buffer.clone() for name, buffer in pl_module.named_buffers()}


def fit_images(folder: Path, name: str, *words: str) -> dict[str, Any]:
    before = BuffersAtStart()
    return fit(image_plan(folder, name, *words), before) | {"buffers at start": before.buffers}


def run_images(folder: Path) -> dict[str, Any]:
    weights = folder / "weights"
    found: dict[str, Any] = {}
    for strategy in STRATEGIES:
        words = [f"strategy={strategy}", f"init_from={weights}", "max_steps=2", "checkpoint=none"]
        found[f"for good {strategy}"] = fit_images(folder, f"good-{strategy}", *words)
    for strategy in ("ddp", "fsdp"):
        words = [f"strategy={strategy}", "freeze_epochs=2"]
        found[f"frozen {strategy}"] = fit_images(folder, f"frozen-{strategy}", *words, "max_steps=4", "checkpoint=none")
        found[f"thawed {strategy}"] = fit_images(folder, f"thawed-{strategy}", *words, "max_steps=6", "checkpoint=none")
        for steps in (3, 5, 6):  # within the last epoch that is frozen, and within the next
            begin = [f"resume={path}" for path in list_checkpoints(folder / f"on-{strategy}")[-1:]]
            found[f"on {strategy}"] = fit_images(folder, f"on-{strategy}", *words, f"max_steps={steps}", *begin)
    return found


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What the files hold, by the names of torchvision, and the runs."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "weights").mkdir()
    model = ResNet(7, layers=[2, 2, 2], block="basic", width=8, in_channels=1, small_images=True)
    model.apply(model.init_module_weights)
    stored = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(stored, folder / "weights/model.safetensors")
    return stored, spawn(2, run_images, folder)[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_another_head_is_trained_on_a_backbone_that_stays_as_it_is(images: Any, strategy: str) -> None:
    stored, run = images[0], images[1][f"for good {strategy}"]
    first = images[1]["for good ddp"]
    for name, tensor in run["final"].items():
        if name.startswith("model.fc."):
            assert tensor.shape[0] == 10 and torch.equal(run["start"][name], first["start"][name])
            assert not torch.equal(tensor, run["start"][name]), name
            assert torch.allclose(tensor, first["final"][name], atol=1e-6), name
        else:
            assert torch.equal(tensor, stored[name.removeprefix("model.")]), name
    for name, buffer in run["buffers"].items():
        assert torch.equal(buffer, run["buffers at start"][name]), name


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_part_is_frozen_for_so_many_epochs_also_over_a_resume(images: Any, strategy: str) -> None:
    frozen, thawed, on = (images[1][f"{kind} {strategy}"] for kind in ("frozen", "thawed", "on"))
    for name, tensor in frozen["final"].items():
        assert torch.equal(tensor, frozen["start"][name]) != name.startswith("model.fc."), name
        assert not torch.equal(thawed["final"][name], thawed["start"][name]), name
        assert torch.equal(on["final"][name], thawed["final"][name]), name
        assert torch.allclose(thawed["final"][name], images[1]["thawed ddp"]["final"][name], atol=1e-5), name
    for name, buffer in frozen["buffers"].items():
        assert torch.equal(buffer, frozen["buffers at start"][name]), name
        assert torch.equal(on["buffers"][name], thawed["buffers"][name]), name
