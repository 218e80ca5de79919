"""Layers that a hook runs, where something compiled runs beside them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.strategies.weights_in_hooks import LayersInHooks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.outer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(self.inner(x))
        return y


class Steps:
    """Counts the layers that ran as in a step, one within another once."""

    def __init__(self, net: nn.Module) -> None:
        self.begun = self.depth = 0
        self.layers = LayersInHooks(net, self.as_in_steps, torch.bfloat16)

    @contextmanager
    def as_in_steps(self) -> Iterator[None]:
        self.begun += 1
        self.depth += 1
        assert self.depth == 1
        try:
            yield
        finally:
            self.depth -= 1


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_hooks_within_hooks_look_for_themselves() -> None:
    net = Net()
    steps = Steps(net)
    with steps.layers.found():
        with steps.layers.found():
            assert net(torch.ones(2, 4)).dtype == torch.bfloat16
        assert net(torch.ones(2, 4)).dtype == torch.bfloat16
        handle = net.inner.register_forward_hook(lambda *_: within(steps.layers))
        assert net(torch.ones(2, 4)).dtype == torch.bfloat16  # a hook runs while a layer of another one does
        handle.remove()
    assert steps.depth == 0 and not torch.nn.modules.module._global_forward_pre_hooks


def within(layers: LayersInHooks) -> None:
    with layers.found():
        pass


def test_what_ends_a_hook_leaves_nothing_behind() -> None:
    net = Net()
    steps = Steps(net)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    net.inner.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), steps.layers.found():
        net(torch.ones(2, 4))
    assert steps.depth == 0 and not torch.nn.modules.module._global_forward_pre_hooks
    assert not net._forward_hooks


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
@pytest.mark.parametrize("how", ["module", "in place", "function"])
def test_what_a_hook_compiles_besides_is_compiled_once(how: str) -> None:
    steps, teacher = Steps(Net()), Net()
    if how == "in place":
        teacher.compile(backend="eager")
    call = {"module": torch.compile(teacher, backend="eager"), "in place": teacher,
            "function": torch.compile(lambda x: teacher(x) * 2, backend="eager")}[how]  # fmt: skip
    for _ in range(4):
        with steps.layers.found():
            call(torch.ones(2, 4))
    assert graphs() == 1
    assert steps.begun == 0


# A graph that is not whole looks at tensors in between; torch's compiler itself asks for their gradients.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled", ["", "inner", "net"])
def test_layers_run_as_in_a_step_each_time(compiled: str) -> None:
    net = Net()
    steps = Steps(net)
    compiled_first = 0
    if compiled:
        (net if compiled == "net" else net.inner).compile(backend="eager")
    for number in range(1, 4):
        with steps.layers.found():
            assert net(torch.ones(2, 4)).dtype == torch.bfloat16
            assert net.inner(torch.ones(2, 4)).dtype == torch.bfloat16
        assert (steps.begun, steps.depth) == (2 * number, 0)
        compiled_first = graphs() if number == 1 else compiled_first
    assert graphs() == compiled_first
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not net._forward_hooks and not net.inner._forward_hooks
