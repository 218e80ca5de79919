"""`precision=fp8` where ranks divide the layers, or have some of them: by emulation, against one process.

A rank multiplies a part of a matrix, which has scales of its own: it rounds otherwise than one process does. So a layer
is compared with torchao's own layers of these parts, and a run with what fp8 costs one process. In a pipeline nothing
is rounded otherwise, and not a bit is another.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.config.groups import Float8Config
from shardwise.parallel.float8 import Float8Layers
from shardwise.parallel.tensor_parallel import TensorParallel, divided_layers
from tests.harness.cells import cell_plan, fit
from tests.harness.divided import COPIES, INTERLEAVED, axis_words
from tests.harness.float8 import EMULATED
from tests.harness.processes import spawn
from tests.harness.reference import update_deviation

RECIPES = ("tensorwise", "rowwise")
WIDTH, INNER, LENGTH = 64, 96, 24


class Declared(nn.Module):
    """Two layers with biases, between parts of the sequence."""

    tensor_parallel_layers: ClassVar[dict[str, str]] = {"": "gather", "up": "column", "down": "row"}
    cuts_sequence = True

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():  # the largest values are in the last rows and columns, which one rank has
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * torch.linspace(0.1, 1, p.shape[-1]))
            self.up.weight.mul_(torch.linspace(0.1, 1, INNER)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out


class Planned(Declared):
    """The same by the plan of a Hugging Face model: between divided layers a rank has the whole sequence."""

    tensor_parallel_layers: ClassVar[dict[str, str]] = {}
    cuts_sequence, config = False, None

    @property
    def tp_plan(self) -> dict[str, str]:
        return {"up": "colwise", "down": "rowwise"}


def drawn() -> tuple[Tensor, Tensor]:
    """An input, and the gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    x, gradient = (torch.randn(2, LENGTH, WIDTH, generator=generator).bfloat16() for _ in range(2))
    return x, gradient.float()


def run_layers() -> dict[tuple[str, str], dict[str, Tensor]]:
    """In each of two ranks: output and gradients of a divided module, put together."""
    dist.init_process_group("gloo")
    found, group = {}, dist.group.WORLD
    assert group is not None
    rank = group.rank()

    def own(whole: Tensor, cuts: bool) -> Tensor:
        return whole.chunk(2, dim=1)[rank].contiguous() if cuts else whole

    def joined(part: Tensor, cuts: bool) -> Tensor:
        parts = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(parts, part)
        return torch.cat(parts, dim=1) if cuts else part

    for kind in (Declared, Planned):
        for recipe in RECIPES:
            module, cuts = kind(), kind.cuts_sequence
            divided = TensorParallel(module, group)
            fp8 = Float8Layers(module, Float8Config(recipe, (), 16, emulate=True), divided_layers(divided.layers), 2)
            assert len(fp8.layers) == 2
            fp8.compute()
            divided.wrap(module)
            divided.cut(module)
            x, gradient = (own(tensor, cuts) for tensor in drawn())
            out = module(x.requires_grad_())
            out.backward(gradient)
            assert x.grad is not None
            divided.sum_gradients(torch.float32)
            found[kind.__name__, recipe] = {"out": joined(out.detach(), cuts), "x": joined(x.grad, cuts)} | {
                name: divided.whole(name, p.grad) for name, p in module.named_parameters() if p.grad is not None
            }
    dist.destroy_process_group()
    return found


def layers_in_parts(recipe: Any) -> dict[str, Tensor]:
    """The same in one process: torchao's layer for each part of a layer."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    whole, (x, gradient) = Declared(), drawn()
    ups, downs = [], []
    for rows in (slice(0, INNER // 2), slice(INNER // 2, INNER)):
        up, down = nn.Linear(WIDTH, INNER // 2), nn.Linear(INNER // 2, WIDTH, bias=False)
        with torch.no_grad():
            up.weight.copy_(whole.up.weight[rows])
            up.bias.copy_(whole.up.bias[rows])
            down.weight.copy_(whole.down.weight[:, rows])
        ups.append(Float8Linear.from_float(up, config))
        downs.append(Float8Linear.from_float(down, config))
    x.requires_grad_()
    out = sum(down(torch.relu(up(x))) for up, down in zip(ups, downs, strict=True)) + whole.down.bias
    out.backward(gradient)
    assert x.grad is not None and whole.down.bias.grad is not None
    return {
        "out": out.detach(), "x": x.grad, "down.bias": whole.down.bias.grad,
        "up.weight": torch.cat([up.weight.grad for up in ups]), "up.bias": torch.cat([up.bias.grad for up in ups]),
        "down.weight": torch.cat([down.weight.grad for down in downs], dim=1),
    }  # fmt: skip


def test_a_rank_computes_torchaos_product_of_its_part() -> None:
    """Forward and backward, with biases, which are added once; the sum of two parts in bf16 has one order."""
    ranks = spawn(2, run_layers)
    for (kind, recipe), found in ranks[0].items():
        expected = layers_in_parts(recipe)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            off = float((found[name].float() - tensor.float()).norm() / tensor.float().norm())
            print("NUMBERS", kind, recipe, name, off)
            assert off <= 1e-6, (kind, recipe, name, off)
            assert torch.equal(ranks[1][kind, recipe][name], found[name])


# The language model: sizes whose halves are multiples of 16. AdamW's first steps divide rounding errors by themselves.
SIZES = [
    "model.dim=64", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=96", "model.n_layers=4",
    "model.tie_embeddings=false", "max_steps=3", "micro_batch_size=2", "global_batch_size=8", "checkpoint=none",
    "optimizer=sgd", "optimizer.lr=0.3", "schedule=none", "gradient_clip_val=null", "validate_every_n_steps=3",
]  # fmt: skip
ROWWISE = "precision.fp8.recipe=rowwise"


def run_cells(folder: Path, ranks: int, cells: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """In each rank: one cell after the other."""
    return {
        name: fit(cell_plan(folder / f"{ranks}-{number}", ranks, *SIZES, "strategy=fsdp", *words))
        for number, (name, words) in enumerate(cells.items())
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The runs of one process."""
    cells = {"bf16": ["precision=bf16"], "tensorwise": EMULATED, "rowwise": [*EMULATED, ROWWISE]}
    found: dict[str, dict[str, Any]] = spawn(1, run_cells, tmp_path_factory.mktemp("one"), 1, cells)[0]
    return found


def test_a_pipeline_changes_no_bit(tmp_path: Path, alone: Any) -> None:
    """Each stage has the scales of its own weights. Both recipes, and two stages a rank."""
    stages = [*EMULATED, *axis_words(1, 1, 2)]
    cells = {"tensorwise": stages, "interleaved": [*stages, *INTERLEAVED], "rowwise": [*stages, ROWWISE]}
    for name, own in spawn(2, run_cells, tmp_path, 2, cells)[0].items():
        expected = alone["rowwise" if name == "rowwise" else "tensorwise"]
        assert own["losses"] == expected["losses"] and own["validation"] == expected["validation"], name
        assert all(torch.equal(own["final"][key], tensor) for key, tensor in expected["final"].items()), name


def off(one: dict[str, Any], other: dict[str, Any]) -> float:
    """How far the updates of two runs are apart: the mean over tensors of a relative norm."""
    deviations = update_deviation(one["start"], one["final"], other["final"]).values()
    return sum(deviations) / len(deviations)


DIVIDED = {
    2: {
        "tensorwise": [*EMULATED, *axis_words(2)],
        "rowwise": [*EMULATED, *axis_words(2), ROWWISE],
        "tensorwise, compiled": [*EMULATED, *axis_words(2), "compile=layer"],
        "rowwise, recomputed": [*EMULATED, *axis_words(2), ROWWISE, "activation_checkpointing=selective"],
    },
    4: {
        "tensorwise, shards": [*EMULATED, *axis_words(2)],
        "tensorwise, copies": [*EMULATED, *axis_words(2, 1, 1, *COPIES)],
        "tensorwise, stages": [*EMULATED, *axis_words(2, 1, 2)],
        "rowwise, parts of sequences": [*EMULATED, *axis_words(2, 2), ROWWISE],
    },
}


@pytest.mark.parametrize("ranks", DIVIDED)
def test_a_divided_model_is_as_far_from_bf16_as_one_process(tmp_path: Path, alone: Any, ranks: int) -> None:
    """fp8 rounds each number by up to 1/16 (e4m3), or 1/8 (e5m2), and parts are rounded by other scales. Two such runs
    differ from bf16 by equally much, and if their errors are independent by √2 times as much from each other. What is
    computed in bf16 by mistake, or with another's scale, is outside of that."""
    found = spawn(ranks, run_cells, tmp_path, ranks, DIVIDED[ranks], timeout_seconds=400)
    for name, own in found[0].items():
        one = alone[name.partition(",")[0]]
        cost = off(one, alone["bf16"])
        numbers = off(own, alone["bf16"]) / cost, off(own, one) / cost
        print("NUMBERS", name, cost, numbers)
        assert all(torch.equal(own["start"][key], tensor) for key, tensor in one["start"].items()), name
        assert 0.6 <= numbers[0] <= 1.4 and 0.5 <= numbers[1] <= 1.6, (name, numbers)
        assert own["losses"] == pytest.approx(one["losses"], rel=1e-3), name
        assert own["norms"] == pytest.approx(one["norms"], rel=1e-2), name
        for other in found[1:]:
            assert all(torch.equal(other[name]["final"][key], tensor) for key, tensor in own["final"].items()), name
