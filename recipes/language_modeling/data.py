"""The data: token shards, a small text of one's own, or Python's standard library as bytes."""

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset, Subset

from recipes.language_modeling.own_text import STDLIB, OwnText, check_directory
from shardwise.accelerator import pins_memory
from shardwise.data.document_stream import DocumentSequences, collate_documents
from shardwise.data.mixture import check_one_tokenizer
from shardwise.data.shard_index import load_index
from shardwise.data.tokenizer import ByteTokenizer, Tokenizer
from shardwise.data.tokens import (
    INDEX,
    Tokens,
    TokenSequences,
    TokenShards,
    tokenizer_of,
    unigram_bigram_baselines,
    write_token_shards,
)
from shardwise.errors import ConfigError, DataError, count
from shardwise.protocols import optional

STDLIB_DIRECTORY = "data/python_stdlib"
NOT_CORPUS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


class TextData(LightningDataModule):
    """Sequences of `sequence_length` tokens from the shards in `directory`.

    `corpus`: "python_stdlib", or the path of a text, builds the shards if they are missing; with None they must be
    there. `tokenizer`, `vocab_size`: of such a text, see own_text.py.

    `document_mask`: batches say which tokens are of one document, and attention and loss stay inside it. `validation`:
    folders of shards by name, whose validation splits are each measured; None: that of `directory`.
    """

    def __init__(
        self,
        directory: str,
        sequence_length: int,
        batch_size: int,
        num_workers: int = 0,
        corpus: str | None = "python_stdlib",
        max_validation_sequences: int | None = None,
        document_mask: bool = False,
        validation: Mapping[str, str] | None = None,
        tokenizer: str | None = None,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        self.own_text = None if corpus in (None, STDLIB) else OwnText(str(corpus), tokenizer, vocab_size)
        if self.own_text is None and (tokenizer is not None or vocab_size is not None):
            raise ConfigError(
                f"data.{tokenizer=}, data.{vocab_size=}: these are of a text of yours, data.corpus=PATH; leave them out"
            )
        if self.own_text is not None and directory == STDLIB_DIRECTORY:  # the default, which is of another text
            directory = str(self.own_text.directory)
        if not directory:
            raise ConfigError("data.directory is empty: name the folder of the shards")
        check_at_least(sequence_length, num_workers)
        if max_validation_sequences is not None and max_validation_sequences < 1:
            raise ConfigError(f"data.{max_validation_sequences=}: must be at least 1, or null for all")
        self.directory = Path(directory)
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.corpus = corpus
        self.max_validation_sequences = max_validation_sequences
        self.document_mask = document_mask
        self.validation_directories = {"": self.directory}  # by the name of the validation set
        if validation is not None:
            check_names("data.validation", validation)
            self.validation_directories = {name: Path(directory) for name, directory in validation.items()}

    def check(self) -> None:
        """Raises `DataError` unless the splits can be read. `setup` knows whether one for validation is needed."""
        check_directory(self.corpus, self.directory)
        self.prepare_own_text()
        if self.corpus != STDLIB or (self.directory / INDEX).exists():
            check_one_tokenizer(self.directories())
            self._train()
            self._validation(may_lack=True)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the shards: bytes, if they do not say and have 256 tokens. None: it is not known (yet)."""
        if (self.directory / INDEX).exists():
            return _tokenizer_of(self.directory)
        return ByteTokenizer() if self.corpus == STDLIB else None

    @property
    def vocab_size(self) -> int | None:
        """Every token of all folders of shards is below this number. None: none of them is there yet."""
        there = [folder for folder in self.directories().values() if (folder / INDEX).exists()]
        if there:
            return max(int(load_index(folder)["vocab_size"]) for folder in there)
        return None if self.tokenizer is None else self.tokenizer.vocab_size

    @property
    def vocab_size_to_be(self) -> int | None:
        """The same before the shards of a text are there: one process finds them and another makes them."""
        return self.vocab_size if self.own_text is None else self.own_text.tokens

    def directories(self) -> dict[str, Path]:
        """All folders of shards that are read, by the option that names them."""
        named = {f"data.validation.{name}": folder for name, folder in self.validation_directories.items() if name}
        return {"data.directory": self.directory, **named}

    def check_fits(self, *, vocab_size: int, max_seq_len: int) -> None:
        """Raises `ConfigError` if the data holds tokens or sequences that a model of these sizes cannot take."""
        check_sizes(str(self.directory), self.vocab_size or 0, self.sequence_length, vocab_size, max_seq_len)

    def prepare_data(self) -> None:
        """Builds the shards of the corpus if they are missing. Several nodes may do so at once."""
        self.prepare_own_text()
        if self.corpus == STDLIB and not (self.directory / INDEX).exists():
            write_python_stdlib(self.directory)

    def prepare_own_text(self) -> None:
        """Builds the shards of a text of the user's, if they are missing."""
        if self.own_text is not None:
            self.own_text.prepare(self.directory)

    def setup(self, stage: str) -> None:
        """Opens the shards.

        Raises:
            ConfigError: the documents are to be kept apart, and the module does not do that.
            DataError: validation runs, and a folder has no split for it.
        """
        module = getattr(self.trainer, "lightning_module", None)
        if self.document_mask and module is not None and not optional(module, "takes_documents"):
            raise ConfigError(
                f"data.document_mask=true: {type(module).__name__} does not keep documents apart: use "
                f'data.document_mask=false, or let it read batch["documents"] and say so with takes_documents = True'
            )
        unvalidated = stage == "fit" and getattr(self.trainer, "limit_val_batches", 0) == 0
        self.train, self.validation_sets = self._train(), self._validation(may_lack=unvalidated)
        self.has_held_out_data = bool(self.validation_sets)
        if stage == "fit" and getattr(self.trainer, "is_global_zero", False):
            for line in self.described():
                print(line, flush=True)

    def described(self) -> list[str]:
        """A line for the user about each text that is trained on."""
        read = [TokenShards(directory, "train") for directory in self.training_directories()]
        return [
            f"reads {shards.directory}: {count(len(shards), 'token')}, vocabulary {shards.vocab_size:,}"
            f"{shards.description and ', of ' + shards.description}"
            for shards in read
        ]

    def training_directories(self) -> list[Path]:
        """The folders whose train split is read."""
        return [self.directory]

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train, shuffle=True)

    @property
    def validation(self) -> Dataset[Any]:
        """The first validation set."""
        return next(iter(self.validation_sets.values()))

    @property
    def validation_names(self) -> list[str]:
        """The names of the validation sets in the order of their loaders; one without a name stands alone."""
        return list(self.validation_sets)

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        loaders = [self._loader(dataset, shuffle=False) for dataset in self.validation_sets.values()]
        return loaders if len(loaders) > 1 else loaders[0]

    def test_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        return self.val_dataloader()

    predict_dataloader = test_dataloader

    def baselines(self) -> dict[str, float]:
        """The losses, in nats per token, that counting reaches on the validation split. The model must be better.

        Where the validation sets are others than that of `directory`, or it has none, there are none.
        """
        if list(self.validation_directories) != [""] or "validation" not in load_index(self.directory)["splits"]:
            return {}
        train, validation = TokenShards(self.directory, "train"), TokenShards(self.directory, "validation")
        losses = unigram_bigram_baselines(train, validation, train.vocab_size)
        word = "byte" if train.vocab_size == 256 else "token"
        return {f"{word} {name}": loss for name, loss in losses.items()}

    def _train(self) -> Dataset[Any]:
        # Not derived from Dataset: shards are also read where torch is not installed
        return cast(Dataset[Any], self._sequences(TokenShards(self.directory, "train")))

    def _validation(self, *, may_lack: bool = False) -> dict[str, Dataset[Any]]:
        found: dict[str, Dataset[Any]] = {}
        for name, directory in self.validation_directories.items():
            if "validation" in load_index(directory)["splits"]:
                shards = TokenShards(directory, "validation")
                found[name] = _dataset(self._sequences(shards), self.max_validation_sequences)
            elif not may_lack:
                raise DataError(
                    f"{directory} has no validation split, as with validation=0: prepare it with a validation= above "
                    f"0, name another folder by 'data.validation={{name: folder}}', or train without validation by "
                    f"max_validation_batches=0"
                )
        return found

    def _sequences(self, shards: TokenShards) -> TokenSequences:
        return (DocumentSequences if self.document_mask else TokenSequences)(shards, self.sequence_length)

    def _loader(self, dataset: Dataset[Any], *, shuffle: bool) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            collate_fn=collate_documents if self.document_mask else None,
            drop_last=False,
            pin_memory=pins_memory(),
            persistent_workers=self.num_workers > 0,
        )


@lru_cache(maxsize=4)
def _tokenizer_of(directory: Path) -> Tokenizer | None:
    found = tokenizer_of(directory)
    is_bytes = found is None and load_index(directory)["vocab_size"] == ByteTokenizer.vocab_size
    return ByteTokenizer() if is_bytes else found


def check_sizes(data: str, tokens: int, sequence_length: int, vocab_size: int, max_seq_len: int) -> None:
    """Raises `ConfigError` if a model of `vocab_size` and `max_seq_len` cannot take the `tokens` of `data`."""
    if tokens > vocab_size:
        raise ConfigError(
            f"{data} holds a vocabulary of {count(tokens, 'token')}, and model.vocab_size={vocab_size}: use at least "
            f"model.vocab_size={tokens}"
        )
    if max_seq_len < 1:
        raise ConfigError(f"model.{max_seq_len=}: must be at least 1")
    if sequence_length > max_seq_len:
        raise ConfigError(
            f"data.{sequence_length=} is longer than model.{max_seq_len=}: use data.sequence_length={max_seq_len} or "
            f"model.max_seq_len={sequence_length}"
        )


def write_python_stdlib(directory: Path) -> None:
    """The interpreter's own *.py files as byte tokens, each ended by a 0; about one file in 20 is validation."""
    root = Path(sysconfig.get_path("stdlib"))
    files: dict[str, list[str]] = {"train": [], "validation": []}
    for name in python_files(root):
        held_out = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 == 0
        files["validation" if held_out else "train"].append(name)
    splits = {split: _file_bytes(root, names) for split, names in files.items()}
    described = f"python_stdlib: *.py below {root}, as bytes"
    write_token_shards(directory, splits, vocab_size=256, description=described, tokenizer=ByteTokenizer())


def python_files(root: Path) -> list[str]:
    """Sorted relative paths of the *.py files below `root`, without tests and installed packages."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_CORPUS]
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in names if name.endswith(".py")]
    return sorted(found)


def _file_bytes(root: Path, names: list[str]) -> Iterator[Tokens]:
    for name in names:
        try:
            content = (root / name).read_bytes()
        except OSError:
            continue  # some distributions have dangling links
        yield np.frombuffer(content + b"\0", dtype=np.uint8)


def check_at_least(sequence_length: int, num_workers: int) -> None:
    """Raises `ConfigError` for a length below 1 or a number of workers below 0."""
    for name, value, least in (("sequence_length", sequence_length, 1), ("num_workers", num_workers, 0)):
        if value < least:
            raise ConfigError(f"data.{name}={value}: must be at least {least}")


def check_names(option: str, named: Mapping[str, Any]) -> None:
    """Refuse names that cannot stand in the name of a metric, such as validation/<name>/loss, or none at all.

    Raises:
        ConfigError: one of them.
    """
    if not isinstance(named, Mapping) or not named:
        raise ConfigError(f"{option}={named}: it names at least one folder, as in {{books: data/books}}")
    for name in named:
        if not re.fullmatch(r"[\w.-]+", str(name)):
            raise ConfigError(f"{option}.{name}: a name has letters, digits, dots, - and _ only, since metrics bear it")


def _dataset(sequences: TokenSequences, limit: int | None) -> Dataset[Any]:
    # With a limit, the sequences come from all parts of the split and not from its first file only.
    stride = 1 if limit is None else max(1, len(sequences) // limit)
    return Subset(sequences, range(0, len(sequences), stride)[:limit])  # type: ignore[arg-type]
