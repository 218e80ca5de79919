"""Reads text as it comes from a stream of documents: splits it by rank and worker, tokenises it and packs it.

A stream is any iterable of dicts with a text field. Hugging Face's data sets are split by rank here, and by worker by
themselves. Every other torch `IterableDataset` (MosaicML Streaming, LitData, WebDataset) splits itself by rank and by
worker. What is neither is dealt out here, document by document.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from shardwise import accelerator
from shardwise.data.streams import has_state
from shardwise.data.tokenizer import Tokenizer
from shardwise.data.tokens import TokenSequences, TokenShards
from shardwise.errors import BadSample, ConfigError, a_or_an, count
from shardwise.nn.attention import document_starts

_GROUP_CHARACTERS, _GROUP_DOCUMENTS = 2**16, 256  # a tokenizer is faster on several documents at once

Ints = npt.NDArray[np.int64]


class Documents:
    """The texts that one worker of one rank reads, with the position in them if the source has a state."""

    def __init__(self, source: Any, field: str, rank: int, ranks: int, workers: int) -> None:
        self.field, self.rank, self.ranks = field, rank, ranks
        self.source = _of_rank(source, rank, ranks, workers)
        self.is_split = isinstance(self.source, IterableDataset)
        self.name = type(source).__name__
        self.has_state = has_state(self.source)
        self.read = 0  # samples of this epoch, also those of other parts
        self._fresh: Any = None  # the state of the source before a position was restored

    def begin(self, worker: int, workers: int, epoch: int, state: dict[str, Any] | None) -> Iterator[str]:
        """Give the texts of this part of epoch `epoch`, from the start or from `state`."""
        if callable(set_epoch := getattr(self.source, "set_epoch", None)):
            set_epoch(epoch)
        self.read = 0
        if state is not None:
            self._fresh = copy.deepcopy(self.source.state_dict())
            self.source.load_state_dict(state["source"])
            self.read = state["read"]
        elif self._fresh is not None:  # some sources would start at the restored position again
            self.source.load_state_dict(self._fresh)
        part, parts = (0, 1) if self.is_split else (self.rank * workers + worker, self.ranks * workers)
        for sample in self.source:
            self.read += 1
            if (self.read - 1) % parts == part:
                yield self._text(sample)
        if not self.read and epoch == 0 and not self.is_split:  # of a source that splits itself, a part may be empty
            raise BadSample(f"data.source: {self.name} gives no document: look at its arguments, such as a folder")

    def state(self) -> dict[str, Any] | None:
        """The position after the last text; None: the source has no state."""
        return {"source": copy.deepcopy(self.source.state_dict()), "read": self.read} if self.has_state else None

    def _text(self, sample: Any) -> str:
        if not isinstance(sample, Mapping):
            what = a_or_an(type(sample).__name__)
            raise self._bad(sample, f"is {what}, and must be a dict with the field {self.field}")
        if self.field not in sample:
            fields = ", ".join(map(str, sample)) or "none"
            raise self._bad(sample, f"has no field {self.field}; it has {fields}: give data.field=<one of these>")
        text = sample[self.field]
        try:
            text = bytes(text).decode() if isinstance(text, bytes | bytearray) else text
        except UnicodeDecodeError as error:
            raise self._bad(
                sample, f"is no UTF-8 at byte {error.start} of {self.field}: convert or remove it"
            ) from None
        if not isinstance(text, str):
            raise self._bad(sample, f"has {a_or_an(type(text).__name__)} in {self.field}, and must have text there")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            where = f"at character {error.start} of {self.field}"
            raise self._bad(sample, f"holds half a surrogate pair {where}, which is no Unicode: correct it") from None
        return text

    def _bad(self, sample: Any, what: str) -> BadSample:
        keys = ("__url__", "__key__") if isinstance(sample, Mapping) else ()  # where WebDataset found it
        found = [str(sample[key]) for key in keys if key in sample]
        where = f" ({', '.join(found)})" if found else ""
        return BadSample(f"data.source: sample {self.read} of {self.name}{where} {what}")


class PackedDocuments(IterableDataset[dict[str, Any]]):
    """Whole batches of sequences, cut from the documents' tokens without a gap. A worker reads its part of them."""

    def __init__(
        self, documents: Documents, tokenizer: Tokenizer, sequence_length: int, batch_size: int, keep_last: bool
    ) -> None:
        self.documents, self.tokenizer = documents, tokenizer
        self.sequence_length, self.batch_size, self.keep_last = sequence_length, batch_size, keep_last
        self.epoch, self.first = 0, 0  # `first`: the part that the first worker reads
        self.states: list[dict[str, Any] | None] | None = None  # of each part

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Batches of `tokens` and `targets`, int64 [B, T], with the number of the part and the state after it."""
        worker, workers = 0, 1
        if (info := get_worker_info()) is not None:
            worker, workers = (info.id + self.first) % info.num_workers, info.num_workers
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers are what runs at the same time
        state = self.states[worker] if self.states is not None else None
        tokens = np.asarray([] if state is None else state["tokens"], np.int64)
        texts = self.documents.begin(worker, workers, self.epoch, state)
        while True:
            tokens = self._fill(tokens, texts)
            rows = min(self.batch_size, (len(tokens) - 1) // self.sequence_length)
            if rows < self.batch_size and not (self.keep_last and rows > 0):
                return
            window, tokens = tokens[: rows * self.sequence_length + 1], tokens[rows * self.sequence_length :]
            position = self.documents.state()
            yield {
                "tokens": torch.from_numpy(window[:-1].reshape(rows, -1)),
                "targets": torch.from_numpy(window[1:].reshape(rows, -1)),
                "part": worker,
                "state": None if position is None else position | {"tokens": tokens.astype(np.int32)},
            }

    def _fill(self, tokens: Ints, texts: Iterator[str]) -> Ints:
        """Add the tokens of further documents until there are enough for a batch, or no document is left."""
        pieces, length = [tokens], len(tokens)
        while length <= self.batch_size * self.sequence_length and (group := _next_group(texts)):
            for found in self.tokenizer.encode(group):
                pieces.append(np.array([*found, self.tokenizer.end_of_document], np.int64))
                length += len(pieces[-1])
        return np.concatenate(pieces)


class DocumentStream(DataLoader[dict[str, Any]]):
    """One rank's batches of a stream of documents: `tokens` and `targets`, int64 [batch_size, sequence_length].

    `source`: an iterable of dicts, whose `field` is a text. RANK and WORLD_SIZE say which part of it is this rank's.
    `keep_last`: also give the last batch, which has fewer sequences. What is left then is less than one sequence.

    Raises:
        ConfigError: the source is no such iterable.
    """

    def __init__(
        self,
        source: Any,
        field: str,
        tokenizer: Tokenizer,
        sequence_length: int,
        batch_size: int,
        num_workers: int = 0,
        keep_last: bool = False,
    ) -> None:
        rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        documents = Documents(source, field, rank, ranks, num_workers)
        packed = PackedDocuments(documents, tokenizer, sequence_length, batch_size, keep_last)
        super().__init__(packed, batch_size=None, num_workers=num_workers, collate_fn=_as_it_is,
                         pin_memory=accelerator.pins_memory())  # fmt: skip
        self.packed, self.parts, self.epoch = packed, max(1, num_workers), 0
        self._states: list[dict[str, Any] | None] = [None] * self.parts
        self._next_part = 0
        self._restored: dict[str, Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        """The source's own `set_epoch` is called with this number when the epoch begins."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        restored, self._restored = self._restored, None
        if restored is not None and restored["epoch"] != self.epoch:
            return  # nothing is left of the epoch before
        self._states = [None] * self.parts if restored is None else list(restored["parts"])
        self._next_part = 0 if restored is None else restored["next"]
        self.packed.epoch, self.packed.first = self.epoch, self._next_part
        self.packed.states = None if restored is None else list(self._states)
        firsts: dict[int, torch.Tensor] = {}
        for batch in super().__iter__():
            part = batch.pop("part")
            self._states[part], self._next_part = batch.pop("state"), (part + 1) % self.parts
            if restored is None and part not in firsts:
                self._check_first(batch["tokens"], firsts)
                firsts[part] = batch["tokens"]
            yield batch

    def _check_first(self, tokens: torch.Tensor, firsts: Mapping[int, torch.Tensor]) -> None:
        if any(torch.equal(tokens, other) for other in firsts.values()):
            raise ConfigError(
                f"data.source: {self.packed.documents.name} gives the same documents to each of the {self.parts} "
                f"workers: split it by torch.utils.data.get_worker_info() where it is read, or give data.num_workers=1"
            )


class ResumableDocumentStream(DocumentStream):
    """A stream whose source has `state_dict()` and `load_state_dict(state)`: it goes on where it was.

    Its state is that of each worker's source, the tokens that are left over there, and whose turn it is.
    """

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "parts": list(self._states), "next": self._next_part}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (before := len(state["parts"])) != self.parts:
            raise ConfigError(
                f"data.num_workers={self.num_workers}: the checkpoint holds the position of {count(before, 'part')} of "
                f"{self.packed.documents.name}, one for each worker, and this run reads {self.parts}: give "
                f"data.num_workers={before}"
            )
        self._restored = state


def open_document_stream(source: Any, **options: Any) -> DocumentStream:
    """A `DocumentStream`; one that is resumed without being read again if the source has a state."""
    if isinstance(source, Mapping):
        raise ConfigError(
            f"data.source gives {a_or_an(type(source).__name__)} of {', '.join(map(str, source))}, and not one of "
            f"them: choose one, e.g. data.source.split={next(iter(source), 'train')}"
        )
    if not isinstance(source, Iterable):
        raise ConfigError(
            f"data.source gives {a_or_an(type(source).__name__)}, which cannot be read: its _target_ must give an "
            f"iterable of dicts with a text"
        )
    kind = ResumableDocumentStream if has_state(_without_index(source, 1)) else DocumentStream
    return kind(source, **options)


def _of_rank(source: Any, rank: int, ranks: int, workers: int) -> Any:
    if type(source).__module__.partition(".")[0] != "datasets":
        return source
    split_by_node = import_module("datasets.distributed").split_dataset_by_node
    return split_by_node(_without_index(source, ranks * max(1, workers)), rank, ranks)


def _without_index(source: Any, shards: int) -> Any:
    """Of Hugging Face's two kinds of data sets the one that is a stream."""
    make = getattr(source, "to_iterable_dataset", None)
    return source if make is None else make(num_shards=min(shards, max(1, len(source))))


def _next_group(texts: Iterator[str]) -> list[str]:
    group: list[str] = []
    characters = 0
    for text in texts:
        group.append(text)
        characters += len(text)
        if characters >= _GROUP_CHARACTERS or len(group) == _GROUP_DOCUMENTS:
            break
    return group


def _as_it_is(batch: Any) -> Any:
    return batch


# Packed sequences that know their documents, so that attention and loss can stay inside each.

IGNORE = -100  # a target that does not count, as torch's cross_entropy has it


class DocumentSequences(TokenSequences):
    """`TokenSequences` in which a token predicts only tokens of its own document.

    A document that begins or ends outside a sequence is cut there: its parts are documents of their own.

    Raises:
        DataError: the shards do not say where documents end.
    """

    def __init__(self, shards: TokenShards, sequence_length: int) -> None:
        super().__init__(shards, sequence_length)
        shards.document_ends(0, 0)

    def __getitem__(self, i: int) -> dict[str, npt.NDArray[np.int64]]:
        """`tokens`, `targets` and `documents`, all int64 [sequence_length]. A target in another document is -100."""
        sample, start = super().__getitem__(i), i * self.sequence_length
        number = np.zeros(self.sequence_length + 1, np.int64)
        number[self.shards.document_ends(start, self.sequence_length) - start] = 1
        number = number.cumsum()
        inside = number[1:] == number[:-1]
        return {**sample, "targets": np.where(inside, sample["targets"], IGNORE), "documents": number[:-1]}


def collate_documents(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Collate, and add `document_starts`, which on a GPU would make the host wait."""
    batch: dict[str, Any] = default_collate(list(samples))
    return {**batch, "document_starts": document_starts(batch["documents"])}
