"""data.corpus=/my.txt: a small text becomes token shards in passing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.language_modeling import own_text
from recipes.language_modeling.data import STDLIB_DIRECTORY, TextData
from shardwise.data.tokens import TokenShards
from shardwise.errors import ConfigError
from tests.unit.test_prepare import make, read_back, texts, write_lines

PARAGRAPHS = [text.strip() for text in texts(300, 7)]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my.txt"
    path.write_text("\n\n".join(PARAGRAPHS), encoding="utf-8")
    return path


def data(corpus: str | None, directory: str = STDLIB_DIRECTORY, **more: Any) -> TextData:
    return TextData(directory, sequence_length=16, batch_size=4, corpus=corpus, **more)


def test_one_text_is_prepared_once_and_a_part_of_it_is_held_out(text: Path, tmp_path: Path) -> None:
    first = data("my.txt")
    first.check()
    assert first.directory.parent == Path("data") and first.directory.name.startswith("my-txt-")
    index = first.directory / "index.json"
    written = index.stat().st_mtime_ns
    data("my.txt").prepare_data()
    assert index.stat().st_mtime_ns == written and list(tmp_path.joinpath("data").iterdir()) == [
        tmp_path / first.directory
    ]
    train, validation = read_back(first.directory), read_back(first.directory, "validation")
    assert 2 < len(validation) < len(train) and len("".join(train + validation)) == len(text.read_text())
    assert first.tokenizer is not None and first.tokenizer.name == "bytes"
    other = data("my.txt", tokenizer="train", vocab_size=300)
    other.check()
    assert other.directory != first.directory and TokenShards(other.directory, "train").vocab_size == 300
    text.write_text("another text\n" * 1000)
    with pytest.raises(
        ConfigError, match=r"data.corpus=my.txt, data.directory=.* was made from other inputs, which .*inputs.jsonl"
    ):
        data("my.txt").check()


def test_a_text_that_is_too_large_or_absent_is_refused_with_the_remedy(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = text.stat().st_size
    monkeypatch.setattr(own_text, "MOST_BYTES", size - 1)
    message = (
        rf"my.txt has {size:,} bytes, and at most {size - 1:,} are prepared in passing: run `shardwise prepare my.txt "
        r"tokenizer=train vocab_size=8192 cut_texts=10000 output=tokens`, then train with data=token_shards"
    )
    with pytest.raises(ConfigError, match=message):
        data("my.txt", "tokens", tokenizer="train").check()
    with pytest.raises(ConfigError, match=r"data.corpus=gone.txt: .*there is no such file or folder") as absent:
        data("gone.txt").check()
    assert "python_stdlib" not in str(absent.value)
    assert not Path("data").exists() and not Path("tokens").exists()


@pytest.mark.parametrize("part_bytes", [700, 5000, 1 << 20])
def test_a_text_is_cut_at_empty_lines_whatever_the_parts(text: Path, tmp_path: Path, part_bytes: int) -> None:
    long_line = "x" * 5000
    text.write_text(text.read_text() + "\n" + long_line + "\nthe end\n", encoding="utf-8")
    made = make(tmp_path / "s", text, cut_texts=2000, validation=0.0, part_bytes=part_bytes)
    documents = read_back(made)
    assert "".join(documents) == text.read_text() and len(documents) > 20
    assert all(document.endswith("\n\n") for document in documents[:-2])
    assert all(2000 <= len(document.encode()) < 5000 for document in documents[:-2]) and long_line in documents[-2]


def test_wrong_utf8_in_a_piece_is_told_with_its_line(text: Path, tmp_path: Path) -> None:
    lines = text.read_bytes().split(b"\n")
    lines[400] = b"\xff"
    text.write_bytes(b"\n".join(lines))
    with pytest.raises(ConfigError, match=r"my.txt:401: is not UTF-8"):
        make(tmp_path / "s", text, cut_texts=2000, part_bytes=5000)


def test_json_lines_may_be_a_corpus_too(text: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "books/a.jsonl", texts(200))
    made = data("books/*.jsonl", "shards")
    made.check()
    assert len(read_back(tmp_path / "shards")) + len(read_back(tmp_path / "shards", "validation")) == 200


def test_what_is_wrong_with_a_text_is_told_with_words_that_work(text: Path, tmp_path: Path) -> None:
    """prepare's own options are none of train.py's."""
    fields = tmp_path / "fields.jsonl"
    fields.write_text("".join(json.dumps({"content": line}) + "\n" for line in texts(50)))
    for content, name in ((b"", "no.txt"), (b"one\n", "one.txt"), (b"a\n" * 300 + b"\xff\n", "wrong.txt")):
        Path(name).write_bytes(content)

    def refused(corpus: str, **more: Any) -> str:
        with pytest.raises(ConfigError) as error:
            data(corpus, "data/x", **more).check()
        return str(error.value)

    then = "output=data/x`, then train with data=token_shards data.directory=data/x"
    assert f"run `shardwise prepare fields.jsonl tokenizer=bytes field=content {then}" in refused("fields.jsonl")
    assert f"`shardwise prepare wrong.txt tokenizer=bytes cut_texts=10000 on_error=skip {then}" in refused("wrong.txt")
    assert "0 bytes: give a file with text in it" in refused("no.txt")
    few = refused("one.txt")
    assert few.endswith("1 document leaves no document for validation: give more text") and "validation=0," not in few


def test_shards_of_another_text_are_not_taken_for_pythons_library(text: Path, tmp_path: Path) -> None:
    made = make(tmp_path / "man", text, cut_texts=2000, validation=0.2)
    unmeasured = make(tmp_path / "all", text, cut_texts=2000, validation=0.0)
    with pytest.raises(ConfigError, match=r"man holds shards of another text \(1 file, such as .*data=token_shards"):
        data("python_stdlib", str(made)).check()
    own = data(None, str(made))
    own.check()
    tokens = len(TokenShards(made, "train"))
    assert own.described() == [f"reads {made}: {tokens:,} tokens, vocabulary 256, of 1 file, such as {text}"]
    data(None, str(unmeasured)).check()  # validation may be off
    with pytest.raises(ConfigError, match=r"all has no validation split.*above 0, .*data.validation=.*_batches=0$"):
        data(None, str(unmeasured)).setup("validate")
    with pytest.raises(ConfigError, match=r"my.txt is a file, .* `shardwise prepare .*my.txt .* output=data/my`"):
        data(None, str(text)).check()
