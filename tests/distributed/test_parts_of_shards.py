"""What code of the user's writes into parts of gradients and weights is kept as under stock Lightning, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.utils.data import DataLoader

from shardwise.errors import ConfigError
from shardwise.strategies.fsdp_views import WritableViews, assigning_whole
from tests.distributed.test_drawn_alike import plan_of
from tests.harness.cells import fit
from tests.harness.modules import Layer, samples
from tests.harness.processes import spawn

STEPS = 3
MASK = torch.arange(12).view(3, 4) % 2 == 0


class Writes(LightningModule):
    """The head has three rows, so that one rank has two of them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.net, self.head = how, nn.Sequential(Layer(4), Layer(4)), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        if how == "behind sums":
            self.head.weight.register_post_accumulate_grad_hook(halve_rows)
            self.scale.register_post_accumulate_grad_hook(square)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.head(self.net(batch[1])) * self.scale).square().mean()

    @property
    def gradient(self) -> Tensor:
        assert self.head.weight.grad is not None
        return self.head.weight.grad

    def on_after_backward(self) -> None:
        if self.how == "after the backward pass":
            self.gradient[1:].mul_(3)
            square(self.scale)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.how in GRADIENTS:
            GRADIENTS[self.how](self.head.weight)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.how == "rows behind the step":
            self.head.weight.data[:1].mul_(0.5)
        if self.how == "data behind the step":
            self.head.weight.data = F.normalize(self.head.weight.data, dim=1)
        if self.how == "a whole tensor":
            self.head.bias.data = torch.arange(3.0)
        if self.how == "there and back":
            kept = self.head.weight.data
            self.head.weight.data = self.head.weight.data * 0
            self.head.weight.data = kept

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        super().lr_scheduler_step(scheduler, metric)
        if self.how == "with the schedule":
            self.head.weight.data[:1].mul_(0.5)

    def halve_row(self, *_: Any) -> None:
        self.head.weight.data[:1].mul_(0.5)

    def configure_optimizers(self) -> Any:
        if self.how == "in the set-up":
            self.head.weight.data[:1].mul_(2)
            self.head.bias.data = self.head.bias.data + 1
        made = OPTIMIZERS.get(self.how, torch.optim.SGD)(self.parameters(), 0.1)
        if self.how == "hook of the step":
            made.register_step_post_hook(self.halve_row)
        return [made], [{"scheduler": torch.optim.lr_scheduler.StepLR(made, 2), "interval": "step"}]


class Zeroes(Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if pl_module.how == "callback":
            pl_module.gradient[:1].zero_()


def halve_rows(p: Tensor) -> None:
    assert p.grad is not None
    p.grad[:1].mul_(0.5)


def square(p: Tensor) -> None:
    """The mean over ranks of their squares is another number."""
    assert p.grad is not None
    p.grad.square_()


def rows_by_norm(p: Any) -> None:
    for row in p.grad:
        row.div_(row.norm() + 1)


def masked(p: Any) -> None:
    p.grad[MASK] = 0


def assigned(p: Any) -> None:
    p.grad[1:, 2] = 0.25


def part_and_whole(p: Any) -> None:
    """A part that is kept follows what is written into all of it."""
    part = p.grad.view(-1)[::2]
    p.grad.mul_(2)
    part.add_(1)
    p.grad.div_(p.grad.norm())


def other(p: Any) -> None:
    p.grad = torch.cat([p.grad[1:], p.grad[:1]])


GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda p: p.grad[:1].zero_(), "strides": lambda p: p.grad.view(-1)[::2].mul_(0), "masked": masked,
    "rows by norm": rows_by_norm, "assigned": assigned, "part and whole": part_and_whole, "another gradient": other,
    "clipped": lambda p: torch.nn.utils.clip_grad_norm_([p], 0.01),
}  # fmt: skip


class Assigning(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.evaluate(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p)

    def evaluate(self, closure: Any) -> None:  # stock Lightning's way
        if closure is not None:
            with torch.enable_grad():
                closure()

    def update(self, p: Any) -> None:
        p.data = p.data - 0.1 * p.grad


class ByRows(Assigning):
    def update(self, p: Any) -> None:
        (p[:1] if p.ndim else p).sub_(p.grad[:1] if p.ndim else p.grad, alpha=0.1)


OPTIMIZERS: dict[str, Any] = {"assigning optimizer": Assigning, "optimizer of rows": ByRows}
STEP = ("rows behind the step", "data behind the step", "a whole tensor", "there and back", "with the schedule",
        "hook of the step", "in the set-up")  # fmt: skip
KEPT = ("nothing", "callback", "after the backward pass", "behind sums", *GRADIENTS, *OPTIMIZERS, *STEP)
LOOKS = ("callback", "after the backward pass", "another gradient", "rows")  # a few, all are the same to DeepSpeed


def train(folder: Path, how: str, *words: str) -> Any:
    """In each rank."""
    try:
        plan = plan_of(folder / how.replace(" ", "-"), "Writes", f"module.how={how}", *words, "units=[Layer]",
                       f"max_steps={STEPS}", "global_batch_size=4", "checkpoint=none", file=__name__)  # fmt: skip
        return fit(plan, Zeroes())["final"]
    except ConfigError as error:
        return str(error)


def train_all(folder: Path, hows: tuple[str, ...], *words: str) -> dict[str, Any]:
    return {how: train(folder, how, *words) for how in hows}


def stock(how: str) -> dict[str, Tensor]:
    """Lightning's own Trainer on one device, with the same samples in each step."""
    module = Writes(how)
    loader = DataLoader(samples("pairs", 40, 0), batch_size=4)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Zeroes()],
    )  # fmt: skip
    trainer.fit(module, loader)
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.fixture(scope="module")
def truth() -> dict[str, dict[str, Tensor]]:
    return {how: stock(how) for how in KEPT}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("parts")
    runs: dict[str, Any] = spawn(2, train_all, folder, KEPT, "strategy=fsdp", timeout_seconds=480)[0]
    return runs


def assert_like(truth: dict[str, Tensor], found: Any) -> None:
    assert not isinstance(found, str), found
    for name, weight in truth.items():
        assert torch.allclose(found[name], weight, atol=1e-6), name


@pytest.mark.parametrize("how", KEPT)
def test_what_is_written_is_kept(truth: dict[str, dict[str, Tensor]], found: dict[str, Any], how: str) -> None:
    if how not in ("nothing", "there and back"):
        assert any(not torch.allclose(truth[how][name], weight) for name, weight in truth["nothing"].items())
    assert_like(truth[how], found[how])


def test_copies_of_shards_keep_it_too(truth: dict[str, dict[str, Tensor]], tmp_path: Path) -> None:
    hows = ("rows", "another gradient", "data behind the step", "behind sums")
    words = "strategy=fsdp_hybrid", "strategy.shard_size=1"
    for how, weights in spawn(2, train_all, tmp_path, hows, *words)[0].items():
        assert_like(truth[how], weights)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_zero_refuses_to_look_at_gradients(tmp_path: Path, strategy: str) -> None:
    found = spawn(2, train_all, tmp_path, LOOKS, f"strategy={strategy}")[0]
    for how in LOOKS:
        assert "looks at gradients, and under" in found[how], found[how]


def test_another_shape_is_refused(tmp_path: Path) -> None:
    refusal = r"p.data = \(4,\) float32 on cpu: the weight is sharded, and is \(5, 4\) float32 on cpu; give it a tensor"
    with pytest.raises(AssertionError, match=refusal):
        spawn(2, operate, {"other shape": give_other_shape})


# Operations on a tensor of 5 rows, of which one rank has three


def swap(g: Any) -> None:
    before = g.data
    g.data = torch.ones(5, 4)
    g.add_(before)


def swap_parts(g: Any) -> None:
    data = g.data
    part = data[1:]
    g.data = g * 3
    part.zero_()
    g.add_(data)


def give_other_shape(g: Any) -> None:
    g.data = torch.zeros(4)


def split(g: Any) -> None:
    first, second = g.split(3)
    first.zero_()
    second.copy_(torch.ones(2, 4))


def out(g: Any) -> None:
    torch.mul(g[:2], 2, out=g[:2])


def rows_by_index(g: Any) -> None:
    g[torch.tensor([0, 3])] = 0


def of_what_was_computed(g: Any) -> None:
    double = g * 2
    double[:3].zero_()
    g.add_(double)


def of_a_sum(g: Any) -> None:
    total = g.sum(0)
    total[:2].fill_(7)
    g.add_(total)


ON_PARTS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda g: g[:3].zero_(), "view": lambda g: g.view(-1)[::2].mul_(0), "turned": lambda g: g.t().mul_(2),
    "turned rows": lambda g: g.T[:2].mul_(2), "rows of the turned": lambda g: g.T[:, :2].mul_(2), "split": split,
    "chunk": lambda g: g.chunk(2)[0].zero_(), "data": lambda g: g.data[:2].zero_(),
    "data of a part": lambda g: g[:2].data.zero_(), "detached part": lambda g: g[:2].detach().zero_(),
    "diagonal": lambda g: g.diagonal().zero_(), "reshaped": lambda g: g.reshape(2, 10)[0].zero_(),
    "flat": lambda g: g.flatten()[3:].zero_(), "narrow": lambda g: g.narrow(0, 0, 2).zero_(),
    "one number": lambda g: g[0, 0].zero_(), "columns": lambda g: g[:, :2].zero_(), "masked": rows_by_index,
    "many": lambda g: torch._foreach_mul_([g[:2], g[2:]], 3.0), "out": out, "rows": lambda g: g[:2].copy_(g[2:4]),
    "swap": swap, "swap parts": swap_parts, "computed": of_what_was_computed, "sum": of_a_sum,
    "cumulated": lambda g: g.cumsum_(0), "lower": lambda g: g.tril_(), "added": lambda g: g.add_(torch.ones(5, 4)),
    "by index": lambda g: g.index_fill_(0, torch.tensor([1]), 0.0), "rows added": lambda g: g[1:].add_(g[:-1] * 2),
}  # fmt: skip


def operate(operations: dict[str, Callable[[Any], Any]] | None = None) -> dict[str, bool]:
    """In each rank: whether each operation gives what it gives with a plain tensor."""
    start, found = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), {}
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for name, operation in (operations or ON_PARTS).items():
        plain, sharded = start.clone(), distribute_tensor(start.clone(), mesh, [Shard(0)])
        shard = sharded._local_tensor
        operation(plain)
        with WritableViews(), assigning_whole():
            operation(sharded)
        whole = DTensor.from_local(shard, mesh, [Shard(0)], shape=plain.shape, stride=plain.stride()).full_tensor()
        found[name] = torch.allclose(whole, plain)
    dist.destroy_process_group()
    return found


def test_operations_on_parts_are_those_on_plain_tensors() -> None:
    found = spawn(2, operate)
    assert len(found[0]) == len(ON_PARTS) and all(all(one.values()) for one in found), found
