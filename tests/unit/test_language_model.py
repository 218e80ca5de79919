"""The language modeling recipe against independent references."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from lightning import Trainer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from recipes.language_modeling.data import TextData, python_files
from recipes.language_modeling.model import Attention, RotaryEmbedding, Transformer, rotary_frequencies
from recipes.language_modeling.module import LanguageModel
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.data.tokens import write_token_shards
from shardwise.errors import ConfigError, DataError
from shardwise.nn.linear_cross_entropy import linear_cross_entropy

CONF = Path(__file__).parents[2] / "conf" / "model"
LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SMALL = {"vocab_size": 256, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "max_seq_len": 64}


def small(**changes: object) -> Transformer:
    torch.manual_seed(0)
    return Transformer(**(SMALL | changes))  # type: ignore[arg-type]


def from_yaml(name: str) -> Transformer:
    arguments = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert arguments.pop("_target_") == f"{Transformer.__module__}.{Transformer.__qualname__}"
    with torch.device("meta"):
        return Transformer(**arguments)


def drawn(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))


def test_shapes_and_the_longest_sequence() -> None:
    model = small()
    assert model(drawn(2, 64)).shape == (2, 64, 32)
    with pytest.raises(ValueError, match="65 tokens.*max_seq_len=64"):
        model(drawn(1, 65))
    with pytest.raises(ConfigError, match="n_heads=4.*n_kv_heads=3"):
        small(n_kv_heads=3)
    with pytest.raises(ConfigError, match="dim=36.*= 8"):
        small(dim=36)
    assert {type(block).__name__ for block in model.blocks} == set(model._no_split_modules)


@pytest.mark.parametrize(
    ("sizes", "remedy"),
    [
        ({"dim": 64, "n_heads": 3, "n_kv_heads": 1}, "model.dim=66 or model.n_heads=2"),
        ({"dim": 64, "n_heads": 6, "n_kv_heads": 2}, "model.dim=60 or model.n_heads=4"),
        ({"dim": 7, "n_heads": 2, "n_kv_heads": 1}, "model.dim=8"),
    ],
)
def test_heads_that_do_not_fit_are_told_with_sizes_that_do(sizes: dict[str, int], remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"is not a multiple of 2 .* = {2 * sizes['n_heads']}; use {remedy}$"):
        small(**sizes)


def test_the_future_does_not_reach_the_past() -> None:
    model, tokens = small(), drawn(1, 32)
    changed = tokens.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=0, atol=0)
    assert ((before[:, 20:] - after[:, 20:]).abs().amax(-1) > 1e-5).all()  # and the past does reach the future


def test_grouped_query_attention_is_attention_with_repeated_keys() -> None:
    torch.manual_seed(0)
    attention = Attention(32, 4, 2, RotaryEmbedding(8, 16, 500000.0, None)).double()
    x = torch.randn(2, 16, 32, dtype=torch.float64)
    q = attention.rotary(attention.wq(x).view(2, 16, 4, 8)).transpose(1, 2)
    k = attention.rotary(attention.wk(x).view(2, 16, 2, 8)).transpose(1, 2).repeat_interleave(2, dim=1)
    v = attention.wv(x).view(2, 16, 2, 8).transpose(1, 2).repeat_interleave(2, dim=1)
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf)
    expected = attention.wo((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 16, 32))
    torch.testing.assert_close(attention(x), expected)


def test_rotary_scaling_is_llama31s() -> None:
    def published(frequency: float) -> float:
        """`apply_scaling` of the released Llama 3.1 code, one frequency at a time."""
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            return frequency
        if wavelength > 8192 / 1:
            return frequency / 8
        smooth = (8192 / wavelength - 1) / (4 - 1)
        return (1 - smooth) * frequency / 8 + smooth * frequency

    plain = [500000.0 ** (-2 * i / 128) for i in range(64)]
    expected = torch.tensor([published(f) for f in plain], dtype=torch.float64)
    torch.testing.assert_close(rotary_frequencies(128, 500000.0, LLAMA31), expected)
    torch.testing.assert_close(rotary_frequencies(128, 500000.0, None), torch.tensor(plain, dtype=torch.float64))
    ratios = (expected / torch.tensor(plain, dtype=torch.float64)).round(decimals=6).unique()
    assert 1 in ratios and 1 / 8 in ratios and len(ratios) > 3  # all three bands are there to be tested


def test_rotation_is_by_position_times_frequency() -> None:
    rotary = RotaryEmbedding(8, 8192, 500000.0, LLAMA31)
    x = torch.randn(1, 8192, 1, 8, generator=torch.Generator().manual_seed(0))
    halves = torch.complex(x[..., :4].double(), x[..., 4:].double())
    angles = torch.arange(8192)[:, None] * rotary_frequencies(8, 500000.0, LLAMA31)
    turned = halves * torch.polar(torch.ones_like(angles), angles)[None, :, None]
    torch.testing.assert_close(rotary(x).double(), torch.cat((turned.real, turned.imag), -1), rtol=0, atol=1e-6)


def test_rotary_tables_stay_fp32_and_out_of_the_state_dict() -> None:
    model = small()
    expected = model.blocks[0].attention.rotary.cos.clone()
    model.bfloat16()
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    torch.testing.assert_close(model.blocks[1].attention.rotary.cos, expected, rtol=0, atol=0)
    assert model(drawn(1, 8)).dtype == torch.bfloat16
    assert not any("rotary" in name for name in model.state_dict())


def test_autocast_does_not_reach_the_blocks() -> None:
    model, tokens = small().bfloat16(), drawn(1, 16)
    block = model.blocks[0]
    x = model.embedding(tokens)
    with torch.autocast("cpu", dtype=torch.float16):
        inside, hidden = block(x), model(tokens)
    assert inside.dtype == hidden.dtype == torch.bfloat16
    torch.testing.assert_close(inside, block(x), rtol=0, atol=0)


def test_over_fp32_weights_autocast_reaches_the_blocks() -> None:
    block, seen = small().blocks[0], []
    for layer in (block.attention.wq, block.attention.wo, block.feed_forward.w2):
        layer.register_forward_hook(lambda layer, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        block(torch.randn(1, 16, block.attention.wq.in_features))
    assert seen == [torch.bfloat16] * 3


def test_norm_is_rms_norm() -> None:
    model, caught = small(norm_eps=1e-2), {}
    nn.init.normal_(model.norm.weight)
    model.blocks[-1].register_forward_hook(lambda module, inputs, output: caught.update(x=output))
    hidden, x = model(drawn(2, 16)), caught["x"].double()
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt() * model.norm.weight.double()
    torch.testing.assert_close(hidden.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tie", [True, False])
def test_a_tied_head_is_the_embedding(tie: bool) -> None:
    model = small(tie_embeddings=tie)
    assert (model.head.weight is model.embedding.weight) is tie
    assert model.count_parameters() == small().count_parameters() - tie * 256 * 32


@pytest.mark.parametrize("tie", [True, False])
def test_off_the_meta_device_every_tensor_is_filled_by_its_owner(tie: bool) -> None:
    with torch.device("meta"):
        module = LanguageModel(Transformer(**SMALL, rope_scaling=LLAMA31, tie_embeddings=tie))  # type: ignore[arg-type]
    assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    module.to_empty(device="cpu")
    for tensor in (*module.parameters(), *module.buffers()):
        nn.init.constant_(tensor, math.nan)
    torch.manual_seed(0)
    for submodule in module.modules():
        before = {name: tensor.clone() for name, tensor in module.model.named_parameters()}
        module.init_module_weights(submodule)
        owned = {id(parameter) for parameter in submodule.parameters(recurse=False)}
        for name, tensor in module.model.named_parameters():
            if id(tensor) not in owned:
                torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)
    model, reference = module.model, small(rope_scaling=LLAMA31, tie_embeddings=tie)
    assert (model.head.weight is model.embedding.weight) is tie
    assert all(tensor.isfinite().all() for tensor in (*model.parameters(), *model.buffers()))
    for buffer, expected in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, rtol=0, atol=0)
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        if "norm" in name:
            assert (parameter == 1).all() and (expected == 1).all()
        else:
            std = 0.02 / math.sqrt(4) if name.endswith(("wo.weight", "w2.weight")) else 0.02
            for weight in (parameter, expected):
                assert weight.std().item() == pytest.approx(std, rel=0.1), name


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("tiny", 803_968),
        ("gpt2_124m", 123.6e6),
        ("llama3_1b", 1.236e9),
        ("llama3_3b", 3.213e9),
        ("llama3_8b", 8.030e9),
        ("llama3_70b", 70.55e9),
    ],
)
def test_sizes_in_conf_are_the_published_ones(name: str, parameters: float) -> None:
    model = from_yaml(name)
    assert model.count_parameters() == pytest.approx(parameters, rel=5e-4)
    if name.startswith("llama3"):
        scaling = model.blocks[0].attention.rotary.scaling
        assert scaling == LLAMA31 | {"factor": 32.0 if name in ("llama3_1b", "llama3_3b") else 8.0}


def attention_flops(layers: int, dim: int, pairs: int) -> int:
    """Forward and backward of attention's two products over `pairs` of positions."""
    return 3 * layers * 2 * 2 * dim * pairs


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"n_kv_heads": 4, "n_layers": 3, "ffn_dim": 40}])
def test_flops_are_what_torch_counts_with_the_masked_half_of_attention_left_out(changes: dict[str, Any]) -> None:
    model = LanguageModel(small(**changes))
    batch = {"tokens": drawn(3, 20), "targets": drawn(3, 20)}
    batch["targets"][1, 4:] = -100  # computed all the same
    # The kernel that multiplies the whole square, masked, and recomputes nothing in backward.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.training_step(batch, 0).backward()
    layers, dim = model.model.n_layers, model.model.dim
    masked = attention_flops(layers, dim, 20 * 20) - attention_flops(layers, dim, 20 * 21 // 2)
    flops = model.flops(batch)
    assert isinstance(flops, int) and flops == counter.get_total_flops() - 3 * masked


def test_flops_of_llama3_8b_are_six_per_weight_and_token_and_attention() -> None:
    model, length = from_yaml("llama3_8b"), 8192
    weights = model.count_parameters() - model.embedding.weight.numel()
    assert weights == pytest.approx(7.5e9, rel=0.01)
    half = length * (6 * weights + 6 * 32 * 4096 * length)
    full = length * (6 * weights + 12 * 32 * 4096 * length)
    flops = LanguageModel(model).flops({"tokens": torch.empty(2, length, device="meta")})
    assert flops == pytest.approx(2 * half, rel=0.01)
    assert full / half == pytest.approx(1.125, rel=0.01)  # why docs/metrics.md says which of the two is meant


def test_loss_is_cross_entropy_on_logits() -> None:
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(2, 16, 32), torch.randn(256, 32), drawn(2, 16)
    targets[0, :5] = -100
    kept = targets != -100
    log_p = (hidden.double() @ weight.double().T).log_softmax(-1)[kept]
    expected = -log_p.gather(1, targets[kept][:, None]).sum()
    for way in ("full", "chunked"):
        loss = linear_cross_entropy(hidden, weight, targets, loss=way)
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        mean = linear_cross_entropy(hidden, weight, targets, loss=way, reduction="mean")
        assert mean.item() == pytest.approx(expected.item() / 27, rel=1e-6)
        assert linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), targets, loss=way).dtype == torch.float32


def test_loss_weight_counts_valid_targets_and_scales_the_step() -> None:
    module, batch = LanguageModel(small()), {"tokens": drawn(2, 16), "targets": drawn(2, 16)}
    batch["targets"][1, 3:] = -100
    assert module.loss_weight(batch) == 19
    assert isinstance(module.loss_weight(batch), int)
    logits = module.model.head(module.model(batch["tokens"])).double()
    expected = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="mean")
    assert module.training_step(batch, 0).item() == pytest.approx(expected.item(), rel=1e-5)
    batch["targets"][:] = -100
    assert module.loss_weight(batch) == 0
    assert module.training_step(batch, 0).item() == 0


class Recorded(LanguageModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def test_evaluation_is_the_mean_over_tokens_and_samples_are_kept(tmp_path: Path) -> None:
    module = LanguageModel(small(), sample_prompt="def ", sample_tokens=80)  # longer than max_seq_len
    batches = [{"tokens": drawn(n, 16), "targets": drawn(n, 16)} for n in (4, 1)]
    batches[0]["targets"][:, 2:] = -100
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.validate(module, torch.utils.data.DataLoader(batches, batch_size=None), verbose=False)
    with torch.no_grad():
        total = sum(float(module.training_step(batch, 0)) * module.loss_weight(batch) for batch in batches)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    loss = total / (8 + 16)
    assert metrics == pytest.approx(
        {
            "validation/loss": loss,
            "validation/bits_per_token": loss / math.log(2),
            "validation/perplexity": math.exp(loss),
        },
        rel=1e-5,
    )
    assert (tmp_path / "samples.txt").read_text() == f"=== step 0\n{module.sample}\n"
    assert module.sample.startswith("def ") and len(module.sample) > 4
    first, loader = module.sample, torch.utils.data.DataLoader(batches, batch_size=None)
    trainer.validate(module, loader, verbose=False)
    assert module.sample == first  # drawn from a fixed seed, as on every other rank
    trainer.test(module, torch.utils.data.DataLoader(batches, batch_size=None), verbose=False)
    assert float(trainer.callback_metrics["test/loss"]) == pytest.approx(loss, rel=1e-5)


def test_generation_is_reproducible_and_top_1_is_the_argmax() -> None:
    module, prompt = LanguageModel(small()).eval(), drawn(2, 5)

    def draw(seed: int) -> Tensor:
        return module.generate(prompt, 6, generator=torch.Generator().manual_seed(seed))

    assert draw(0).shape == (2, 11)
    assert torch.equal(draw(0), draw(0)) and not torch.equal(draw(0), draw(1))
    greedy = module.generate(prompt, 3, top_k=1)
    assert torch.equal(greedy[:, :5], prompt)
    for i in range(5, 8):
        assert torch.equal(greedy[:, i], module.model.head(module.model(greedy[:, :i]))[:, -1].argmax(-1))


def test_decode_never_fails() -> None:
    decode = ByteTokenizer().decode
    assert decode(list("déf".encode())) == "déf"
    assert decode([100, 255, 101, 70_000]) == "d\ufffde\ufffd"


@pytest.fixture
def stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of 200 short files, among others that are no part of the corpus."""
    root = tmp_path / "lib"
    for folder in ("", "json", "test", "json/tests", "site-packages/torch", "idlelib", "lib2to3", "__pycache__"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "module.py").write_text("x = 1")
    for i in range(200):
        (root / "json" / f"m{i}.py").write_text(f"number = {i}\n")
    (root / "gone.py").symlink_to(root / "nowhere.py")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(root))
    return root


def test_the_corpus_is_the_library_without_tests_and_packages(stdlib: Path, tmp_path: Path) -> None:
    assert python_files(stdlib) == sorted(
        ["module.py", "gone.py", "json/module.py"] + [f"json/m{i}.py" for i in range(200)]
    )
    data = TextData(str(tmp_path / "shards"), sequence_length=16, batch_size=4, max_validation_sequences=3)
    data.check()  # not built yet, and no error: prepare_data will
    data.prepare_data()
    data.check()
    data.setup("fit")
    texts = {}
    for split, sequences in (("train", data.train), ("validation", data.validation)):
        shards = getattr(sequences, "dataset", sequences).shards
        texts[split] = bytes(shards.tokens(0, len(shards)).tolist()).decode().split("\0")
        assert texts[split].pop() == ""  # every file ends with a 0
    assert len(texts["train"]) + len(texts["validation"]) == 202
    assert 2 <= len(texts["validation"]) <= 25
    assert len(data.validation) == 3  # type: ignore[arg-type]
    batch = next(iter(data.train_dataloader()))
    assert batch["tokens"].shape == batch["targets"].shape == (4, 16)
    assert batch["tokens"].dtype == torch.int64
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert [len(batch["tokens"]) for batch in data.val_dataloader()] == [3]
    baselines = data.baselines()
    assert 0 < baselines["byte bigram"] < baselines["byte unigram"] < math.log(256)


def test_shards_of_ones_own_must_be_there(tmp_path: Path) -> None:
    data = TextData(str(tmp_path / "none"), sequence_length=16, batch_size=4, corpus=None)
    with pytest.raises(DataError, match="none/index.json must be a readable file"):
        data.check()
    with pytest.raises(ConfigError, match=r"data.corpus=wikipedia: .* no such file or folder.*corpus=python_stdlib"):
        TextData(str(tmp_path), sequence_length=16, batch_size=4, corpus="wikipedia").check()


def test_it_learns(stdlib: Path, tmp_path: Path) -> None:
    data = TextData(str(tmp_path / "shards"), sequence_length=16, batch_size=16)
    trainer = Trainer(
        accelerator="cpu", max_steps=30, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, num_sanity_val_steps=1,
    )  # fmt: skip
    trainer.fit(Recorded(small(n_layers=1)), data)
    trainer.validate(trainer.lightning_module, data, verbose=False)
    assert float(trainer.callback_metrics["validation/loss"]) < data.baselines()["byte unigram"]
    texts = trainer.predict(trainer.lightning_module, data)
    assert texts and all(isinstance(text, str) for batch in texts for text in batch)


def test_rows_of_no_token_are_told_of_and_never_written(
    stdlib: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = TextData(str(tmp_path / "shards"), sequence_length=16, batch_size=4, max_validation_sequences=8)
    trainer = Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    module = Recorded(small(vocab_size=1000), sample_tokens=20)
    trainer.fit(module, data)
    assert "model.vocab_size=1000: 744 rows of no token, since the data has 256\n" in capsys.readouterr().out
    drawn: list[Tensor] = []
    generate = module.generate
    module.generate = lambda *a, **k: drawn.append(generate(*a, **k)) or drawn[-1]  # type: ignore[func-returns-value]
    trainer.predict(module, data)
    assert drawn and max(int(tokens.max()) for tokens in drawn) < 256


def test_shards_without_a_validation_split_train_where_no_validation_runs(tmp_path: Path) -> None:
    write_token_shards(tmp_path / "d", {"train": [np.arange(300) % 256]}, vocab_size=256)
    data = TextData(str(tmp_path / "d"), sequence_length=16, batch_size=4, corpus=None)
    data.check()

    def trainer(limit: int | None) -> Trainer:
        return Trainer(
            accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path, limit_val_batches=limit,
        )  # fmt: skip

    for refused in (
        lambda: trainer(None).fit(Recorded(small()), data),
        lambda: trainer(0).test(Recorded(small()), data),
    ):
        with pytest.raises(DataError, match="d has no validation split, .* without validation by max_validation_batch"):
            refused()
    fitting = trainer(0)
    fitting.fit(Recorded(small()), data)
    assert fitting.global_step == 2 and data.baselines() == {}


def test_data_that_the_model_cannot_take_is_refused(tmp_path: Path) -> None:
    write_token_shards(tmp_path / "d", {s: [np.arange(300)] for s in ("train", "validation")}, vocab_size=300)
    data = TextData(str(tmp_path / "d"), sequence_length=16, batch_size=4, corpus=None)
    data.check_fits(vocab_size=300, max_seq_len=16)
    with pytest.raises(ConfigError, match="300 tokens.*model.vocab_size=256"):
        data.check_fits(vocab_size=256, max_seq_len=16)
    with pytest.raises(ConfigError, match="sequence_length=16.*max_seq_len=8"):
        data.check_fits(vocab_size=300, max_seq_len=8)


def test_a_vocabulary_that_is_not_given_grows_to_that_of_the_data(tmp_path: Path) -> None:
    write_token_shards(tmp_path / "d", {s: [np.arange(300)] for s in ("train", "validation")}, vocab_size=300)
    shards = TextData(str(tmp_path / "d"), 16, batch_size=1, corpus=None)
    (tmp_path / "my.txt").write_text("a")
    trained = TextData(str(tmp_path / "e"), 16, batch_size=1, corpus=f"{tmp_path}/my.txt", tokenizer="train")
    absent = TextData(str(tmp_path / "none"), 16, batch_size=1, corpus=None)
    for data, tokens in ((shards, 300), (trained, 8192), (absent, 256), (None, 256)):
        node = {"_target_": "…", "model": {"vocab_size": 256, "max_seq_len": 16}}
        assert LanguageModel.link_arguments(node, data)["model"] == {"vocab_size": tokens, "max_seq_len": 16}
    assert LanguageModel.link_arguments({"model": {"vocab_size": 310}}, shards) == {"model": {"vocab_size": 310}}
    assert LanguageModel.link_arguments({"model": None}, shards) == {"model": None}
