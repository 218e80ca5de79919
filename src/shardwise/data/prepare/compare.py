"""Compares a folder that is there with what a command would make."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from shardwise.data.prepare.job import Job
from shardwise.data.prepare.options import OnError
from shardwise.data.prepare.work import INPUTS, SKIPPED, other_word
from shardwise.data.shard_index import INDEX, load_index
from shardwise.data.tokenizer import digest
from shardwise.data.tokens import TokenShards, tokenizer_of
from shardwise.errors import ConfigError, DataError, count
from shardwise.run_dir.reading import read_text


def compare(job: Job, output: Path) -> None:
    """Raises `DataError` unless `output` holds what `job` makes."""
    remedy = "remove it, or give another output="
    if not (output / INDEX).is_file():
        raise DataError(f"{output} exists and holds something other than token shards: {remedy}")
    index = load_index(output)
    made_of = index.get("made_of")
    if made_of is None:
        raise DataError(f"{output} holds token shards that were not made by shardwise prepare: {remedy}")
    if other := other_word(made_of["words"], job.words()):
        raise DataError(f"{output} was made with {other}: {remedy}")
    if job.tokenizer is not None and index["tokenizer"]["sha256"] != digest(job.tokenizer):
        raise DataError(f"{output} was made with another tokenizer, {index['tokenizer']['name']}: {remedy}")
    skipped = made_of.get("skipped", 0)
    if skipped and job.config.on_error is OnError.stop:
        raise DataError(
            f"{output} was made with on_error=skip, which left out {count(skipped, 'document')} or file "
            f"(see {SKIPPED}), and now on_error=stop: give on_error=skip to keep it, or {remedy}"
        )
    _check_whole(output, index)
    try:
        rows = [json.loads(line) for line in read_text(output / INPUTS).splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"{output / INPUTS} cannot be read ({error}): {remedy}") from None
    before, now = ([(row["path"], row["size"]) for row in rows], [(file.path, file.size) for file in job.files])
    changed = next((pair[0] for pair in sorted(set(before) ^ set(now))), None)
    for row in rows if changed is None else ():
        with open(row["path"], "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != row["sha256"]:
                changed = row["path"]
                break
    if changed is not None or before != now:
        raise DataError(f"{output} was made from other inputs (see {changed or 'their order'}): {remedy}")


def _check_whole(output: Path, index: dict[str, Any]) -> None:
    """Raises `DataError` if a file is missing or is not what the index says."""
    try:
        for split in index["splits"]:
            TokenShards(output, split).verify()
        tokenizer_of(output)
        if not (output / INPUTS).is_file():
            raise DataError(f"{output / INPUTS}, which lists the inputs, is not there")
    except ConfigError as error:
        raise DataError(f"{output} is damaged: remove it to make it again. {error}") from error
