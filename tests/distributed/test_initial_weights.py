"""A run that starts from Hugging Face's Llama has its weights, under every strategy, and its logits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.errors import ConfigError
from shardwise.trainer import build_data, build_module
from shardwise_tools import main
from tests.harness.cells import cell_plan, fit
from tests.harness.exact_resume import WIDTH, Dropping, NoiseData, plan_for
from tests.harness.pipelines import SIZE
from tests.harness.processes import spawn

CELLS = {
    "ddp": ["strategy=ddp"],
    "ddp, bf16, ema": ["strategy=ddp", "precision=bf16", "ema_decay=0.9"],
    "fsdp": ["strategy=fsdp"],
    "zero1, bf16": ["strategy=zero1", "precision=bf16"],
    "zero3": ["strategy=zero3"],
    "zero3, bf16, ema": ["strategy=zero3", "precision=bf16", "ema_decay=0.9"],
    "fsdp, pipeline": ["strategy=fsdp", *SIZE],
}  # fmt: skip
SHAPE = ["model.tie_embeddings=false", "global_batch_size=8", "micro_batch_size=2", "max_steps=1"]


def make_llama(folder: Path, **more: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=61, hidden_size=24, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=41, max_position_embeddings=16, rms_norm_eps=1e-5, initializer_range=0.2,
        rope_theta=500000.0, **more,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


class Look(Callback):
    """The logits before the first step, and the average after it."""

    logits: Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        tokens = torch.arange(32).view(2, 16)
        self.average = trainer.strategy.sharded.average
        self.buffers = {name: buffer.clone() for name, buffer in pl_module.named_buffers()}
        plan = trainer.strategy.plan
        if hasattr(pl_module, "model") and plan.strategy.name == "ddp" and not plan.precision.is_mixed:
            with torch.no_grad():
                self.logits = pl_module.model.head(pl_module.model(tokens))


def run_all(folder: Path, cells: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """In each rank: what each cell starts with and ends with."""
    found = {}
    for number, (name, cell) in enumerate(cells.items()):
        look = Look()
        plan = cell_plan(folder / str(number), 2, *SHAPE, *cell)
        (Path(plan.run_dir) / "plan.json").write_text(plan.to_json())  # the launcher does
        found[name] = {**fit(plan, look), "logits": look.logits, "average": look.average}
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("initial")
    llama = make_llama(folder / "llama")
    assert len(list((folder / "llama").glob("*.safetensors"))) > 2
    return (
        llama,
        folder,
        spawn(2, run_all, folder, {name: [*words, f"init_from={folder}/llama"] for name, words in CELLS.items()}),
    )


def by_our_names(llama: LlamaForCausalLM) -> dict[str, Tensor]:
    """Written down once more, and not taken from the mapping under test."""
    words = [("model.embed_tokens", "embedding"), ("model.layers", "blocks"), ("input_layernorm", "attention_norm"),
             ("post_attention_layernorm", "ffn_norm"), ("self_attn", "attention"), ("q_proj", "wq"), ("k_proj", "wk"),
             ("v_proj", "wv"), ("o_proj", "wo"), ("mlp", "feed_forward"), ("gate_proj", "w1"), ("up_proj", "w3"),
             ("down_proj", "w2"), ("lm_head", "head"), ("model.norm", "norm")]  # fmt: skip
    found = {}
    for name, tensor in llama.state_dict().items():
        for theirs, ours in words:
            name = name.replace(theirs, ours)
        found[f"model.{name}"] = tensor
    return found


@pytest.mark.parametrize("name", CELLS)
def test_the_masters_are_the_file_s(runs: Any, name: str) -> None:
    llama, _, ranks = runs
    expected = by_our_names(llama)
    for found in ranks:
        assert found[name]["start"].keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[name]["start"][key], tensor), key
        assert any(not torch.equal(found[name]["final"][key], tensor) for key, tensor in expected.items())


def test_logits_are_theirs(runs: Any) -> None:
    llama, _, ranks = runs
    with torch.no_grad():
        expected = llama(torch.arange(32).view(2, 16)).logits
    torch.testing.assert_close(ranks[0]["ddp"]["logits"], expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.3


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero3"])
def test_the_first_step_is_that_of_these_weights(runs: Any, strategy: str) -> None:
    """The low-precision copies were made of the masters: what is computed with is what was read."""
    of_ddp, of_all = runs[2][0]["ddp"], {name: run for name, run in runs[2][0].items() if name.startswith(strategy)}
    for name, run in of_all.items():
        bound = 1e-2 if "bf16" in name else 1e-5
        assert run["losses"][0] == pytest.approx(of_ddp["losses"][0], rel=bound), name


def test_an_average_starts_there(runs: Any) -> None:
    llama, _, ranks = runs
    average = ranks[0]["ddp, bf16, ema"]["average"]
    for key, tensor in ranks[0]["ddp, bf16, ema"]["final"].items():
        expected = torch.lerp(by_our_names(llama)[key], tensor, 0.1)
        torch.testing.assert_close(average[key], expected)


def test_exported_under_one_strategy_and_begun_with_under_another(runs: Any, tmp_path: Path) -> None:
    _, folder, ranks = runs
    number = list(CELLS).index("zero3, bf16, ema")
    assert main(["export", str(folder / str(number)), "format=safetensors", f"out={tmp_path}/ours"]) == 0
    assert main(["export", str(folder / str(number)), "format=hf", f"out={tmp_path}/theirs"]) == 0
    tied = make_llama(tmp_path / "tied", tie_word_embeddings=True)
    [checkpoint] = (folder / str(number) / "checkpoints").glob("step-*")
    cells = {
        "checkpoint": ["strategy=fsdp", f"init_from={checkpoint}"],
        "checkpoint, pipeline": ["strategy=fsdp", *SIZE, f"init_from={checkpoint}"],
        "checkpoint, zero3": ["strategy=zero3", "precision=bf16", f"init_from={checkpoint}"],
        "tied": ["strategy=zero3", "model.tie_embeddings=true", f"init_from={tmp_path}/tied"],
        "ours": ["strategy=fsdp", f"init_from={tmp_path}/ours/model.safetensors"],
        "theirs": ["strategy=zero1", "precision=bf16", f"init_from={tmp_path}/theirs"],
        "theirs, pipeline": ["strategy=fsdp", *SIZE, f"init_from={tmp_path}/theirs"],
        "tied, pipeline": ["strategy=fsdp", *SIZE, "model.tie_embeddings=true", f"init_from={tmp_path}/tied"],
    }
    for found in spawn(2, run_all, tmp_path / "runs", cells):
        for cell in cells:
            for key, tensor in ranks[0]["zero3, bf16, ema"]["final"].items():
                if not cell.startswith("tied"):
                    assert torch.equal(found[cell]["start"][key], tensor), key
        for cell in ("tied", "tied, pipeline"):
            assert "model.head.weight" not in found[cell]["start"]
            for key, tensor in found[cell]["start"].items():
                assert torch.equal(tensor, by_our_names(tied)[key]), key
        for key, tensor in found["tied"]["final"].items():
            torch.testing.assert_close(found["tied, pipeline"]["final"][key], tensor, msg=key)


def test_what_a_pipeline_has_trained_is_exported_whole(runs: Any, tmp_path: Path) -> None:
    _, folder, ranks = runs
    number = list(CELLS).index("fsdp, pipeline")
    assert main(["export", str(folder / str(number)), "format=hf", f"out={tmp_path}/theirs"]) == 0
    exported = by_our_names(LlamaForCausalLM.from_pretrained(tmp_path / "theirs"))
    assert exported.keys() == ranks[0]["fsdp, pipeline"]["final"].keys()
    for key, tensor in ranks[0]["fsdp, pipeline"]["final"].items():
        assert torch.equal(exported[key], tensor), key


class Frozen(Dropping):
    """A weight that no optimizer has, and BatchNorm's buffers, one of which counts."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def run_frozen(folder: Path, weights: Path, strategies: list[str]) -> dict[str, dict[str, Tensor]]:
    """In each rank: parameters and buffers before the first step."""
    found = {}
    for name in strategies:
        look, words = Look(), [f"module._target_={__name__}.Frozen", f"strategy={name}", f"init_from={weights}"]
        found[name] = {**fit(plan_for(folder / name, 2, 1, *words), look)["start"], **look.buffers}
    return found


def test_frozen_weights_and_buffers_too(tmp_path: Path) -> None:
    expected = {name: torch.randn_like(p) for name, p in Frozen().named_parameters()}
    expected |= {"norm.running_mean": torch.randn(WIDTH), "norm.running_var": torch.rand(WIDTH)}
    expected["norm.num_batches_tracked"] = torch.tensor(7)
    save_file(expected, tmp_path / "frozen.safetensors")
    strategies = ["ddp", "fsdp", "zero1", "zero3"]
    for found in spawn(2, run_frozen, tmp_path, tmp_path / "frozen.safetensors", strategies):
        for strategy in strategies:
            assert found[strategy].keys() == expected.keys()
            for key, tensor in expected.items():
                assert torch.equal(found[strategy][key], tensor), (strategy, key)


def refusals(folder: Path, cases: list[list[str]]) -> list[str]:
    """In each rank."""
    said = []
    for number, words in enumerate(cases):
        try:
            fit(cell_plan(folder / str(number), 2, *SHAPE, *words))
            said.append("begun")
        except ConfigError as error:
            said.append(str(error))
    return said


def test_another_model_is_told_by_its_names_and_shapes(tmp_path: Path) -> None:
    make_llama(tmp_path / "tied", tie_word_embeddings=True)
    llama = make_llama(tmp_path / "untied")
    integers = {name: tensor.int() for name, tensor in by_our_names(llama).items()}
    save_file(integers, tmp_path / "integers.safetensors")
    cases = [
        ("tied", "strategy=ddp", " is of another model: lm_head.weight: not in the files; the model's options"),
        ("untied", "strategy=ddp model.tie_embeddings=true", "lm_head.weight: not in this model"),
        ("untied", "strategy=fsdp model.n_layers=2", "model.layers.2.input_layernorm.weight: not in this model"),
        ("untied", "strategy=zero3 model.ffn_dim=40", "down_proj.weight: size mismatch, (24, 41) there and (24, 40)"),
        ("integers.safetensors", "strategy=zero3", "model.embedding.weight is of I32 there and torch.float32 here"),
    ]  # fmt: skip
    words = [[*words.split(), f"init_from={tmp_path / name}"] for name, words, _ in cases]
    for messages in spawn(2, refusals, tmp_path / "runs", words):
        for message, (name, _, said) in zip(messages, cases, strict=True):
            assert message.startswith(f"init_from={tmp_path / name}") and said in message, message
            assert "give other weights" in message


class Drawn(Dropping):
    """Draws with NumPy and with Python."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = [np.random.rand(), random.random()]


class DrawnData(NoiseData):
    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self.draws = [np.random.rand(), random.random(), torch.rand(()).item()]


def test_what_module_and_data_draw_is_the_same_on_every_rank_and_in_every_start(tmp_path: Path) -> None:
    def draws(seed: int) -> list[float]:
        words = [f"module._target_={__name__}.Drawn", f"data._target_={__name__}.DrawnData", f"seed={seed}"]
        plan = plan_for(tmp_path, 2, 1, *words)
        return [*build_module(plan).draws, *build_data(plan).draws]  # type: ignore[union-attr, list-item]

    assert draws(1) == draws(1)
    assert not set(draws(1)) & set(draws(2))
