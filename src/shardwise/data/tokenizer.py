"""Turns text into tokens and back: bytes, or a Hugging Face tokenizer from a local file. Nothing is fetched.

A folder of token shards, a run and an exported model each hold the files of the tokenizer that their tokens come from,
so that none of them has to be told which one it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from shardwise.data.shard_index import TOKENIZER
from shardwise.errors import ConfigError, count
from shardwise.run_dir.checkpoints import run_of
from shardwise.run_dir.files import read_json, read_whole, tokenizer_folder

FILE = "tokenizer.json"  # Hugging Face's name, which from_pretrained looks for
CONFIG = "tokenizer_config.json"
BYTES = "bytes"
_OURS = "shardwise_tokenizer"  # the key of CONFIG by which ours is known again
_INSTALL = "pip install tokenizers"
_END_TOKENS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|im_end|>")  # where no file names one


class Tokenizer(Protocol):
    """What data, training and generation need of a tokenizer."""

    name: str
    """For messages and reports: "bytes", or the path it was loaded from."""

    vocab_size: int
    """Every token is below this number."""

    end_of_document: int
    """The token that ends each document, and at which generation stops."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, without a begin or an end token."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`. What is no text becomes U+FFFD; it never fails."""

    def files(self) -> dict[str, str]:
        """Names and contents of the files from which `load_tokenizer` and Hugging Face's `from_pretrained` make it."""


def digest(tokenizer: Tokenizer) -> str:
    """The SHA-256 of everything that decides which tokens a text becomes."""
    content = f"{tokenizer.files()[FILE]}\0{tokenizer.end_of_document}\0{tokenizer.vocab_size}"
    return hashlib.sha256(content.encode()).hexdigest()


def load_tokenizer(given: str | Path, end_of_document: str | None = None) -> Tokenizer:
    """Load the tokenizer that is named: "bytes", a tokenizer.json, or a folder that holds one.

    `end_of_document`: the text of the token that ends a document, where the files name none or another is meant.

    Raises:
        ConfigError: there is no such file, it is no tokenizer, or no token is known that ends a document.
    """
    if str(given) == BYTES:
        if end_of_document is not None:
            raise ConfigError("tokenizer=bytes ends a document by the byte 0: leave end_of_document out")
        return ByteTokenizer()
    path = Path(given).expanduser()
    path = path / FILE if path.is_dir() else path
    try:
        content = read_whole(path).decode()
    except OSError as error:
        if (inner := path.parent / TOKENIZER / FILE).is_file():
            raise ConfigError(
                f"tokenizer={given}: this folder has its tokenizer in a folder of its own; give "
                f"tokenizer={inner.parent}"
            ) from error
        raise ConfigError(
            f"tokenizer={given}: {path} cannot be read ({error.strerror}); give {BYTES}, a {FILE}, or a folder with one"
        ) from error
    except ValueError as error:
        raise ConfigError(f"tokenizer={given}: {path} is not a Hugging Face tokenizer ({error})") from error
    try:
        config = read_json(path.parent / CONFIG)
    except (OSError, ValueError):
        config = {}
    if config.get(_OURS) == BYTES:
        return ByteTokenizer()
    return HuggingFaceTokenizer(content, config, str(given), end_of_document)


def saved_tokenizer(*folders: Path) -> Tokenizer | None:
    """The tokenizer in the first of `folders`, checkpoints or runs, that holds one; None: none does."""
    found = next((path for path in map(tokenizer_folder, folders) if (path / FILE).is_file()), None)
    return None if found is None else load_tokenizer(found)


def tokenizer_beside(weights: Path) -> Path | None:
    """The tokenizer.json of a checkpoint, an export or another model's weights; None: none lies there."""
    folder = weights if weights.is_dir() else weights.parent
    places = (tokenizer_folder(folder), folder, tokenizer_folder(run_of(folder)))
    return next((path for place in places if (path := place / FILE).is_file()), None)


def same_tokens(one: str, other: str) -> bool:
    """Whether each number is the same text's in both, given the contents of their tokenizer.json."""
    import tokenizers

    first, second = (tokenizers.Tokenizer.from_str(content).get_vocab() for content in (one, other))
    return bool(first == second)


class ByteTokenizer:
    """UTF-8 bytes as tokens. The byte 0, which stands in no text, ends a document."""

    name = BYTES
    vocab_size = 256
    end_of_document = 0

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token if token < 256 else 0xFF for token in tokens).decode(errors="replace")

    def files(self) -> dict[str, str]:
        """As a byte-level BPE without merges, which is how Hugging Face says the same."""
        letters = _byte_letters()
        described: dict[str, Any] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": 0, "content": letters[0], "single_word": False, "lstrip": False, "rstrip": False,
                 "normalized": False, "special": True}
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": {letter: number for number, letter in enumerate(letters)}, "merges": []},
        }  # fmt: skip
        return {FILE: json.dumps(described), CONFIG: _config(letters[0], **{_OURS: BYTES})}


class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library, made from the content of its tokenizer.json."""

    def __init__(self, content: str, config: dict[str, Any], name: str, end_of_document: str | None = None) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ConfigError(f"tokenizer={name} needs the package tokenizers: {_INSTALL}") from error
        try:
            self.inner = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises Exception itself
            raise ConfigError(f"tokenizer={name}: {FILE} is not a Hugging Face tokenizer ({error})") from error
        self.inner.no_truncation()
        self.inner.no_padding()
        self.name, self.content = name, content
        self.vocab_size = 1 + max(self.inner.get_vocab(with_added_tokens=True).values())
        self.end_text = self._end_text(end_of_document, config)
        self.end_of_document = int(self.inner.token_to_id(self.end_text) or 0)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        if len(texts) == 1:  # without threads, after which the library warns when a data worker is forked
            return [self.inner.encode(texts[0], add_special_tokens=False).ids]
        return [found.ids for found in self.inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        known = [token for token in tokens if token < self.vocab_size]
        text: str = self.inner.decode(known, skip_special_tokens=False)
        return text

    def files(self) -> dict[str, str]:
        return {FILE: self.content, CONFIG: self._config_file}

    @cached_property
    def _config_file(self) -> str:
        return _config(self.end_text)

    def _end_text(self, given: str | None, config: dict[str, Any]) -> str:
        named = config.get("eos_token")
        named = named.get("content") if isinstance(named, dict) else named
        candidates = [given] if given is not None else [named, *_END_TOKENS]
        for text in candidates:
            if text is not None and self.inner.token_to_id(text) is not None:
                return text
        if given is not None:
            raise ConfigError(
                f"end_of_document={given}: tokenizer={self.name} has no such token among its "
                f"{count(self.vocab_size, 'token')}; give the text of one, such as {_END_TOKENS[0]}"
            )
        raise ConfigError(
            f"tokenizer={self.name} does not say which token ends a document (eos_token in {CONFIG}): give "
            f"end_of_document=<the token's text>"
        )


def _config(end_text: str, **more: str) -> str:
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return json.dumps({**kind, "eos_token": end_text, **more})


def _byte_letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte: printable ones stand for themselves (GPT-2)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
