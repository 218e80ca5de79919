"""A small text of the user's own becomes token shards in passing: data.corpus=/my.txt."""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from shardwise.data.shard_index import INDEX, load_index
from shardwise.data.tokenizer import BYTES, load_tokenizer
from shardwise.errors import ConfigError, DataError

STDLIB = "python_stdlib"  # the only corpus that has a name
MOST_BYTES = 100_000_000  # of the files; more is prepared before, with a progress bar and many processes
VALIDATION = 0.05
VOCABULARY = 8192  # of tokenizer=train


@dataclass(frozen=True)
class OwnText:
    """`corpus`: files, folders or patterns, as `shardwise prepare` takes them. `tokenizer`: bytes, a path, or train."""

    corpus: str
    tokenizer: str | None = None
    vocab_size: int | None = None

    @property
    def directory(self) -> Path:
        """Where its shards are unless data.directory says another place: a folder for each text and tokenizer."""
        from shardwise_tools.prepare.inputs import split_words

        given = [str(Path(word).absolute()) for word in split_words(self.corpus)]
        told = hashlib.sha256("\0".join([*given, str(self.tokenizer), str(self.vocab_size)]).encode())
        name = "".join(letter if letter.isalnum() else "-" for letter in Path(given[0]).name) if given else ""
        return Path("data") / f"{name.strip('-') or 'text'}-{told.hexdigest()[:8]}"

    @property
    def tokens(self) -> int:
        """The size of the vocabulary; of a trained one the size that was asked for, which a short text may not fill."""
        if self.tokenizer == "train":
            return self.vocab_size or VOCABULARY
        return load_tokenizer(self.tokenizer or BYTES).vocab_size

    def prepare(self, directory: Path) -> None:
        """Make the shards, unless they are there already. Several processes may do so at once.

        Raises:
            ConfigError: the text is too large for this, is not there or is damaged, or the folder has other content.
        """
        # Here, so that other texts are trained on without the tools
        from shardwise_tools.prepare.inputs import PrepareConfig, find_inputs, split_words
        from shardwise_tools.prepare.run import prepare

        try:
            files, _ = find_inputs(split_words(self.corpus))
        except ConfigError as error:
            is_word = not any(sign in self.corpus for sign in "/.*")  # perhaps meant as the name of a corpus
            names = f"; or give data.corpus={STDLIB}, the only corpus that has a name" * is_word
            raise ConfigError(f"data.corpus={self.corpus}: {error}{names}") from error
        size = sum(file.size for file in files)
        tokenizer = "bytes" if self.tokenizer is None else self.tokenizer
        vocab_size = self.vocab_size or (VOCABULARY if tokenizer == "train" else None)
        words = f"tokenizer={tokenizer}" + (f" vocab_size={vocab_size}" if vocab_size else "")
        words += " cut_texts=10000" if any(file.kind == "text" for file in files) else ""
        if size > MOST_BYTES:
            raise ConfigError(
                f"data.corpus={self.corpus} has {size:,} bytes, and at most {MOST_BYTES:,} are prepared in passing: "
                f"{self._by_hand(words, directory)}"
            )
        if size == 0:
            raise DataError(f"data.corpus={self.corpus} has 0 bytes: give a file with text in it")
        config = PrepareConfig(
            str(directory),
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            validation=VALIDATION,
            processes=1,
            # A single text would be one document, which cannot be held out in part
            cut_texts=min(10_000, max(500, size // 200)),
        )
        try:
            prepare(split_words(self.corpus), config, waits=True, quiet=True)
        except DataError as error:
            said = str(error)
            if "leaves no document" in said:  # training needs a held-out part, which prepare can leave out
                said = f"{said.partition(': ')[0]}: give more text"
            elif (option := _option_of_prepare(said)) is not None:
                said += f"; data.corpus= has no such option: {self._by_hand(f'{words} {option}', directory)}"
            raise DataError(f"data.corpus={self.corpus}, data.directory={directory}: {said}") from error

    def _by_hand(self, words: str, directory: Path) -> str:
        return (
            f"run `shardwise prepare {shlex.quote(self.corpus)} {words} output={directory}`, then train with "
            f"data=token_shards data.directory={directory}"
        )


def check_directory(corpus: str | None, directory: Path) -> None:
    """Refuse what would read another text than the words name, or a file in the place of a folder.

    Raises:
        ConfigError: with the words that read it.
    """
    if corpus in (None, STDLIB) and directory.is_file():
        raise DataError(
            f"data.directory={directory} is a file, and must be a folder of token shards: run `shardwise prepare "
            f"{directory} tokenizer=bytes output=data/{directory.stem}`, then give data.directory=data/{directory.stem}"
        )
    if corpus == STDLIB and (directory / INDEX).exists():
        source = load_index(directory)["source"]
        if not source.startswith(f"{STDLIB}:"):
            raise ConfigError(
                f"data.directory={directory} holds shards of another text ({source}) than data.corpus={STDLIB}: give "
                f"data=token_shards data.directory={directory} to read them, or leave data.directory out"
            )


def _option_of_prepare(said: str) -> str | None:
    """The option that a message of prepare advises, with its value where the message has only one; None: none."""
    if "field=" in said:
        only = re.search(r"it has ([^,]+): name one by field=", said)
        return f"field={only[1] if only else '…'}"
    return "on_error=skip" if "on_error=skip" in said else None
