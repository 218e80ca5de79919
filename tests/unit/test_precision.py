"""The casts that give `ddp` the numerics of FSDP2's mixed precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.precision import cast_parameters
from shardwise.units import find_units


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        self.seen += [x.dtype, self.linear.weight.dtype]
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

    def forward(self, x: Tensor, again: bool = False, fail: bool = False) -> Tensor:
        if again:  # a module that calls itself
            out: Tensor = self(x)
            assert self.head.weight.dtype == torch.bfloat16
            return out
        assert self.head.weight is self.embedding.weight, "a tie is one copy"
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden.float(), fail=fail)
        logits: Tensor = self.head(hidden)
        return logits


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    made = Model()
    cast_parameters(made, find_units(made, ["Block"]), torch.bfloat16)
    return made


@pytest.mark.parametrize("again", [False, True])
def test_units_compute_on_copies_and_gradients_return_to_the_masters(model: Model, again: bool) -> None:
    masters = dict(model.named_parameters())
    out = model(torch.tensor([[1, 2]]), again=again)
    assert out.dtype == torch.bfloat16
    assert all(dtype == torch.bfloat16 for block in model.blocks for dtype in block.seen)  # type: ignore[union-attr]
    out.float().square().sum().backward()
    assert dict(model.named_parameters()).keys() == masters.keys()
    for name, parameter in model.named_parameters():
        assert parameter is masters[name]
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.abs().sum() > 0


def test_an_exception_inside_leaves_the_masters_in_place(model: Model) -> None:
    masters = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match="inside"):
        model(torch.tensor([[1, 2]]), fail=True)
    assert all(parameter is masters[name] for name, parameter in model.named_parameters())
    model(torch.tensor([[1, 2]])).float().sum().backward()
    assert model.head.weight.grad is not None
