"""A mixture of corpora: exact shares, each sequence once before any comes again, and an order that positions decide."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.language_modeling.data import TextData
from recipes.language_modeling.mixture import MixtureData
from shardwise.config.compose import compose
from shardwise.data.loaders import TrainLoader
from shardwise.data.mixture import BLOCK, Mixture, counts_of
from shardwise.data.order import GlobalOrder
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.data.tokens import TokenSequences, TokenShards, write_token_shards
from shardwise.errors import ConfigError, DataError
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.plan.topology import make_topology

SIZES = {"books": 30, "code": 7, "web": 900}  # sequences
WEIGHTS = {"web": 5, "books": 2.5, "code": 0.5}
COUNTS = {"books": 313, "code": 62, "web": 625}  # of 312.5, 62.5 and 625: the tie goes to the first name


def corpora(folder: Path) -> dict[str, TokenSequences]:
    made = {}
    for number, (name, size) in enumerate(SIZES.items()):
        tokens = np.arange(size * 4 + 1) % 250 + number
        directory = write_token_shards(folder / name, {"train": [tokens]}, vocab_size=256)
        made[name] = TokenSequences(TokenShards(directory, "train"), 4)
    return made


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    return Mixture(corpora(tmp_path_factory.mktemp("corpora")), WEIGHTS)


def names_of(mixture: Mixture, indices: np.ndarray) -> list[str]:  # type: ignore[type-arg]
    return [mixture.names[c] for c in np.searchsorted(mixture.ends, indices, side="right")]


def test_every_block_has_the_shares_of_the_weights(mixture: Mixture) -> None:
    assert mixture.counts == COUNTS and sum(COUNTS.values()) == BLOCK
    drawn = mixture.draw_for_run(3, np.arange(5 * BLOCK))
    for block in range(5):
        assert Counter(names_of(mixture, drawn[block * BLOCK : (block + 1) * BLOCK])) == mixture.counts
    first, second = (names_of(mixture, drawn[block * BLOCK : (block + 1) * BLOCK]) for block in (0, 1))
    assert first != second and "".join(name[0] for name in first[:40]).strip("w")  # mixed, and mixed anew


def test_a_corpus_is_read_whole_before_it_comes_again(mixture: Mixture) -> None:
    drawn = mixture.draw_for_run(0, np.arange(4 * BLOCK))
    assert drawn.min() >= 0 and drawn.max() < len(mixture) == sum(SIZES.values())
    for c, name in enumerate(mixture.names):
        of_corpus = drawn[(drawn >= mixture.ends[c] - mixture.sizes[c]) & (drawn < mixture.ends[c])]
        often = Counter(of_corpus.tolist())
        assert len(of_corpus) == 4 * mixture.counts[name]
        assert set(often.values()) <= {len(of_corpus) // SIZES[name], -(-len(of_corpus) // SIZES[name])}
    assert mixture.draw_for_run(1, np.arange(50)).tolist() != drawn[:50].tolist()


@pytest.mark.parametrize("seed", [0, 5])
def test_each_pass_over_a_corpus_is_whole_wherever_the_positions_are_cut(mixture: Mixture, seed: int) -> None:
    drawn = mixture.draw_for_run(seed, np.arange(3 * BLOCK))
    for c, size in enumerate(mixture.sizes.tolist()):
        of_corpus = drawn[(drawn >= mixture.ends[c] - size) & (drawn < mixture.ends[c])]
        for begin in range(0, len(of_corpus), size):  # an end of a pass lies anywhere in a block
            passed = of_corpus[begin : begin + size]
            assert len(set(passed.tolist())) == len(passed), (mixture.names[c], begin)
    for cut in (1, 7, 999, 1001, 2500):
        parts = [mixture.draw_for_run(seed, part) for part in np.split(np.arange(3 * BLOCK), [cut])]
        np.testing.assert_array_equal(np.concatenate(parts), drawn)
    some = np.random.default_rng(seed).permutation(3 * BLOCK)[:300]
    np.testing.assert_array_equal(mixture.draw_for_run(seed, some), drawn[some])


def test_samples_are_those_of_the_corpora(mixture: Mixture) -> None:
    for c, corpus in enumerate(mixture.corpora):
        offset = int(mixture.ends[c] - mixture.sizes[c])
        for i in (0, len(corpus) - 1):
            assert mixture[offset + i]["tokens"].tolist() == corpus[i]["tokens"].tolist()
    with pytest.raises(IndexError, match="outside"):
        mixture[len(mixture)]


def test_any_ranks_and_micro_batches_deal_out_the_same_order(mixture: Mixture) -> None:
    """Also from the middle of a block on, in other pieces, and far beyond the end of the data."""
    far = 10**12 + 8 * 3
    for start in (0, 8 * 321, far):
        whole = mixture.draw_for_run(9, np.arange(start, start + 64))
        for ranks, size in ((1, 8), (2, 2), (4, 1), (2, 4)):
            order = GlobalOrder(len(mixture), 8, True, 9, None, mixture.draw_for_run)
            dealt = [order.micro_batches(start, 64, rank, ranks, size) for rank in range(ranks)]
            steps = np.stack(dealt, axis=1).reshape(8, -1)
            assert [sorted(step) for step in steps] == [sorted(step) for step in whole.reshape(8, -1)]


def test_epochs_are_draws_over_sequences(mixture: Mixture) -> None:
    for samples in (0, 1, 777, BLOCK, 3 * BLOCK + 1):
        drawn = Counter(names_of(mixture, mixture.draw_for_run(4, np.arange(samples))))
        assert mixture.progress_of_run(4, samples) == {
            f"{name}/epochs": drawn[name] / SIZES[name] for name in mixture.names
        }
    [line] = mixture.notices_for_run(2 * BLOCK)
    assert line == (
        "mixture: books 31.3% of 30 sequences, read 21 times; code 6.2% of 7 sequences, read 18 times; "
        "web 62.5% of 900 sequences, read 1.4 times; more than 4 times: books, code"
    )


def test_weights_are_shares_of_any_unit() -> None:
    assert counts_of({"a": 7, "b": 3}) == counts_of({"b": 0.3, "a": 0.7}) == {"a": 700, "b": 300}
    assert counts_of({"a": 1, "b": 1, "c": 1}) == {"a": 334, "b": 333, "c": 333}
    with pytest.raises(ConfigError, match=r"b.weight=0.0003 is 0.030% of all weights.*1,000: give it at least 0.0010"):
        counts_of({"a": 1, "b": 0.0003})
    with pytest.raises(ConfigError, match=r"the weights \(a 1e\+308, b 1e\+308\) add up to more than .*: divide all"):
        counts_of({"a": 1e308, "b": 1e308})


def test_the_identity_names_tokens_and_shares(tmp_path: Path, mixture: Mixture) -> None:
    same, other = Mixture(corpora(tmp_path), WEIGHTS), Mixture(corpora(tmp_path / "b"), {**WEIGHTS, "web": 4})
    assert same.identity_of_data() == mixture.identity_of_data() != other.identity_of_data()
    assert re.fullmatch(
        r"sha256 [0-9a-f]{16}, 625 of 1,000 samples; content [0-9a-f]{16}", same.identity_of_data()["web"]
    )


def plan(ranks: int, micro: int, *words: str) -> Plan:
    words = (f"micro_batch_size={micro}", "global_batch_size=8", "accelerator=cpu", f"devices={ranks}", *words)
    made = make_plan(compose(list(words)).jobs[0].config, Host(cuda_devices=0, run_id="x"))
    return replace(made, topology=make_topology("ddp", 1, ranks))


def data(folder: Path, **more: Any) -> MixtureData:
    chosen = {name: {"directory": str(folder / name), "weight": WEIGHTS[name], "validation": False} for name in SIZES}
    return MixtureData(chosen, 4, 1, validation={"only": str(folder / "books")}, **more)


def test_the_loader_of_a_run_takes_the_mixtures_order(tmp_path: Path) -> None:
    """On any ranks, from any sample on, and into later epochs."""
    corpora(tmp_path)
    made = data(tmp_path)
    made.train = made._train()
    expected = made.train.draw_for_run(0, np.arange(400 * 8)).reshape(-1, 8)  # type: ignore[attr-defined]
    for ranks, micro in ((1, 8), (2, 2), (4, 1), (1, 4)):
        made.batch_size = micro
        loaders = [
            TrainLoader(made.train_dataloader(), plan(ranks, micro), rank, torch.device("cpu"), None)
            for rank in range(ranks)
        ]
        for step in (0, 1, 116, 117, 399):
            taken = [i for loader in loaders for batch in loader.samples_of(step * 8) or [] for i in batch]
            assert sorted(taken) == sorted(expected[step].tolist()), (ranks, step)
        loaders[0].load_state_dict({"samples_consumed": 8 * 3})  # a checkpoint that says nothing of its data
        assert next(iter(loaders[0]))["tokens"].tolist() == [
            made.train[i]["tokens"].tolist() for i in (loaders[0].samples_of(8 * 3) or [])[0]
        ]


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    corpora(tmp_path)
    for made in (data(tmp_path), TextData(str(tmp_path / "web"), 4, 1, corpus=None)):
        made.train = made._train()
        loader, allowed = (
            TrainLoader(made.train_dataloader(), plan(1, 1, *words), 0, torch.device("cpu"), None)
            for words in ((), ("resume_allow=[data]",))
        )
        state = loader.state_dict()
        loader.load_state_dict(state)
        name = next(iter(state["data"]))
        changed = {**state, "data": {**state["data"], name: "sha256 0"}}
        with pytest.raises(ConfigError, match=rf"since the checkpoint: {name} was sha256 0 and is sha256 \w{{16}}"):
            loader.load_state_dict(changed)
        allowed.load_state_dict(changed)
        older = {key: value.partition("; content")[0] for key, value in state["data"].items()}
        loader.load_state_dict({**state, "data": older})  # it is compared by what it has


@pytest.mark.parametrize("file", ["train-00000.bin", "train-00000.ends"])
def test_bytes_that_were_overwritten_since_the_checkpoint_are_noticed(tmp_path: Path, file: str) -> None:
    corpora(tmp_path)

    def loaders() -> list[TrainLoader]:
        made = data(tmp_path), TextData(str(tmp_path / "web"), 4, 1, corpus=None)
        for one in made:
            one.train = one._train()
        return [TrainLoader(one.train_dataloader(), plan(1, 1), 0, torch.device("cpu"), None) for one in made]

    states = [loader.state_dict() for loader in loaders()]
    path = tmp_path / "web" / file
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    for loader, state, name in zip(loaders(), states, ("web", "split train"), strict=True):
        with pytest.raises(ConfigError, match=rf"changed since the checkpoint: {name} was .* content \w+ and is "):
            loader.load_state_dict(state)


def test_validation_sets_have_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_token_shards(tmp_path / name, {"train": [np.arange(90)], "validation": [np.arange(50)]}, vocab_size=256)
    chosen: Any = {name: {"directory": str(tmp_path / name), "weight": 1} for name in ("b", "a")}
    own = MixtureData(chosen, 8, 2)
    own.setup("fit")
    assert own.validation_names == ["b", "a"] and len(own.val_dataloader()) == 2  # type: ignore[arg-type]
    chosen["b"]["validation"] = False
    for made, names in (
        (MixtureData(chosen, 8, 2), ["a"]),
        (MixtureData(chosen, 8, 2, validation={"x": str(tmp_path / "b")}), ["x"]),
        (TextData(str(tmp_path / "a"), 8, 2, corpus=None), [""]),
        (TextData(str(tmp_path / "a"), 8, 2, corpus=None, validation={"x": str(tmp_path / "b")}), ["x"]),
    ):
        made.setup("fit")
        assert made.validation_names == names and isinstance(made.val_dataloader(), torch.utils.data.DataLoader)
    chosen["a"]["validation"] = False
    with pytest.raises(ConfigError, match="validation is false for every corpus"):
        MixtureData(chosen, 8, 2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"books": {"directory": "d", "weight": 0}}, r"data.corpora.books.weight=0: a weight is a number above 0"),
        ({"books": {"directory": "d", "weight": "7"}}, r"weight=7: a weight is a number above 0"),
        ({"books": {"directory": "d", "weight": 10**400}}, r"weight=1000.*: a weight is a number above 0"),
        ({"books": {"directory": "d", "weight": float("nan")}}, r"weight=nan: a weight is a number above 0"),
        ({"a/b": {"directory": "d", "weight": 1}}, r"data.corpora.a/b: a name has letters"),
        ({"books": "data/books"}, r"data.corpora.books=data/books: a corpus has a directory and a weight"),
        ({"books": {"directory": "d"}}, r"a corpus has a directory and a weight"),
        ({"books": {"directory": "d", "weight": 1, "wieght": 2}}, r"did you mean weight"),
        ({"books": {"directory": "d", "weight": 1, "validation": "no"}}, r"validation=no: true measures"),
        ({"books": {"directory": 3, "weight": 1}}, r"directory=3: name the folder"),
        (
            {n: {"directory": "d", "weight": 1} for n in "ab"},
            r"data.corpora.b and data.corpora.a are both d: name it",
        ),
        ({}, r"data.corpora=\{\}: it names at least one folder"),
    ],
)
def test_a_corpus_that_cannot_be_is_refused(changed: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MixtureData(changed, 4, 1)


def test_corpora_of_other_tokenizers_or_without_a_sequence_are_refused(tmp_path: Path) -> None:
    def made(**kinds: Any) -> MixtureData:
        for name, more in kinds.items():
            splits = {"train": [np.arange(60)], "validation": [np.arange(30)]}
            write_token_shards(tmp_path / name, splits, **{"vocab_size": 256, **more})
        return MixtureData({name: {"directory": str(tmp_path / name), "weight": 1} for name in kinds}, 16, 1)

    by_bytes = {"tokenizer": ByteTokenizer()}
    made(unknown={}, known=by_bytes).check()
    other_size = made(known=by_bytes, big={"vocab_size": 300})
    with pytest.raises(ConfigError, match=r"known \(.*\) has a vocabulary of 256 tokens, and data.corpora.big"):
        other_size.check()
    short = made(short={})
    short.sequence_length = 64
    with pytest.raises(DataError, match=r"split 'train' of .*short has 60 tokens, one sequence needs .* 65"):
        short.check()


def test_corpora_of_two_tokenizers_of_one_size_are_refused(tmp_path: Path) -> None:
    class Other(ByteTokenizer):
        end_of_document = 10

    for name, tokenizer in (("a", ByteTokenizer()), ("b", Other())):
        write_token_shards(tmp_path / name, {"train": [np.arange(60)]}, vocab_size=256, tokenizer=tokenizer)
    made = MixtureData({name: {"directory": str(tmp_path / name), "weight": 1} for name in "ab"}, 16, 1)
    with pytest.raises(ConfigError, match=r"a .*has tokens of the tokenizer with sha256 \w{12}, and data.corpora.b"):
        made.check()
