"""What `shardwise prepare` is told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from shardwise.config.schema import MISSING
from shardwise.data.shard_index import dtype_for
from shardwise.devices import count_cpus
from shardwise.errors import ConfigError

TRAIN = "train"  # the tokenizer that is trained on the inputs
SMALLEST_VOCABULARY = 257  # of such a tokenizer: the bytes, and the token that ends a document
_FITTING = ((10**6, 1024), (10**7, 2048), (10**8, 8192), (10**9, 16_384))  # below so many bytes → tokens
LARGEST_VOCABULARY = 4_194_304  # the trainer reserves memory for all of it, and aborts the process if there is none


class OnError(Enum):
    stop = "stop"
    skip = "skip"


def fitting_vocabulary(size: int) -> int:
    """The size of a trained tokenizer's vocabulary for `size` bytes of text, if none is given.

    A model of a small text sees each token often enough to learn it only if there are few.
    """
    return next((tokens for limit, tokens in _FITTING if size < limit), 32_768)


@dataclass
class PrepareConfig:
    """The words of the command. `input` has the paths, patterns and folders as they were given."""

    output: str = MISSING
    tokenizer: str = TRAIN
    vocab_size: int | None = None
    field: str = "text"
    validation: float = 0.01
    end_of_document: str | None = None
    processes: int | None = None
    shard_tokens: int = 1 << 27
    on_error: OnError = OnError.stop
    pad_vocabulary_to: int | None = None
    cut_texts: int | None = None

    @property
    def is_trained(self) -> bool:
        """Whether the tokenizer is made from the inputs."""
        return self.tokenizer == TRAIN

    def count_processes(self) -> int:
        return self.processes or count_cpus()

    def check(self) -> None:
        """Raises `ConfigError` for values that cannot work, whatever the inputs are."""
        for name, least in (("processes", 1), ("shard_tokens", 1), ("pad_vocabulary_to", 1), ("cut_texts", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"{name}={value}: must be at least {least}")
        if not 0 <= self.validation < 1:
            raise ConfigError(
                f"validation={self.validation}: must be at least 0 and below 1, the share of documents that is held out"
            )
        if not self.output:
            raise ConfigError("output is empty: name the folder that is to be made")
        if Path(self.output).name in ("", ".."):
            raise ConfigError(f"output={self.output}: name a folder that is to be made, such as output=data/books")
        if self.pad_vocabulary_to is not None:
            dtype_for(self.pad_vocabulary_to)
        self._check_trained()

    def _check_trained(self) -> None:
        if not self.is_trained:
            if self.vocab_size is not None:
                raise ConfigError(
                    f"vocab_size={self.vocab_size} belongs to tokenizer=train, and tokenizer={self.tokenizer} has its "
                    f"own: leave it out, or give tokenizer=train"
                )
            return
        if self.vocab_size is None:  # it follows from the size of the inputs
            pass
        elif self.vocab_size < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"vocab_size={self.vocab_size}: must be at least {SMALLEST_VOCABULARY}, which are the 256 bytes and "
                f"the token that ends a document; 8192 suits a small model"
            )
        elif self.vocab_size > LARGEST_VOCABULARY:
            raise ConfigError(
                f"vocab_size={self.vocab_size}: must be at most {LARGEST_VOCABULARY}; 8192 suits a small model"
            )
        if self.end_of_document is not None:
            raise ConfigError("tokenizer=train names the token that ends a document itself: leave end_of_document out")
