"""Parameters that a strategy cannot train get one message before anything is set up."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from shardwise.checkpoint.state import unlike
from shardwise.config.compose import compose
from shardwise.errors import ConfigError
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.strategies.refusals import refuse_parameters


class Module(LightningModule):
    def __init__(self, layer: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.part = layer


def plan_of(strategy: str) -> Plan:
    return make_plan(compose([f"strategy={strategy}", "devices=1", "name=x"]).jobs[0].config, Host(cuda_devices=0))


COMPLEX = nn.Parameter(torch.ones(2, dtype=torch.complex64))
SPARSE = nn.Embedding(4, 2, sparse=True)
WRAPPED = torch.compile(nn.Linear(2, 2), backend="eager")


@pytest.mark.parametrize(
    ("layer", "strategy", "said"),
    [
        (COMPLEX, "fsdp", "part holds complex numbers, and fsdp keeps real ones alone: .* or use strategy=ddp"),
        (COMPLEX, "zero2", "part holds complex numbers, and zero2 "),
        (COMPLEX, "ddp", ""),
        (SPARSE, "ddp", "part has sparse=True, .*; leave sparse=True out"),
        (SPARSE, "zero2", "part has sparse=True"),
        (WRAPPED, "zero3", r"part is what torch.compile\(layer\) gives, .*; call layer.compile\(\)"),
        (WRAPPED, "zero2", ""),
        (WRAPPED, "fsdp", ""),
    ],
)
def test_one_message_says_it(layer: nn.Module | nn.Parameter, strategy: str, said: str) -> None:
    module, plan = Module(layer), plan_of(strategy)
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        refuse_parameters(module, plan)


def test_what_is_not_trained_may_be_sparse() -> None:
    frozen = nn.Embedding(4, 2, sparse=True).requires_grad_(False)
    refuse_parameters(Module(frozen), plan_of("ddp"))
    refuse_parameters(Module(SPARSE), replace(plan_of("ddp"), stage="test"))


def test_names_that_torch_compile_has_changed_are_told_from_another_model() -> None:
    wrapped = {"net._orig_mod.weight": (2, 2), "head.bias": (2,)}
    plain = {"net.weight": (2, 2), "head.bias": (2,)}
    for own, other in ((wrapped, plain), (plain, wrapped)):
        assert "differ by the '_orig_mod.' alone" in unlike(own, other, "this model", "the checkpoint")
    assert unlike(wrapped, wrapped, "this model", "the checkpoint") == ""
    assert "size mismatch" in unlike(plain, {**plain, "head.bias": (3,)}, "this model", "the checkpoint")
