"""Texts are continued with a cache as they would be by computing everything again for each token."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipes.language_modeling.model import Transformer
from recipes.language_modeling.module import LanguageModel
from shardwise.nn.generation import Sampling, continue_texts

SIZES: dict[str, Any] = {
    "vocab_size": 61, "dim": 24, "n_layers": 3, "n_heads": 6, "ffn_dim": 41, "max_seq_len": 16,
    "rope_theta": 100.0,
}  # fmt: skip
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [53], [5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6], [26, 43, 3]]
CPU = torch.device("cpu")


def language_model(**more: Any) -> LanguageModel:
    torch.manual_seed(0)
    module = LanguageModel(Transformer(**{"n_kv_heads": 2, **SIZES, **more})).double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)  # so that attention looks somewhere
    return module


@torch.no_grad()
def recomputed(module: LanguageModel, text: list[int]) -> Tensor:
    """The logits [V] after `text`, without a cache."""
    logits: Tensor = module.model.head(module.model(torch.tensor([text])))[0, -1]
    return logits


def alone(module: LanguageModel, prompt: list[int], new: int, sampling: Sampling, seed: int) -> list[int]:
    """What a loop without a cache writes, with the stated rule for what is forgotten."""
    generator, limit = torch.Generator().manual_seed(seed), module.model.max_seq_len
    text, written = prompt[-limit:], []
    for _ in range(new):
        token = int(sampling.draw(recomputed(module, text)[None], generator))
        written.append(token)
        text = [*text, token]
        text = text if len(text) <= limit else text[-(limit // 2) :]
    return written


@pytest.mark.parametrize("heads", [1, 2, 6])
def test_logits_with_a_cache_are_those_without(heads: int) -> None:
    module, texts = language_model(n_kv_heads=heads), [list(prompt) for prompt in PROMPTS]
    cache = module.make_cache(len(texts), 16)
    longest = max(map(len, texts))
    new = torch.tensor([[*text, *[7] * (longest - len(text))] for text in texts])
    added = list(map(len, texts))
    for token in (11, 12, 13, 14):
        with torch.no_grad():
            logits = module.next_token_logits(new, added, cache)
        expected = torch.stack([recomputed(module, text) for text in texts])
        assert logits.dtype == torch.float64 and expected.std() > 0.3
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
        texts = [[*text, token + row] for row, text in enumerate(texts)]
        new, added = torch.tensor([text[-1:] for text in texts]), [1] * len(texts)
    with pytest.raises(ValueError, match="17 tokens do not fit into a cache of 16"):
        module.next_token_logits(new, added, cache)


@pytest.mark.parametrize(
    "sampling", [Sampling(0.0), Sampling(0.9), Sampling(1.5, top_k=5), Sampling(1.0, top_p=0.7)], ids=str
)
def test_a_batch_is_continued_as_each_text_alone_also_beyond_the_context(sampling: Sampling) -> None:
    module, prompts = language_model(), [*PROMPTS, list(range(40))]
    generators = [torch.Generator().manual_seed(row) for row in range(len(prompts))]
    written = list(continue_texts(module, prompts, 30, sampling, device=CPU, generator=generators))
    expected = [alone(module, prompt, 30, sampling, row) for row, prompt in enumerate(prompts)]
    assert [list(row) for row in zip(*written, strict=True)] == expected
    assert len({tuple(row) for row in expected}) == len(prompts)


def test_tokens_that_the_tokenizer_does_not_have_are_never_drawn() -> None:
    module = language_model()
    with torch.no_grad():
        module.model.head.weight[50:] *= 100  # the model would like them best
    for sampling in (Sampling(0.0), Sampling(2.0)):
        assert max(max(step) for step in continue_texts(module, PROMPTS, 20, sampling, device=CPU)) >= 50
        limited = continue_texts(module, PROMPTS, 20, sampling, device=CPU, vocab_size=50)
        assert max(max(step) for step in limited) < 50


def test_memory_is_allocated_once_and_only_what_is_needed() -> None:
    module = language_model()
    seen: list[int] = []
    add = nn.Module.register_forward_hook(
        module.model.blocks[0],
        lambda *a: seen.append(cache.layers[0].keys.data_ptr()),  # type: ignore[union-attr]
    )
    cache = module.make_cache(1, 5)
    with torch.no_grad():
        module.next_token_logits(torch.tensor([[1, 2, 3]]), [3], cache)
        module.next_token_logits(torch.tensor([[4]]), [1], cache)
    add.remove()
    assert cache.layers[0].keys is not None and cache.layers[0].keys.shape == (1, 2, 5, 4)
    assert len(seen) == 2 and seen[0] == seen[1]


def drawn(sampling: Sampling, probabilities: list[float], times: int = 400) -> list[float]:
    logits = torch.tensor(probabilities).log().repeat(times, 1)
    tokens = sampling.draw(logits, torch.Generator().manual_seed(0))
    return [float((tokens == token).float().mean()) for token in range(len(probabilities))]


def test_top_k_top_p_and_temperature() -> None:
    p = [0.1, 0.5, 0.15, 0.25]
    assert drawn(Sampling(0.0), p) == [0, 1, 0, 0]
    assert drawn(Sampling(1.0), p) == pytest.approx(p, abs=0.06)
    assert drawn(Sampling(1.0, top_k=2), p) == pytest.approx([0, 2 / 3, 0, 1 / 3], abs=0.06)
    assert drawn(Sampling(1.0, top_k=9), p) == pytest.approx(p, abs=0.06)
    assert drawn(Sampling(1.0, top_p=0.4), p) == [0, 1, 0, 0]
    assert drawn(Sampling(1.0, top_p=0.51), p) == pytest.approx([0, 2 / 3, 0, 1 / 3], abs=0.06)
    assert drawn(Sampling(1.0, top_p=1e-9), p) == [0, 1, 0, 0]
    squared = [value**2 / sum(v**2 for v in p) for value in p]
    assert drawn(Sampling(0.5), p) == pytest.approx(squared, abs=0.06)
    # top_p counts what the temperature makes of the probabilities
    assert drawn(Sampling(0.5, top_p=0.7), p) == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": -0.1}, "temperature=-0.1: must be at least 0"),
        ({"temperature": float("nan")}, "temperature=nan: must be at least 0"),
        ({"top_k": 0}, "top_k=0: must be at least 1"),
        ({"top_p": 0.0}, "top_p=0.0: must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p=1.5: must be above 0 and at most 1"),
    ],
)
def test_values_that_no_sampling_has(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Sampling(**values)
