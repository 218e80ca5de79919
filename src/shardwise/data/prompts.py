"""Reads prompts from a file: a line each, or JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

from shardwise.errors import ConfigError


def read_prompts(given: str) -> dict[int, str]:
    """The prompts of a file by the numbers of their lines, from 1. Empty lines hold none.

    Raises:
        ConfigError: the file cannot be read or is empty, or a line holds no prompt.
    """
    path = Path(given).expanduser()
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(f"input={given} cannot be read: {error.strerror}; give another file") from None
    except ValueError as error:
        raise ConfigError(f"input={given} is no UTF-8 text: {error}; convert it") from None
    filled = {number: line for number, line in enumerate(lines, start=1) if line.strip()}
    if not filled:
        raise ConfigError(f"input={given} is empty: it needs one prompt each line")
    if path.suffix != ".jsonl":
        return filled
    return {number: _of_json(line, f"input={given}, line {number}") for number, line in filled.items()}


def check_unicode(prompt: str, where: str) -> None:
    """Raises `ConfigError` for a text that a tokenizer cannot read."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where} is no Unicode at character {error.start} (half a surrogate pair, or a byte that is no UTF-8): "
            f"correct it"
        ) from None


def _of_json(line: str, where: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}; correct the line") from None
    except (LookupError, TypeError):
        prompt = None
    if not isinstance(prompt, str):
        raise ConfigError(f'{where} needs a "prompt" that is text, as in {{"prompt": "Once upon a time"}}')
    return prompt
