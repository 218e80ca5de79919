"""Refuses inputs of which no shards can be made, before a tokenizer is trained or a process is started."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from shardwise.data.prepare.documents import documents
from shardwise.data.prepare.job import Job
from shardwise.data.prepare.options import OnError
from shardwise.data.prepare.parts import Flaw, Position
from shardwise.data.prepare.work import SKIPPED
from shardwise.errors import DataError

CUT = "cut_texts=10000 to cut it at empty lines"


def look_first(job: Job, output: Path) -> None:
    """Read the inputs up to their first document.

    Raises:
        DataError: there is none, or something wrong stands before it and on_error=stop, or it alone is to be split.
    """
    for item in _items(job):
        if not isinstance(item, Flaw):
            break
        if job.config.on_error is OnError.stop:
            raise DataError(f"{item} (on_error=skip leaves such out and lists them)")
    else:
        refuse_all_left_out(output, (item for item in _items(job) if isinstance(item, Flaw)))
        others = "" if len(job.files) == 1 else f", and so are the other {len(job.files) - 1:,}"
        raise DataError(f"{job.files[0].path} is empty{others}: there is no document to prepare; check the inputs")
    share = job.config.validation
    if share and len(job.files) == 1 and job.has_whole_texts:
        raise DataError(
            f"validation={share} of 1 document leaves no document for validation: {job.files[0].path} is one document; "
            f"give {CUT}, or validation=0"
        )


def refuse_all_left_out(output: Path, flaws: Iterable[Flaw]) -> None:
    """Raises `DataError` if there are `flaws`, which are all that the inputs hold. They are listed beside `output`."""
    listed = output.with_name(f"{output.name}.{SKIPPED}")
    first, reasons = None, Counter[str]()
    for flaw in flaws:
        with listed.open("ab" if first else "wb") as file:
            file.write(json.dumps(asdict(flaw)).encode() + b"\n")
        first = first or flaw
        reasons[flaw.rule.partition(" (")[0].partition(":")[0].partition(";")[0]] += 1
    if first is not None:
        told = ", ".join(f"{number:,} × {rule}" for rule, number in reasons.most_common(3))
        total = reasons.total()
        left_out = "the only document or file" if total == 1 else f"all {total:,} documents or files"
        raise DataError(
            f"on_error=skip leaves out {left_out} ({told}), and nothing is left to prepare: correct the inputs, "
            f"or name the field by field=…; the first is {first}; all are listed in {listed}"
        )


def _items(job: Job) -> Iterator[Flaw | tuple[str, bytes, int]]:
    for part in job.parts(Position()):
        yield from documents(part, job.config.field) if part.kind else part.flaws
