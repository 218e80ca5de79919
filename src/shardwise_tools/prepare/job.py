"""One command of `shardwise prepare`: its options, its inputs and its tokenizer, which may be trained on the inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.data.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from shardwise.errors import ConfigError, DataError, count
from shardwise.run_dir.files import write_whole
from shardwise_tools.prepare.documents import Flaw, Part, Position, documents, read_parts
from shardwise_tools.prepare.inputs import InputFile, PrepareConfig, find_inputs, fitting_vocabulary
from shardwise_tools.prepare.report import say
from shardwise_tools.prepare.worker import held_out_number


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


END = "<|endoftext|>"
MOST_BYTES = 100_000_000  # of the inputs, evenly spread over them


def train_tokenizer(job: Job) -> Tokenizer:
    """A byte-level BPE like GPT-2's, trained on at most about `MOST_BYTES` of the inputs.

    Where there are more, that is every n-th part of them. Documents that are held out for validation are not used.

    Raises:
        DataError: no document can be read.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=job.config.vocab_size or 0,
        min_frequency=2,
        show_progress=False,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    inner.train_from_iterator(_texts(job), trainer)
    return HuggingFaceTokenizer(inner.to_str(), {"eos_token": END}, "train")


def every_nth(files: list[InputFile]) -> int:
    """Of how many parts one is used."""
    return max(1, -(-sum(file.size for file in files) // MOST_BYTES))


def _texts(job: Job) -> Iterator[str]:
    step, number, config = every_nth(job.files), 0, job.config
    for part in job.parts(Position()):
        if not part.kind:
            continue
        if number % step == 0:
            for item in documents(part, config.field):
                if isinstance(item, Flaw):
                    if config.on_error.value == "stop":
                        raise DataError(f"{item} (on_error=skip leaves such out and lists them)")
                elif held_out_number(item[1]) >= config.validation:
                    yield item[0]
        number += 1


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer.files().items():
        write_whole(folder / name, content)
