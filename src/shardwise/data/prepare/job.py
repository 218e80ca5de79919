"""One command of `shardwise prepare`: its options, its inputs, its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardwise.data.prepare.inputs import InputFile, find_inputs
from shardwise.data.prepare.options import PrepareConfig, fitting_vocabulary
from shardwise.data.prepare.parts import Part, Position, read_parts
from shardwise.data.prepare.progress import say
from shardwise.data.tokenizer import Tokenizer, load_tokenizer
from shardwise.errors import ConfigError, count


@dataclass
class Job:
    """Options and inputs, and the tokenizer unless that is to be trained."""

    config: PrepareConfig
    files: list[InputFile]
    other_endings: list[str]
    tokenizer: Tokenizer | None
    part_bytes: int
    quiet: bool
    is_size_given: bool = True  # of a trained tokenizer's vocabulary

    @staticmethod
    def make(given: list[str], config: PrepareConfig, part_bytes: int, quiet: bool) -> Job:
        tokenizer = None if config.is_trained else load_tokenizer(config.tokenizer, config.end_of_document)
        job = Job(config, [], [], tokenizer, part_bytes, quiet)
        if tokenizer is not None:
            job.vocab_size(tokenizer)
        job.files, job.other_endings = find_inputs(given)
        if config.is_trained and config.vocab_size is None:
            job.config, job.is_size_given = replace(config, vocab_size=fitting_vocabulary(job.size)), False
        return job

    def vocab_size(self, tokenizer: Tokenizer) -> int:
        """Of the shards: padded where that was asked for."""
        padded = self.config.pad_vocabulary_to
        if padded is not None and padded < tokenizer.vocab_size:
            raise ConfigError(
                f"pad_vocabulary_to={padded}: the tokenizer has {count(tokenizer.vocab_size, 'token')}; give at "
                f"least that, or leave it out"
            )
        return padded or tokenizer.vocab_size

    def say(self, line: str) -> None:
        if not self.quiet:
            say(line)

    def parts(self, begin: Position) -> Iterator[Part]:
        return read_parts(self.files, self.part_bytes, begin, self.config.cut_texts)

    @property
    def has_whole_texts(self) -> bool:
        """Whether some file is one document."""
        return self.config.cut_texts is None and any(file.kind == "text" for file in self.files)

    @property
    def has_long_texts(self) -> bool:
        """Whether `cut_texts=10000` would make several documents of a file."""
        return self.has_whole_texts and any(file.size > 10_000 for file in self.files)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def words(self) -> dict[str, Any]:
        """What decides the content of the shards, besides inputs and tokenizer. A tokenizer's path does not."""
        config = self.config
        trained = {"vocab_size": config.vocab_size} if config.is_trained else {}
        return {
            "tokenizer": "train" if config.is_trained else "given",
            **trained,
            "field": config.field,
            "validation": config.validation,
            "shard_tokens": config.shard_tokens,
            "pad_vocabulary_to": config.pad_vocabulary_to,
            "cut_texts": config.cut_texts,
        }
