"""The casts that give `ddp` the numerics of FSDP2's mixed precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.config.compose import compose
from shardwise.parallel.precision import (
    cast_forward,
    cast_parameters,
    keep_statistics_in_fp32,
    parameter_sites,
    set_dtypes,
)
from shardwise.plan import Host
from shardwise.plan.resolve import make_plan

BF16, FP32 = torch.bfloat16, torch.float32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, more: dict[str, Tensor], fail: bool = False) -> Tensor:
        self.seen += [x.dtype, more["extra"].dtype, self.linear.weight.dtype]
        assert more["indices"].dtype == torch.int64 and self.shift.dtype == FP32, "neither is to be cast"
        if fail:
            raise RuntimeError("inside")
        out: Tensor = self.linear(x)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_parameter("counts", nn.Parameter(torch.arange(3), requires_grad=False))

    def forward(self, x: Tensor, again: bool = False, fail: bool = False) -> Tensor:
        if again:  # a module that calls itself
            out: Tensor = self(x)
            assert self.head.weight.dtype == BF16
            return out
        assert self.head.weight is self.embedding.weight, "a tie is one copy"
        assert self.counts.dtype == torch.int64
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden.float(), more={"extra": hidden.float(), "indices": x}, fail=fail)
        logits: Tensor = self.head(hidden)
        return logits


@pytest.fixture
def model() -> Model:
    """Units and root as ddp prepares them."""
    torch.manual_seed(0)
    made = Model()
    for block in made.blocks:
        cast_forward(block, BF16, parameter_sites(block), cast_inputs=True)
    cast_forward(made, BF16, parameter_sites(made, but=made.blocks), cast_inputs=False)
    return made


@pytest.mark.parametrize("again", [False, True])
def test_units_compute_on_copies_and_gradients_return_to_the_masters(model: Model, again: bool) -> None:
    masters = dict(model.named_parameters())
    out = model(torch.tensor([[1, 2]]), again=again)
    assert out.dtype == BF16
    assert all(set(block.seen) == {BF16} for block in model.blocks)  # type: ignore[arg-type]
    out.float().square().sum().backward()
    assert dict(model.named_parameters()).keys() == masters.keys()
    for name, parameter in model.named_parameters():
        assert parameter is masters[name]
        if parameter.requires_grad:
            assert parameter.dtype == FP32
            assert parameter.grad is not None
            assert parameter.grad.dtype == FP32
            assert parameter.grad.abs().sum() > 0


def test_gradients_accumulate_in_fp32(model: Model) -> None:
    """Two micro-batches, the second far smaller: a 16-bit sum would lose it."""
    weight = model.blocks[0].linear.weight  # type: ignore[union-attr]
    gradients = []
    for scale in (1.0, 2.0**-12):
        (model(torch.tensor([[1, 2]])).float().sum() * scale).backward()
        gradients.append(weight.grad.clone())
    assert torch.equal(gradients[1], gradients[0] * (1 + 2.0**-12))
    assert not torch.equal(gradients[1], gradients[0])


def test_an_exception_inside_leaves_the_masters_in_place(model: Model) -> None:
    masters = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match="inside"):
        model(torch.tensor([[1, 2]]), fail=True)
    assert all(parameter is masters[name] for name, parameter in model.named_parameters())
    model(torch.tensor([[1, 2]])).float().sum().backward()
    assert model.head.weight.grad is not None


def test_owners_are_floating_point_every_place_of_a_tie_and_nothing_inside_units(model: Model) -> None:
    found = parameter_sites(model, but=model.blocks)
    said = [[(type(owner).__name__, name) for owner, name in places] for places in found]
    assert said == [[("Embedding", "weight"), ("Linear", "weight")]]
    model.blocks[0].linear.weight = model.embedding.weight  # type: ignore[union-attr] # a unit's: the root leaves it
    assert parameter_sites(model, but=model.blocks) == []


def test_a_tie_is_one_copy_whose_gradients_meet(model: Model) -> None:
    with cast_parameters(parameter_sites(model, but=model.blocks), BF16):
        assert model.head.weight is model.embedding.weight
        assert model.head.weight.dtype == BF16
        copy = model.head.weight
    assert copy is not model.head.weight
    assert model.head.weight is model.embedding.weight
    with pytest.raises(RuntimeError, match="inside"), cast_parameters(parameter_sites(model), BF16):
        raise RuntimeError("inside")
    assert model.head.weight.dtype == FP32


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.plain = nn.BatchNorm1d(4, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.plain(self.norm(self.linear(x)))
        return out


def test_batch_norm_keeps_weights_and_statistics_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """What BatchNorm gives for 16-bit inputs and fp32 weights; one without statistics is like any other layer."""
    torch.manual_seed(0)
    model, seen = Normed(), []
    normalize = torch.nn.functional.batch_norm

    def look(x: Tensor, mean: Tensor | None, var: Tensor | None, weight: Tensor, bias: Tensor, *rest: object) -> Tensor:
        seen.append([None if t is None else t.dtype for t in (x, mean, var, weight, bias)])
        return normalize(x, mean, var, weight, bias, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "batch_norm", look)
    keep_statistics_in_fp32(model)
    cast_forward(model, BF16, parameter_sites(model), cast_inputs=True)
    x = torch.randn(8, 4) + 300
    out = model(x)
    assert out.dtype == BF16
    assert seen == [[BF16, FP32, FP32, FP32, FP32], [BF16, None, None, BF16, BF16]]
    hidden = nn.functional.linear(x.bfloat16(), model.linear.weight.bfloat16(), model.linear.bias.bfloat16())
    torch.testing.assert_close(model.norm.running_mean, hidden.float().mean(0) * 0.1, rtol=1e-5, atol=1e-5)
    assert {b.dtype for b in (model.norm.running_mean, model.norm.running_var)} == {FP32}
    out.float().square().sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {FP32}
    assert model.norm.weight.grad is not None
    model.eval()(x)


@pytest.mark.parametrize(("precision", "buffers"), [("fp64", torch.float64), ("bf16_true", FP32), ("fp32", FP32)])
def test_buffers_are_cast_under_fp64_alone(precision: str, buffers: torch.dtype) -> None:
    model = Model()
    shared = model.blocks[0].shift
    model.blocks[1].register_buffer("shift", shared)  # type: ignore[arg-type]
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
    set_dtypes(
        model, make_plan(compose(["name=x", f"precision={precision}"]).jobs[0].config, Host(cuda_devices=0)).precision
    )
    weights = {"fp64": torch.float64, "bf16_true": BF16, "fp32": FP32}[precision]
    assert {p.dtype for p in model.parameters()} == {weights, torch.int64}
    assert {name: b.dtype for name, b in model.named_buffers()} == {
        "blocks.0.shift": buffers, "phase": torch.complex64, "steps": torch.int64,
    }  # fmt: skip
    assert model.blocks[1].shift is shared and model.head.weight is model.embedding.weight, "ties are kept"
