"""Turns tokens into text as they come, in whole characters."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.data.tokenizer import Tokenizer

_UNKNOWN = "\ufffd"
_CONTEXT = 8  # tokens before a new one, since some tokenizers write a token's space only behind another token


class TextStream:
    """The text that follows `prompt`, in pieces.

    A character's bytes may be divided over several tokens. They are held back until it is whole.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.tokens = list(prompt[-_CONTEXT:])  # the last ones
        self.shown = len(self.tokens)  # how many of these have been shown

    def add(self, token: int) -> str:
        """The text that `token` completes: often its own, "" within a character."""
        self.tokens.append(token)
        text = self._new_text()
        if text.endswith(_UNKNOWN):
            return ""
        self._note_shown()
        return text

    def end(self) -> str:
        """What is left. Bytes that never became a character are U+FFFD."""
        text = self._new_text()
        self._note_shown()
        return text

    def _new_text(self) -> str:
        before = self.tokenizer.decode(self.tokens[: self.shown])
        return self.tokenizer.decode(self.tokens)[len(before) :]

    def _note_shown(self) -> None:
        if len(self.tokens) > 4 * _CONTEXT:  # what is decoded again for each token must not grow with the text
            self.tokens = self.tokens[-_CONTEXT:]
        self.shown = len(self.tokens)
