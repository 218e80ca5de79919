"""A run that goes on has all that its optimizers keep, whatever that is, and its averages, whoever froze a weight."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from shardwise.config.compose import compose
from shardwise.errors import ConfigError
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from tests.harness.cells import fit
from tests.harness.modules import Layer
from tests.harness.processes import spawn

STEPS, STOP = 8, 5


class Own(torch.optim.Optimizer):
    """One of a user's, which steps with `self.factor(state, group)` times the gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.update(self.state[p], p, group))
        return None

    def begin(self, group: dict[str, Any]) -> None: ...

    def update(self, state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Adds(Own):
    """Counts in an option that its first step adds."""

    def begin(self, group: dict[str, Any]) -> None:
        group["steps"] = group.get("steps", 0) + 1

    def update(self, state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad / group["steps"]  # type: ignore[operator]


class Lists(Own):
    """Keeps the last gradients in a list."""

    def update(self, state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> Tensor:
        past = state.setdefault("past", [])
        past.append(p.grad.clone())  # type: ignore[union-attr]
        del past[:-3]
        return sum(past) / len(past)  # type: ignore[no-any-return]


class Numbers(Own):
    """Needs an int as index, a bool and all digits of a float."""

    def update(self, state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> Tensor:
        if not state:
            state.update(count=0, odd=False, decay=1.0)
        factor = (1.0, 0.5, 2.0)[state["count"] % 3] * state["decay"]
        state["count"] += 1
        state["odd"] = not state["odd"]
        state["decay"] *= 0.9
        assert type(state["odd"]) is bool
        return p.grad * factor  # type: ignore[operator, no-any-return]


class Mixed(Own):
    """Keeps a number for one parameter and a tensor for another under one key, a large number and fp64."""

    def update(self, state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> Tensor:
        if not state:
            state.update(step=0 if p.ndim > 1 else torch.tensor(0), seed=2**60, key=2**70)
            state["moment"] = torch.zeros_like(p, dtype=torch.float64)
        assert isinstance(state["step"], int if p.ndim > 1 else Tensor)
        state["step"] += 1
        state["seed"] += 1
        state["key"] += 1
        state["moment"].lerp_(p.grad.double(), 0.1)  # type: ignore[union-attr]
        return (state["moment"] * (1 + state["seed"] % 7 + state["key"] % 5)).float()


class Deque(Lists):
    """From its third step on."""

    def update(self, state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> Tensor:
        state["step"] = state.get("step", 0) + 1
        if state["step"] < 3:
            return p.grad  # type: ignore[return-value]
        past = state.setdefault("past", deque(maxlen=3))
        past.append(p.grad.clone())  # type: ignore[union-attr]
        return sum(past) / len(past)  # type: ignore[no-any-return]


class Keyed(Own):
    """Keeps a dict by parameters."""

    def update(self, state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> Tensor:
        first = self.state["all"].setdefault("first", {})  # type: ignore[index]
        first.setdefault(p, p.detach().clone())
        return p.grad + 0.1 * first[p]  # type: ignore[operator, no-any-return]


class Wraps(Own):
    """Steps another optimizer, whose state its `state_dict` gives, as timm's Lookahead does."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters)
        self.inner = torch.optim.SGD(parameters, 0.1, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


class Fails(Own):
    def update(self, state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad  # type: ignore[return-value]

    def state_dict(self) -> dict[str, Any]:
        raise AttributeError("this has no state")


class Beside(Own):
    """Keeps something for no parameter."""

    def begin(self, group: dict[str, Any]) -> None:
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1  # type: ignore[index]

    def update(self, state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad / self.state["all"]["steps"]  # type: ignore[index, operator]


class Lookahead(Own):
    """Has a `state_dict` of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.slow: list[Tensor] = []
        self.steps = 0

    def begin(self, group: dict[str, Any]) -> None:
        self.slow = self.slow or [p.clone() for p in group["params"]]
        self.steps += 1
        if self.steps % 4 == 0:
            for p, slow in zip(group["params"], self.slow, strict=True):
                slow.lerp_(p, 0.5)
                p.copy_(slow)

    def update(self, state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> Tensor:
        return p.grad  # type: ignore[return-value]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"slow": self.slow, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        given = dict(state_dict)
        self.slow, self.steps = given.pop("slow"), given.pop("steps")
        super().load_state_dict(given)


class Asks(Own):
    """Needs a closure."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "this optimizer needs a closure"


class Any_(LightningModule):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer, self.layers = optimizer, nn.Sequential(Layer(4), Layer(4))
        self.automatic_optimization = optimizer != "LBFGS"

    def loss(self, batch: Any) -> Tensor:
        return (self.layers(batch[1]) - 1).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)
        return None

    def configure_optimizers(self) -> Any:
        if self.optimizer == "LBFGS":
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)
        return globals()[self.optimizer](self.parameters())


class Freezes(LightningModule):
    """A GAN as pix2pix has it: one part is frozen while the other is trained, also when a checkpoint is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = Layer(4), Layer(4)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for trained, optimizer in zip((self.first, self.second), optimizers, strict=True):
            self.requires_grad_(False)
            trained.requires_grad_(True)
            optimizer.zero_grad()
            self.manual_backward((self.second(self.first(batch[1])) - 1).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), 0.05) for part in (self.first, self.second)]

    def on_train_start(self) -> None:
        self.mine, self.began = [p.detach().clone() for p in self.parameters()], self.global_step

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for average, p in zip(self.mine, self.parameters(), strict=True):
            average.lerp_(p.detach(), 0.5)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.began == 0 and self.global_step == STEPS * 2:
            for average, p in zip(self.mine, self.parameters(), strict=True):
                torch.testing.assert_close(average, p.detach())


class Unfreezes(LightningModule):
    """A layer is frozen until the second epoch, and saves by itself within a validation."""

    def __init__(self, path: str = "") -> None:
        super().__init__()
        self.path, self.layers = path, nn.Sequential(Layer(4), Layer(4))
        self.layers[0].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step >= 4:
            self.layers[0].requires_grad_(True)
        return (self.layers(batch[1]) - 1).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def on_validation_epoch_end(self) -> None:
        if self.path and self.global_step == STOP:
            self.trainer.save_checkpoint(self.path)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Logs(LightningModule):
    """Python's own functions as reductions, which Lightning takes, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(4), Layer(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self.layers(batch[1]) - 1).square().mean()
        for by in (max, min, sum):
            self.log(by.__name__, loss, on_step=False, on_epoch=True, reduce_fx=by)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def plan_of(folder: Path, module: str, *words: str) -> Plan:
    folder.mkdir(parents=True, exist_ok=True)
    argv = [
        "recipe=custom", f"module._target_={__name__}.{module}", "data._target_=tests.harness.modules.Samples",
        "+data.kind=pairs", "+data.batch_size=${micro_batch_size}", f"runs_dir={folder.parent}", f"name={folder.name}",
        "accelerator=cpu", "micro_batch_size=2", "checkpoint.monitor=null", "log_every_n_steps=1", *words,
    ]  # fmt: skip
    return make_plan(compose(argv).jobs[0].config, Host(cuda_devices=0))


def own_weights(found: dict[str, Any]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in found["final"].values()])


def straight_and_resumed(folder: Path, module: str, *words: str, each: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of a run, of one that was stopped and went on, and of that one at its stop. `each`: steps a batch."""
    words = ("devices=1", "global_batch_size=2", "checkpoint.save_every_n_steps=1", *words)
    straight = fit(plan_of(folder / "straight", module, *words, f"max_steps={STEPS * each}"))
    stopped = fit(plan_of(folder / "stopped", module, *words, f"max_steps={STOP * each}"))
    saved = folder / "stopped" / "checkpoints" / f"step-{STOP * each:08d}.ckpt"
    resumed = fit(plan_of(folder / "stopped", module, *words, f"resume={saved}", f"max_steps={STEPS * each}"))
    return own_weights(straight), own_weights(resumed), own_weights(stopped)


OPTIMIZERS = ("Adds", "Lists", "Numbers", "Mixed", "Deque", "Keyed", "Wraps", "Beside", "Lookahead", "LBFGS")


def go_on(folder: Path) -> None:
    """In one rank."""
    for optimizer in OPTIMIZERS:
        straight, resumed, stopped = straight_and_resumed(folder / optimizer, "Any_", f"module.optimizer={optimizer}")
        assert torch.equal(straight, resumed), optimizer
        assert not torch.equal(straight, stopped), optimizer
    straight, resumed, _ = straight_and_resumed(
        folder / "gan", "Freezes", "ema_decay=0.5", f"validate_every_n_steps={STEPS}", each=2
    )
    assert torch.equal(straight, resumed), "a part that is frozen at the save"
    path = folder / "mine.ckpt"
    words = ("ema_decay=0.5", "validate_every_n_steps=5", f"+module.path={path}")
    straight, resumed, stopped = straight_and_resumed(folder / "thaw", "Unfreezes", *words)
    assert torch.equal(straight, resumed), "a part that is trained later"
    more = ("devices=1", "global_batch_size=2", "checkpoint=none", *words, f"resume={path}")
    assert torch.equal(own_weights(fit(plan_of(folder / "mine", "Unfreezes", *more, f"max_steps={STEPS}"))), straight)
    epoch = ("devices=1", "global_batch_size=2", "checkpoint.save_every_n_steps=1")
    logged = fit(plan_of(folder / "logs", "Logs", *epoch, "max_epochs=1"))["validation"]
    fit(plan_of(folder / "logged", "Logs", *epoch, f"max_steps={STOP}"))
    saved = folder / "logged" / "checkpoints" / f"step-{STOP:08d}.ckpt"
    again = fit(plan_of(folder / "logged", "Logs", *epoch, f"resume={saved}", "max_epochs=1"))["validation"]
    assert {by: logged[by] for by in ("max", "min", "sum")} == {by: again[by] for by in ("max", "min", "sum")}
    with pytest.raises(ConfigError, match=r"Fails\.state_dict\(\) fails .*this has no state.* or checkpoint=none"):
        fit(plan_of(folder / "fails", "Any_", "module.optimizer=Fails", *epoch, "max_steps=2"))
    fit(plan_of(folder / "unsaved", "Any_", "module.optimizer=Fails", *more[:3], "max_steps=2"))
    with pytest.raises(ConfigError, match="Any_ uses Asks, whose step asks for a closure .*_optimization = False"):
        fit(
            plan_of(folder / "asks", "Any_", "module.optimizer=Asks", "devices=1", "global_batch_size=2", "max_steps=2")
        )


def test_a_run_goes_on_with_all_that_an_optimizer_keeps(tmp_path: Path) -> None:
    spawn(1, go_on, tmp_path)


def refuse(folder: Path) -> None:
    """In each rank: in the first steps, before there is work that could be lost."""
    words = ("devices=2", "global_batch_size=4", "max_steps=4", "strategy=fsdp")
    for optimizer, kept in (("Lists", "past"), ("Lookahead", "slow"), ("Deque", "past")):
        with pytest.raises(ConfigError, match=f"{optimizer} keeps {kept}, which has not the form of its weights"):
            fit(plan_of(folder / optimizer, "Any_", f"module.optimizer={optimizer}", *words))
    fit(plan_of(folder / "numbers", "Any_", "module.optimizer=Numbers", *words))
    fit(plan_of(folder / "unsaved", "Any_", "module.optimizer=Lists", *words, "checkpoint=none"))


def test_what_shards_cannot_keep_is_refused_in_the_first_steps(tmp_path: Path) -> None:
    spawn(2, refuse, tmp_path)


class OfASet(LightningModule):
    """Its groups have another order on each rank, as where they are made of a Python set."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(4), Layer(4))  # weights of equal sizes

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.layers(batch[1]) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return torch.optim.SGD(reversed(parameters) if torch.distributed.get_rank() else parameters, lr=0.1)


def train_of_sets(folder: Path) -> dict[str, list[float]]:
    words = ["devices=2", "global_batch_size=4", "max_steps=3"]
    return {name: fit(plan_of(folder / name, "OfASet", f"strategy={name}", *words))["losses"] for name in SETS}


SETS = ("ddp", "fsdp", "zero1", "zero2", "zero3")


def test_groups_that_ranks_order_differently_train_as_under_ddp(tmp_path: Path) -> None:
    [found, _] = spawn(2, train_of_sets, tmp_path)
    for name in SETS:
        assert found[name] == pytest.approx(found["ddp"], rel=1e-6), name
