"""Streams of text: each document once over ranks and workers, resumed where they were, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from recipes.language_modeling.streams import StreamedText
from shardwise.checkpoint.encoding import encode
from shardwise.config.compose import compose
from shardwise.data.document_stream import DocumentStream, open_document_stream
from shardwise.data.streams import Stream
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.errors import ConfigError
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan

T, B = 8, 2
TEXTS = [f"<{number}>{'x' * (number * 7 % 40)}" for number in range(90)]


class Plain:
    """Documents of which no part is anybody's."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([{"text": text} for text in self.texts])


class WithState(Plain):
    """Once it has taken up a position, each pass starts there."""

    start, at = 0, -1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self.start, len(self.texts)):
            self.at = number
            yield {"text": self.texts[number]}

    def state_dict(self) -> dict[str, int]:
        return {"next": self.at + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start, self.at = state["next"], state["next"] - 1


class Same(Plain, IterableDataset[Any]):
    """Does not ask which worker reads it."""


class Shared(Plain, IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        part, parts = (info.id, info.num_workers) if info else (0, 1)
        return iter([{"text": text} for text in self.texts[part::parts]])


def stream(source: Any, workers: int = 0, **options: Any) -> DocumentStream:
    options = {"field": "text", "tokenizer": ByteTokenizer(), "sequence_length": T, "batch_size": B} | options
    return open_document_stream(source, num_workers=workers, **options)


def documents(loader: DocumentStream) -> list[int]:
    """The numbers of the documents that were read, part by part: `Stream` would leave the order to the workers."""
    texts: dict[int, list[str]] = {}
    for batch in super(DocumentStream, loader).__iter__():
        tokens = [*batch["tokens"].flatten().tolist(), int(batch["targets"][-1, -1])]
        assert torch.equal(batch["targets"].flatten()[:-1], batch["tokens"].flatten()[1:])
        pieces = texts.setdefault(batch["part"], [ByteTokenizer().decode(tokens[:1])])
        pieces.append(ByteTokenizer().decode(tokens[1:]))
    found = ["".join(pieces) for pieces in texts.values()]
    return [int(number) for text in found for number in re.findall(r"<(\d+)>", text)]


def read_by_all(monkeypatch: pytest.MonkeyPatch, make: Any, ranks: int, workers: int, **options: Any) -> list[int]:
    found = []
    for rank in range(ranks):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        found += documents(stream(make(), workers, keep_last=True, **options))
    return sorted(found)


def is_nearly_all(found: list[int], parts: int) -> bool:
    """Whether no document came twice, and none is missing but the last of a part, which may have no sequence."""
    return len(set(found)) == len(found) and len(TEXTS) - parts <= len(found) <= len(TEXTS)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 0), (1, 2), (2, 2)])
@pytest.mark.parametrize("kind", [Plain, WithState])
def test_every_document_is_read_once(monkeypatch: pytest.MonkeyPatch, kind: Any, ranks: int, workers: int) -> None:
    found = read_by_all(monkeypatch, lambda: kind(TEXTS), ranks, workers)
    assert is_nearly_all(found, ranks * max(1, workers))


def test_a_torch_data_set_splits_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_nearly_all(read_by_all(monkeypatch, lambda: Shared(TEXTS), 1, 2), 2)


def test_sequences_are_the_documents_end_to_end() -> None:
    tokens = [token for text in TEXTS for token in [*text.encode(), 0]]
    rows = [row for batch in stream(Plain(TEXTS), keep_last=True) for row in batch["tokens"].tolist()]
    whole = (len(tokens) - 1) // T
    assert rows == [tokens[i * T : (i + 1) * T] for i in range(whole)]
    assert len(list(stream(Plain(TEXTS)))) == whole // B  # without the last batch, which is not whole


def plan() -> Plan:
    words = ["accelerator=cpu", "name=run", f"micro_batch_size={B}", f"global_batch_size={2 * B}", "devices=1"]
    return make_plan(compose(words).jobs[0].config, Host(cuda_devices=0))


def epochs(read: Stream, most: int) -> list[tuple[list[Any], dict[str, Any]]]:
    """Windows of `most` epochs, each with the position after it."""
    found = []
    for _ in range(most):
        found += [([batch["tokens"].tolist() for batch in window], position) for window, position, _ in read.windows()]
    return found


@pytest.mark.filterwarnings("ignore:.*suggested max number of worker.*")  # of a machine with two CPUs
@pytest.mark.parametrize("workers", [0, 3])  # with three, a window of two ends with another worker each time
@pytest.mark.parametrize("kind", [Plain, WithState])
def test_a_position_is_gone_on_from_to_the_bit(kind: Any, workers: int) -> None:
    texts = [*TEXTS[:12], "y" * 200]  # one worker ends after the others
    straight = epochs(Stream(stream(kind(texts), workers), plan(), lambda: None), 2)
    steps = len(straight) // 2
    assert straight[0][0] == straight[steps][0] != straight[1][0]
    for after in (1, steps // 2, steps - 2, steps, steps + 1):
        position = straight[after - 1][1]
        encode(position)  # is plain, so that it can travel with a checkpoint
        assert (position["state"] is None) == (kind is Plain)
        resumed = Stream(stream(kind(texts), workers), plan(), lambda: None)
        resumed.go_on_from(position)
        left = epochs(resumed, 2 if after < steps else 1)
        assert [window for window, _ in left] == [window for window, _ in straight[after:]]


def test_a_position_belongs_to_a_number_of_workers() -> None:
    before, after = stream(WithState(TEXTS), 2), stream(WithState(TEXTS), 0)
    next(iter(before))
    with pytest.raises(ConfigError, match="holds the position of 2 parts of WithState.*give data.num_workers=2"):
        after.load_state_dict(before.state_dict())


# --- what is refused


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"text": "a" * 70}, {"body": "b", "id": 1}],
         "data.source: sample 2 of list has no field text; it has body, id: give data.field=<one of these>"),
        ([{"__url__": "s.tar", "__key__": "07", "txt": "b"}],
         "data.source: sample 1 of list (s.tar, 07) has no field text; it has __url__, __key__, txt"),
        (["text"], "data.source: sample 1 of list is a str, and must be a dict with the field text"),
        ([{"text": 3}], "data.source: sample 1 of list has an int in text, and must have text there"),
        ([{"text": b"ab\xff"}], "data.source: sample 1 of list is no UTF-8 at byte 2 of text"),
        ([], "data.source: list gives no document: look at its arguments, such as a folder"),
    ],
)  # fmt: skip
def test_a_sample_that_is_no_text_is_named(samples: list[Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        list(stream(samples))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_a_worker_names_it_in_one_line() -> None:
    with pytest.raises(ConfigError) as error:
        list(stream([{"text": 3}], 1))
    assert str(error.value) == "data.source: sample 1 of list has an int in text, and must have text there"


def test_workers_that_read_the_same_are_told() -> None:
    with pytest.raises(ConfigError, match="Same gives the same documents to each of the 2 workers: split it by torch"):
        list(stream(Same(TEXTS), 2))


def test_a_source_that_cannot_be_read() -> None:
    with pytest.raises(ConfigError, match="data.source gives an int, which cannot be read"):
        stream(3)
    with pytest.raises(ConfigError, match="a dict of train, test, and not one of them: .* data.source.split=train"):
        stream({"train": [], "test": []})


def test_validation_needs_something_to_read() -> None:
    data = StreamedText(Plain(TEXTS), T, B)
    with pytest.raises(ConfigError, match="there is nothing to validate on: give data.validation_source._target_=…"):
        data.val_dataloader()
    with pytest.raises(ConfigError, match="are both given"):
        StreamedText(Plain(TEXTS), T, B, validation_source=Plain(TEXTS), validation_directory="shards")


# --- the packages, where they are installed


def write_lines(folder: Path) -> None:
    for file in range(4):
        lines = [json.dumps({"text": text}) + "\n" for text in TEXTS[file::4]]
        (folder / f"{file}.jsonl").write_text("".join(lines))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("streaming", [True, False])
def test_hugging_face(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, streaming: bool) -> None:
    datasets = pytest.importorskip("datasets")
    write_lines(tmp_path)
    files = [str(tmp_path / f"{file}.jsonl") for file in range(4)]

    def make() -> Any:
        return datasets.load_dataset("json", data_files=files, split="train", streaming=streaming, cache_dir=tmp_path)

    for ranks, workers in ((1, 2), (2, 0), (2, 2)):
        assert is_nearly_all(read_by_all(monkeypatch, make, ranks, workers), ranks * max(1, workers))
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    for workers in (0, 2):
        straight = epochs(Stream(stream(make(), workers), plan(), lambda: None), 2)
        for after in (3, len(straight) // 2, len(straight) // 2 + 1):
            resumed = Stream(stream(make(), workers), plan(), lambda: None)
            resumed.go_on_from(straight[after - 1][1])
            left = epochs(resumed, 2 if after < len(straight) // 2 else 1)
            assert [window for window, _ in left] == [window for window, _ in straight[after:]]


@pytest.mark.filterwarnings("ignore")
def test_webdataset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    for file in range(4):
        with webdataset.TarWriter(str(tmp_path / f"{file}.tar")) as tar:
            for number, text in enumerate(TEXTS[file::4]):
                tar.write({"__key__": str(number), "txt": text})

    def make() -> Any:
        split = webdataset.split_by_node
        return webdataset.WebDataset(str(tmp_path / "{0..3}.tar"), nodesplitter=split, shardshuffle=False)

    for ranks, workers in ((1, 0), (2, 2)):
        found = read_by_all(monkeypatch, make, ranks, workers, field="txt")
        assert is_nearly_all(found, ranks * max(1, workers))


def test_half_a_surrogate_pair_is_told_with_its_document() -> None:
    with pytest.raises(ConfigError, match="sample 2 of Plain holds half a surrogate pair at character 1 of text"):
        list(stream(Plain(["a" * 40, "b\ud800" * 20])))
