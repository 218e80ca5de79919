"""Layers that an axis cannot divide are refused before a rank starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from recipes.language_modeling.model import Transformer
from shardwise.errors import ConfigError
from shardwise.start.targets import check_targets
from tests.harness.cells import cell_plan
from tests.harness.float8 import EMULATED

TENSOR, PIPELINE = "strategy.tensor_parallel_size=2", "strategy.pipeline_parallel_size=2"
EVEN = ("strategy=fsdp", "model.n_kv_heads=2", "model.ffn_dim=44", "model.n_layers=4", "global_batch_size=4",
        "micro_batch_size=2")  # fmt: skip


class Silent(Transformer):
    """Says nothing of its last norm."""

    tensor_parallel_layers = {name: word for name, word in Transformer.tensor_parallel_layers.items() if name != "norm"}


class TwoEmbeddings(Transformer):
    """Has an embedding of positions as well, and would divide both by samples."""

    tensor_parallel_layers = Transformer.tensor_parallel_layers | {"positions": "embedding"}

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.positions = nn.Embedding(16, self.dim)


class Weighed(Transformer):
    """A block owns a parameter itself, and nothing is said of it."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.blocks[0].register_parameter("gamma", nn.Parameter(torch.ones(self.dim)))


class Warm(Transformer):
    """An attention owns a parameter itself."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        temperature = nn.Parameter(torch.ones(1))
        self.blocks[1].attention.register_parameter("temperature", temperature)  # type: ignore[union-attr, operator]


class Loose(Transformer):
    """The model owns a parameter itself, and nothing is said of it."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.scale = nn.Parameter(torch.ones(self.dim))


class Packed(Transformer):
    """Has queries, keys and values in one matrix."""

    word = "column"

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        for block in self.blocks:
            block.attention.wq = nn.Linear(self.dim, 3 * self.dim, bias=False)  # type: ignore[union-attr]
        self.tensor_parallel_layers = self.tensor_parallel_layers | {"blocks.*.attention.wq": self.word}


class PackedByHead(Packed):
    """Has them side by side for each head."""

    word = "column_in_groups"


class Stretched(nn.Linear):
    """Has a scale as well."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.scale = nn.Parameter(torch.ones(outputs))


class Stretches(Transformer):
    """One of its matrices has a scale as well."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.blocks[0].feed_forward.w2 = Stretched(44, self.dim)  # type: ignore[union-attr]


class Odd(Transformer):
    """One layer has a width of its own."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.blocks[1].feed_forward.w1 = nn.Linear(self.dim, 45, bias=False)


class Shallow(Transformer):
    """Has fewer layers than it is told."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes | {"n_layers": 1})


class Large(LightningModule):
    """Does not initialise itself."""

    def __init__(self) -> None:
        raise AssertionError("built by the launcher")


@pytest.mark.parametrize(
    ("model", "words", "message"),
    [
        ("TwoEmbeddings", TENSOR, "model.embedding and model.positions are embeddings, .* call them all 'embedding'$"),
        ("Silent", TENSOR, "^LanguageModel.tensor_parallel_layers says nothing of model.norm, which owns"),
        ("Weighed", TENSOR, "tensor_parallel_layers says nothing of model.blocks.0, which owns model.blocks.0.gamma: "),
        (
            "Warm",
            TENSOR,
            "model.blocks.1.attention is 'gather' and owns model.blocks.1.attention.temperature, which sees",
        ),
        ("Loose", TENSOR, "tensor_parallel_layers says nothing of model, which owns model.scale: name it, 'norm' for"),
        ("Packed", TENSOR, "blocks.0.attention.wq is 'column' and has 72 outputs, and the 'row' behind it takes 24: "),
        (
            "Stretches",
            TENSOR,
            r"feed_forward.w2 \(Stretched\) owns scale besides a weight and a bias, and each .* plain nn.Linear is ",
        ),
        ("Odd", TENSOR, r"^strategy.tensor_parallel_size=2 does not divide the 45 rows of model.blocks.1.feed_forward"),
        ("Shallow", PIPELINE, "^strategy.pipeline_parallel_size=2 makes 2 stages .* and LanguageModel has 1"),
    ],
)
def test_what_cannot_be_divided_is_one_message(tmp_path: Path, model: str, words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_targets([cell_plan(tmp_path / "run", 2, *EVEN, words, f"model._target_={__name__}.{model}")])


def test_a_part_that_fp8_cannot_take_is_one_message(tmp_path: Path) -> None:
    """Of 48 rows each of two ranks has 24, and the products take multiples of 16. Whole, the layer is fine."""
    words = [*EVEN, *EMULATED, "model.dim=64", "model.ffn_dim=48"]
    message = "^strategy.tensor_parallel_size=2 precision=fp8: model.blocks.0.feed_forward.w1 has 48 outputs, 24 on"
    with pytest.raises(ConfigError, match=message):
        check_targets([cell_plan(tmp_path / "run", 2, *words, TENSOR)])
    assert check_targets([cell_plan(tmp_path / "other", 2, *words, PIPELINE)])


def test_what_belongs_together_may_lie_side_by_side_in_one_matrix(tmp_path: Path) -> None:
    assert check_targets([cell_plan(tmp_path / "run", 2, *EVEN, TENSOR, f"model._target_={__name__}.PackedByHead")])


@pytest.mark.parametrize("words", [TENSOR, PIPELINE])
def test_what_can_be_divided_passes(tmp_path: Path, words: str) -> None:
    assert check_targets([cell_plan(tmp_path / "run", 2, *EVEN, words)])


@pytest.mark.parametrize("words", [TENSOR, PIPELINE])
def test_a_module_that_would_take_memory_is_left_to_the_ranks(tmp_path: Path, words: str) -> None:
    plan = cell_plan(tmp_path / "run", 2, *EVEN, words)
    assert check_targets([replace(plan, module={"_target_": f"{__name__}.Large"})])
