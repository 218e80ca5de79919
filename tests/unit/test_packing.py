"""Packed sequences: attention, positions and loss stay inside each document."""

import json
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor

from recipes.language_modeling.data import TextData
from recipes.language_modeling.model import Transformer
from recipes.language_modeling.module import LanguageModel
from shardwise.data.document_stream import IGNORE, DocumentSequences, collate_documents
from shardwise.data.tokens import TokenSequences, TokenShards, write_token_shards
from shardwise.errors import ConfigError, DataError
from shardwise.nn import attention

SIZES: dict[str, Any] = {"vocab_size": 61, "dim": 24, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 40}
LENGTHS = [5, 1, 9, 23, 3, 7, 16, 2]  # the fourth is cut by the end of the first sequence
LENGTH = 32


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    documents = [draw.integers(0, 61, length) for length in LENGTHS]
    return write_token_shards(
        tmp_path / "d", {"train": documents, "validation": documents}, vocab_size=61, shard_tokens=20
    )


def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(Transformer(**SIZES, max_seq_len=LENGTH)).double()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("document_mask", [False, True])
def test_a_token_beyond_the_vocabulary_is_named_with_its_sample(
    directory: Path, workers: int, document_mask: bool
) -> None:
    """The embedding says neither, and on a GPU nothing but that an index is too large. A worker's error is as short."""
    path = sorted(directory.glob("train-*.bin"))[-1]
    tokens = np.fromfile(path, np.uint8)
    tokens[-1] = 61
    tokens.tofile(path)
    data = TextData(directory=str(directory), sequence_length=13, batch_size=1, document_mask=document_mask,
                    num_workers=workers)  # fmt: skip
    data.setup("validate")
    with pytest.raises(DataError) as refused:
        list(data._loader(data._train(), shuffle=False))
    assert str(refused.value) == (
        f"{directory} holds the token 61 in sample 4 of split 'train', and its index.json has vocab_size 61: every "
        f"token must be below that; prepare it again, or correct its vocab_size"
    )


def packed(directory: Path) -> dict[str, Tensor]:
    sequences = DocumentSequences(TokenShards(directory, "train"), LENGTH)
    return collate_documents([sequences[i] for i in range(len(sequences))])


def losses(module: LanguageModel, batch: dict[str, Tensor]) -> Tensor:
    """The loss of every target, [B, T]."""
    hidden = module.model(batch["tokens"], documents=batch["documents"], starts=batch["document_starts"])
    return F.cross_entropy(module.model.head(hidden).mT, batch["targets"], ignore_index=IGNORE, reduction="none")


def one_by_one(module: LanguageModel, batch: dict[str, Tensor]) -> Tensor:
    """The summed loss of the documents, each of which the model sees alone."""
    total = torch.zeros((), dtype=torch.float64)
    for tokens, targets, documents in zip(batch["tokens"], batch["targets"], batch["documents"], strict=True):
        for number in documents.unique():
            alone = documents == number
            logits = module.model.head(module.model(tokens[alone][None]))
            total = total + F.cross_entropy(logits[0], targets[alone], ignore_index=IGNORE, reduction="sum")
    return total


def gradients(module: LanguageModel, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(module.parameters())))


def largest_difference(directory: Path) -> tuple[float, float]:
    """Of the loss and of the gradients, between packed documents and the same documents one by one."""
    module, batch = model(), packed(directory)
    total, tokens = module._loss(batch)
    assert tokens == len(losses(module, batch)[batch["targets"] != IGNORE]) > 40
    expected = one_by_one(module, batch)
    pairs = zip(gradients(module, total), gradients(module, expected), strict=True)
    return float((total - expected).detach().abs()), max(float((a - b).abs().max()) for a, b in pairs)


def test_a_sample_says_which_tokens_are_of_one_document(directory: Path) -> None:
    shards = TokenShards(directory, "train")
    plain, sequences = TokenSequences(shards, LENGTH), DocumentSequences(shards, LENGTH)
    assert len(plain) == len(sequences) == 2  # as many samples of the same tokens, with or without documents
    number = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    for i in range(2):
        at = slice(i * LENGTH, (i + 1) * LENGTH)
        after = slice(at.start + 1, at.stop + 1)
        np.testing.assert_array_equal(sequences[i]["tokens"], plain[i]["tokens"])
        np.testing.assert_array_equal(sequences[i]["documents"], number[at] - number[at.start])
        targets = np.where(number[at] == number[after], plain[i]["targets"], IGNORE)
        np.testing.assert_array_equal(sequences[i]["targets"], targets)
        assert {array.dtype for array in sequences[i].values()} == {np.dtype(np.int64)}
    starts = collate_documents([sequences[0], sequences[1]])["document_starts"]
    assert starts.dtype == torch.int32 and starts.tolist() == [0, 5, 6, 15, 32, 38, 41, 48, 64]


def test_packed_documents_are_the_documents_one_by_one(directory: Path) -> None:
    loss, gradient = largest_difference(directory)
    assert loss < 1e-12 and gradient < 1e-12


@pytest.mark.parametrize("broken", ["mask", "positions", "targets"])
def test_without_one_of_the_three_they_are_not(directory: Path, broken: str) -> None:
    """The test above would see each of them break."""
    right = attention.document_layout

    def wrong(documents: Tensor, *more: Any) -> attention.Layout:
        layout = right(documents, *more)
        if broken == "mask":
            layout["mask"] = torch.ones_like(layout["mask"]).tril()
        if broken == "positions":
            layout["positions"] = torch.arange(LENGTH).expand(documents.shape)
        return layout

    def unmasked(self: DocumentSequences, i: int) -> Any:
        return {**right_sample(self, i), "targets": TokenSequences.__getitem__(self, i)["targets"]}

    right_sample = DocumentSequences.__getitem__
    with patch("recipes.language_modeling.model.document_layout", wrong):
        if broken != "targets":
            # Rotary attention sees differences of positions, so only the rounding of its fp32 tables tells of them.
            assert max(largest_difference(directory)) > {"mask": 1e-2, "positions": 1e-10}[broken]
            return
    module, expected = model(), model()._loss(packed(directory))[0]
    with patch.object(DocumentSequences, "__getitem__", unmasked):
        assert (module._loss(packed(directory))[0] - expected).abs() > 1


def test_a_token_reaches_only_its_own_document(directory: Path) -> None:
    module, batch = model(), packed(directory)
    before = losses(module, batch)
    for row, position in [(0, 7), (0, 3), (1, 2), (1, 20)]:
        changed = {**batch, "tokens": batch["tokens"].clone()}
        changed["tokens"][row, position] = (changed["tokens"][row, position] + 1) % 61
        after = losses(module, changed)
        own = batch["documents"] == batch["documents"][row, position]
        own[1 - row] = False
        assert torch.equal(before[~own], after[~own])
        assert not torch.equal(before[own], after[own])


def test_the_variable_length_kernel_gets_documents_end_to_end(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is for GPUs. In its place stands a plain loop over the documents that it is handed."""

    def loop(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, same: Tensor, most: int, _: int, **more: Any) -> Tensor:
        assert more.get("window_size") == (-1, 0) or more.get("is_causal")
        assert starts is same and starts.dtype == torch.int32 and int(starts.diff().max()) <= most
        parts = []
        for begin, end in pairwise(starts):
            heads = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))
            parts.append(F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
        return torch.cat(parts)

    expected = model()._loss(packed(directory))[0]
    monkeypatch.setattr(attention, "varlen_attn", loop)
    monkeypatch.setattr(attention, "runs_varlen", lambda *_: True)
    batch = packed(directory)
    torch.testing.assert_close(model()._loss(batch)[0], expected, rtol=0, atol=1e-9)
    del batch["document_starts"]  # data that does not make them: the model does
    torch.testing.assert_close(model()._loss(batch)[0], expected, rtol=0, atol=1e-9)


def test_without_documents_nothing_changes(directory: Path) -> None:
    """The same sequences as one document each have the numbers of the path without documents."""
    module, batch = model(), packed(directory)
    whole = module.model(batch["tokens"], documents=torch.zeros_like(batch["documents"]))
    torch.testing.assert_close(whole, module.model(batch["tokens"]), rtol=0, atol=1e-12)


def test_data_with_documents_trains_and_needs_a_module_that_takes_them(directory: Path) -> None:
    data = TextData(str(directory), LENGTH, 2, corpus=None, document_mask=True)
    data.trainer = SimpleNamespace(lightning_module=model())  # type: ignore[assignment]
    data.setup("fit")
    [batch] = data.train_dataloader()
    assert sorted(batch) == ["document_starts", "documents", "targets", "tokens"]
    assert math.isfinite(model().training_step(batch, 0).item())
    data.trainer.lightning_module = LightningModule()  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"document_mask=true: LightningModule does not keep documents apart"):
        data.setup("fit")


def test_shards_without_documents_are_refused(directory: Path) -> None:
    path = directory / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 1}))
    data = TextData(str(directory), LENGTH, 2, corpus=None, document_mask=True)
    with pytest.raises(DataError, match="does not say where documents end: prepare it again"):
        data.check()
