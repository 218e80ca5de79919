"""Token shards: what is written is read, across borders; what is broken is named."""

import json
import math
import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from shardwise.data import shard_index, tokens
from shardwise.data.tokenizer import ByteTokenizer, digest, load_tokenizer
from shardwise.data.tokens import (
    TokenSequences,
    TokenShards,
    tokenizer_of,
    unigram_bigram_baselines,
    write_token_shards,
)
from shardwise.errors import ConfigError, DataError

TRAIN = np.random.default_rng(0).integers(0, 1000, 103)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    splits = {"train": [TRAIN[:5], TRAIN[5:5], TRAIN[5:60], TRAIN[60:]], "validation": [np.arange(30)]}
    return write_token_shards(tmp_path / "shards", splits, vocab_size=1000, shard_tokens=16, description="numbers")


def test_reads_across_shard_borders_what_was_written(directory: Path) -> None:
    shards = TokenShards(directory, "train")
    assert [shard["tokens"] for shard in shards.shards] == [16] * 6 + [7]
    assert (len(shards), shards.dtype, shards.vocab_size, shards.description) == (103, np.uint16, 1000, "numbers")
    for start, count in [(0, 103), (15, 2), (16, 16), (31, 40), (96, 7), (50, 0), (103, 0)]:
        np.testing.assert_array_equal(shards.tokens(start, count), TRAIN[start : start + count])
    with pytest.raises(IndexError, match=r"\[100, 104\)"):
        shards.tokens(100, 4)
    shards.verify()


def test_bytes_on_disk_are_little_endian(directory: Path) -> None:
    assert (directory / "train-00000.bin").read_bytes() == TRAIN[:16].astype("<u2").tobytes()


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_dtype_is_the_smallest_that_holds_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    largest = np.array([0, vocab_size - 1])
    write_token_shards(tmp_path / "s", {"train": [largest]}, vocab_size=vocab_size)
    assert json.loads((tmp_path / "s/index.json").read_text())["dtype"] == dtype
    assert TokenShards(tmp_path / "s", "train").tokens(0, 2).tolist() == largest.tolist()


def test_targets_are_the_tokens_one_later(directory: Path) -> None:
    sequences = TokenSequences(TokenShards(directory, "train"), 17)
    assert len(sequences) == 6  # 102 // 17: the last target is the last token
    for i in range(6):
        sample = sequences[i]
        assert sample["tokens"].dtype == sample["targets"].dtype == np.int64
        np.testing.assert_array_equal(sample["tokens"], TRAIN[17 * i : 17 * i + 17])
        np.testing.assert_array_equal(sample["targets"], TRAIN[17 * i + 1 : 17 * i + 18])
    assert len(TokenSequences(TokenShards(directory, "train"), 18)) == 5
    with pytest.raises(IndexError):
        sequences[6]


def test_a_split_shorter_than_a_sequence_is_refused(directory: Path) -> None:
    shards = TokenShards(directory, "validation")
    assert len(TokenSequences(shards, 29)) == 1
    with pytest.raises(DataError, match=r"30 tokens.*sequence_length \+ 1 = 31"):
        TokenSequences(shards, 30)


def test_pickle_carries_the_path_not_the_tokens(tmp_path: Path) -> None:
    write_token_shards(tmp_path / "s", {"train": [np.zeros(100_000, np.uint8)]}, vocab_size=256)
    pickled = pickle.dumps(TokenShards(tmp_path / "s", "train"))
    assert len(pickled) < 1000
    assert len(pickle.loads(pickled)) == 100_000


def _edit(directory: Path, **changes: object) -> None:
    index = json.loads((directory / "index.json").read_text())
    (directory / "index.json").write_text(json.dumps(index | changes))


def _truncate(directory: Path) -> None:
    (directory / "train-00003.bin").write_bytes(b"\0" * 30)


def _set_ends(directory: Path, value: int) -> None:
    path = directory / "train-00000.ends"
    path.write_bytes(np.full(path.stat().st_size // 8, value, "<u8").tobytes())


def _empty_shard(directory: Path) -> None:
    (directory / "empty.bin").touch()
    (directory / "empty.ends").touch()
    shard = {"file": "empty.bin", "tokens": 0, "sha256": "", "ends": "empty.ends", "documents": 0}
    _edit(directory, splits={"train": [shard]})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "index.json").unlink(), "index.json must be a readable file: No such file.*prepare"),
        (lambda d: (d / "index.json").write_text("{"), "not a token shard index"),
        (lambda d: (d / "index.json").write_text('{"version": 1}'), "not a token shard index.*dtype"),
        (lambda d: (d / "train-00003.bin").unlink(), "train-00003.bin must be a readable file: No such file"),
        (_truncate, r"train-00003.bin has 30 bytes.*16 tokens \* 2 = 32.*copy"),
        (_empty_shard, "empty.bin has 0 tokens.*at least 1"),
        (lambda d: _edit(d, splits={"train": []}), "has 0 shards.*at least 1"),
        (lambda d: _edit(d, dtype="int64"), "'int64'.*uint8, uint16, uint32"),
        (lambda d: _edit(d, vocab_size="abc"), r"vocab_size 'abc', it must be a whole number in \[1, 2\*\*32\]"),
        (lambda d: _edit(d, dtype=["uint16"]), r"dtype \['uint16'\], it must be one of"),
        (lambda d: _edit(d, vocab_size=-5), "vocab_size -5, it must be a whole number.*prepare the directory again"),
        (lambda d: _edit(d, vocab_size=True), "vocab_size True, it must be a whole number"),
        (lambda d: _edit(d, version=3), "version 3.*reads 2 and older"),
        (lambda d: (d / "train-00003.ends").unlink(), "train-00003.ends must be a readable file: No such file"),
        (lambda d: (d / "train-00003.ends").write_bytes(b"\0" * 9), "train-00003.ends has 9 bytes.*documents.*copy"),
        (
            lambda d: _set_ends(d, 2**40),
            "train-00000.ends holds ends of doc.* from 1 to at most 16",
        ),
        (lambda d: _set_ends(d, 0), "train-00000.ends holds ends of documents that do not rise"),
        (lambda d: _edit(d, splits={"test": []}), r"no split 'train'.*\['test'\]"),
    ],
)
def test_damage_is_named(directory: Path, damage: object, message: str) -> None:
    damage(directory)  # type: ignore[operator]
    with pytest.raises(DataError, match=message):
        TokenShards(directory, "train")


def test_missing_permission_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(np, "memmap", refuse)  # root, who often runs the tests, may read any file
    with pytest.raises(DataError, match="train-00000.bin.*Permission denied; grant"):
        TokenShards(directory, "train")


def test_verify_finds_a_changed_shard_of_the_same_size(directory: Path) -> None:
    path = directory / "train-00002.bin"
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(DataError, match="train-00002.bin has sha256"):
        TokenShards(directory, "train").verify()


def test_the_digest_of_content_covers_every_byte_of_small_data_and_samples_of_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    size = 40 * shard_index.BLOCK
    whole = {}

    def digest_with(number: int, offset: int | None) -> str:
        for path in paths:
            path.write_bytes(bytes(size))
        if offset is not None:
            with paths[number].open("r+b") as file:
                file.seek(offset)
                file.write(b"x")
        return shard_index.content_digest(paths)

    between = size // 15 - shard_index.BLOCK // 2  # of samples of a large file
    for most in (shard_index.WHOLE, 0):
        monkeypatch.setattr(shard_index, "WHOLE", most)
        whole[most] = digest_with(0, None)
        for number in (0, 1):
            for offset in (0, size - 1, (size - shard_index.BLOCK) * 7 // 15 + 9):
                assert digest_with(number, offset) != whole[most]
            assert (digest_with(number, between) == whole[most]) == (most == 0)
    paths[1].write_bytes(bytes(size - 1))
    assert shard_index.content_digest(paths) != whole[0]


def test_the_first_of_two_writers_wins(directory: Path) -> None:
    before = (directory / "index.json").stat().st_mtime_ns
    write_token_shards(directory, {"train": [np.zeros(3, int)]}, vocab_size=1000)
    assert (directory / "index.json").stat().st_mtime_ns == before
    assert len(TokenShards(directory, "train")) == 103
    assert list(directory.parent.iterdir()) == [directory]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def tokens_then_failure() -> object:
        yield np.arange(40)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        write_token_shards(tmp_path / "s", {"train": tokens_then_failure()}, vocab_size=256, shard_tokens=16)  # type: ignore[dict-item]
    with pytest.raises(DataError, match=r"\[-1, 1\].*\[0, vocab_size=256\)"):
        write_token_shards(tmp_path / "s", {"train": [np.array([1, -1])]}, vocab_size=256)
    with pytest.raises(DataError, match="'train'.*0 tokens"):
        write_token_shards(tmp_path / "s", {"train": []}, vocab_size=256)
    assert list(tmp_path.iterdir()) == []


def test_another_directory_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s/notes.txt").write_text("mine")
    with pytest.raises(DataError, match="must be absent, empty or hold a complete"):
        write_token_shards(tmp_path / "s", {"train": [np.arange(4)]}, vocab_size=256)
    assert [path.name for path in tmp_path.rglob("*")] == ["s", "notes.txt"]


def test_baselines_are_the_stated_formulas(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    train, validation = rng.integers(0, 4, 200).tolist(), rng.integers(0, 5, 50).tolist()  # 4 is only in validation
    splits = {"train": [np.array(train)], "validation": [np.array(validation)]}
    write_token_shards(tmp_path / "s", splits, vocab_size=5, shard_tokens=64)
    shards = TokenShards(tmp_path / "s", "train"), TokenShards(tmp_path / "s", "validation")

    unigram = [(train.count(b) + 1) / (len(train) + 5) for b in range(5)]
    pairs = list(pairwise(train))

    def bigram(a: int, b: int) -> float:
        followers = max(1, len({second for first, second in pairs if first == a}))
        context = sum(first == a for first, _ in pairs)
        return (pairs.count((a, b)) + followers * unigram[b]) / (context + followers)

    measured = list(pairwise(validation))
    assert unigram_bigram_baselines(*shards, 5) == pytest.approx(
        {
            "unigram": -sum(math.log(unigram[b]) for _, b in measured) / 49,
            "bigram": -sum(math.log(bigram(a, b)) for a, b in measured) / 49,
        }
    )
    assert unigram_bigram_baselines(*shards, 1025).keys() == {"unigram"}
    with pytest.raises(DataError, match="holds the token 4, and its index has vocab_size 4"):
        unigram_bigram_baselines(*shards, 4)


def test_counting_in_chunks_misses_no_pair(tmp_path: Path) -> None:
    values = np.random.default_rng(2).integers(0, 3, (1 << 20) + 1)
    for extra in (0, 1, 2):
        part = np.concatenate((values[: (1 << 20) - 1], values[:extra]))
        shards = TokenShards(write_token_shards(tmp_path / str(extra), {"train": [part]}, vocab_size=3), "train")
        expected = np.bincount(part[:-1] * 3 + part[1:], minlength=9)
        np.testing.assert_array_equal(tokens._count(shards, 1 << 30, 3, order=2), expected)
        np.testing.assert_array_equal(
            tokens._count(shards, 1 << 19, 3, order=1), np.bincount(part[: 1 << 19], minlength=3)
        )


def test_a_shard_knows_where_documents_end(tmp_path: Path) -> None:
    lengths = [5, 16, 11, 1, 40, 7]
    documents = [np.full(length, number) for number, length in enumerate(lengths)]
    shards = TokenShards(
        write_token_shards(tmp_path / "s", {"train": documents}, vocab_size=9, shard_tokens=16), "train"
    )
    ends = np.cumsum(lengths)
    assert shards.documents == len(lengths)
    for start, count in [(0, 80), (0, 5), (5, 16), (4, 1), (21, 11), (32, 48), (33, 39), (50, 3), (79, 1)]:
        found = shards.document_ends(start, count)
        assert found.tolist() == [end for end in ends if start < end <= start + count] and found.dtype == np.int64


def test_shards_of_version_1_are_read_but_do_not_know_documents(directory: Path) -> None:
    index = json.loads((directory / "index.json").read_text())
    for shard in index["splits"]["train"]:
        del shard["ends"], shard["documents"]
    del index["tokenizer"], index["splits"]["validation"]
    (directory / "index.json").write_text(json.dumps({**index, "version": 1}))
    shards = TokenShards(directory, "train")
    np.testing.assert_array_equal(shards.tokens(0, 103), TRAIN)
    assert tokenizer_of(directory) is None
    with pytest.raises(DataError, match="does not say where documents end: prepare it again"):
        shards.document_ends(0, 9)


def test_shards_hold_their_tokenizer(tmp_path: Path) -> None:
    write_token_shards(tmp_path / "s", {"train": [np.arange(9)]}, vocab_size=256, tokenizer=ByteTokenizer())
    found = tokenizer_of(tmp_path / "s")
    assert isinstance(found, ByteTokenizer) and found.decode(found.encode(["déf\n"])[0]) == "déf\n"
    assert found.decode([100, 255, 70_000]) == "d\ufffd\ufffd"
    described = tmp_path / "s/tokenizer/tokenizer.json"
    (tmp_path / "s/tokenizer/tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    with pytest.raises(DataError, match="has changed since the shards were made"):
        tokenizer_of(tmp_path / "s")
    described.unlink()
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot be read \(No such file.*give bytes"):
        tokenizer_of(tmp_path / "s")


def test_a_tokenizer_is_loaded_from_a_file_or_a_folder_and_is_the_one_that_hugging_face_reads(tmp_path: Path) -> None:
    text = "def é\n\t 日本 x"
    for name, content in ByteTokenizer().files().items():
        (tmp_path / name).write_text(content)
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(text)["input_ids"] == list(text.encode()) and theirs.decode(list(text.encode())) == text
    assert theirs.eos_token_id == ByteTokenizer.end_of_document == 0 and len(theirs) == ByteTokenizer.vocab_size
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="does not say which token ends a document"):
        load_tokenizer(tmp_path)
    found = load_tokenizer(tmp_path / "tokenizer.json", "a")
    assert (found.encode([text])[0], found.end_of_document, found.vocab_size) == (list(text.encode()), 97, 256)
    assert found.decode([*text.encode(), 999]) == text
    (tmp_path / "copy").mkdir()
    for name, content in found.files().items():
        (tmp_path / "copy" / name).write_text(content)
    assert digest(load_tokenizer(tmp_path / "copy")) == digest(found) != digest(ByteTokenizer())
    with pytest.raises(ConfigError, match="end_of_document=<e>.*has no such token among its 256 tokens"):
        load_tokenizer(tmp_path, "<e>")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a Hugging Face tokenizer"):
        load_tokenizer(tmp_path)
