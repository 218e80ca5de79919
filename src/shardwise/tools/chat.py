"""Continues what is typed, line by line: `shardwise chat RUN`."""

from __future__ import annotations

from shardwise.tools import generate

HELP = generate.HELP


def run(words: list[str]) -> None:
    generate.run(words, chats=True)
