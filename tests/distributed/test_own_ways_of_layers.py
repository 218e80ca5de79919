"""Under a tensor axis: hooks that see whole tensors work as on one device, and what sees a part ends the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from shardwise.errors import ConfigError
from tests.distributed.test_hugging_face import TENSOR, check
from tests.harness.cells import fit
from tests.harness.hugging_face import CausalLM, Run, plan_of, run_all
from tests.harness.processes import spawn


class Hooked(CausalLM):
    """What goes into one layer is scaled, and what comes out of another one is bounded."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        for layer in self.lm.model.layers:
            layer.mlp.up_proj.register_forward_pre_hook(lambda _, x: (x[0] / x[0].abs().amax(-1, keepdim=True),))
            layer.mlp.down_proj.register_forward_hook(lambda _, x, out: (out * 20).tanh() / 20)


class Rounding(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        rounded = (self.weight * 64).round() / 64
        return F.linear(x, self.weight + (rounded - self.weight).detach())


class Rounded(CausalLM):
    """Trains for weights that are rounded."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        for layer in self.lm.model.layers:
            layer.mlp.down_proj.__class__ = Rounding


class Looking(CausalLM):
    """Its hook adds what it computes of a layer's input."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        for layer in self.lm.model.layers:
            layer.mlp.down_proj.register_forward_hook(lambda _, x, out: out + x[0].mean(-1, keepdim=True))


class Late(Callback):
    """Puts a hook on a layer when all is set up."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        layer: Any = pl_module.get_submodule("lm.model.layers.0.self_attn.o_proj")
        layer.register_forward_pre_hook(lambda _, x: (x[0] - x[0].mean(-1, keepdim=True),))


def own(kind: type[CausalLM]) -> Run:
    return Run(TENSOR, model=(f"_target_={__name__}.{kind.__name__}",))


def test_hooks_that_see_whole_tensors_equal_the_plain_loop(tmp_path: Path) -> None:
    check([own(Hooked)], spawn(2, run_all, tmp_path, 2, [own(Hooked)]), tmp_path)


def messages(folder: Path) -> list[str]:
    """In each rank: how runs end, one after the other."""
    found = []
    for number, (kind, callbacks) in enumerate([(Rounded, []), (Looking, []), (CausalLM, [Late()])]):
        with pytest.raises(ConfigError) as refused:
            fit(plan_of(own(kind), folder / str(number), 2), *callbacks)
        found.append(str(refused.value))
    return found


def test_what_would_see_a_part_ends_the_run(tmp_path: Path) -> None:
    for rounded, looking, late in spawn(2, messages, tmp_path):
        assert "layers.0.mlp.down_proj (Rounding) has a forward of its own, and each rank has a part of it" in rounded
        assert "a forward hook on lm.model.layers.0.mlp.down_proj looks at its input" in looking
        assert "layers.0.self_attn.o_proj (Linear) has a forward pre-hook (Late.on_train_start.<locals>" in late
