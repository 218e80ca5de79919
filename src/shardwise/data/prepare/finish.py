"""What is written when all tokens are there: the report and the index. And whether a folder has them already."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from shardwise.data.prepare.job import Job
from shardwise.data.prepare.options import OnError
from shardwise.data.prepare.parts import Flaw
from shardwise.data.prepare.report import write_report
from shardwise.data.prepare.training import every_nth
from shardwise.data.prepare.work import INPUTS, SKIPPED, Totals, Work, other_word
from shardwise.data.prepare.worker import VALIDATION
from shardwise.data.shard_index import INDEX, VERSION, dtype_for, load_index
from shardwise.data.shard_writer import write_index
from shardwise.data.tokenizer import Tokenizer, digest
from shardwise.errors import DataError, count
from shardwise.run_dir.reading import read_text

FEW_PAIRS = "the inputs have no more pairs that stand there twice"
CUT = "cut_texts=10000 to cut it at empty lines"


def check_same(job: Job, output: Path) -> None:
    """Raises `DataError` unless `output` was made by `job`'s words, of inputs of the same names and bytes."""
    remedy = "remove it, or give another output="
    made_of = load_index(output).get("made_of") if (output / INDEX).is_file() else None
    if made_of is None:
        raise DataError(f"{output} exists, and was not made by shardwise prepare: {remedy}")
    if other := other_word(made_of["words"], job.words()):
        raise DataError(f"{output} was made with {other}: {remedy}")
    if job.tokenizer is not None and load_index(output)["tokenizer"]["sha256"] != digest(job.tokenizer):
        raise DataError(f"{output} was made with another tokenizer of this name: {remedy}")
    if made_of.get("skipped") and job.config.on_error is OnError.stop:
        raise DataError(f"{output} was made with on_error=skip, and now on_error=stop: {remedy}")
    rows = [json.loads(line) for line in read_text(output / INPUTS).splitlines()]
    same = [(row["path"], row["size"]) for row in rows] == [(file.path, file.size) for file in job.files]
    for row in rows if same else ():
        with open(row["path"], "rb") as file:
            same = same and hashlib.file_digest(file, "sha256").hexdigest() == row["sha256"]
    if not same:
        raise DataError(f"{output} was made from other inputs, which {output / INPUTS} lists: {remedy}")


def check_splits(job: Job, folder: Path, totals: Totals) -> None:
    """Raises `DataError`, and removes the work, if a split has no document."""
    documents, share = totals.documents, job.config.validation
    total = sum(documents.values())
    empty = [split for split, number in documents.items() if not number and (split != VALIDATION or share)]
    if not empty:
        return
    skipped = folder / "shards" / SKIPPED
    rows = skipped.read_text(encoding="utf-8").splitlines() if not total and totals.skipped else []
    shutil.rmtree(folder)  # a small corpus: the next start makes it again
    if rows:
        raise DataError(
            f"on_error=skip leaves out {count(len(rows), 'document')} or files, and nothing is left to prepare: "
            f"correct the inputs, or name the field by field=…; the first is {Flaw(**json.loads(rows[0]))}"
        )
    cut = f"{CUT}, " if job.has_long_texts else ""
    if total < 2 or not share:
        remedy = f"give {cut}validation=0, or more documents" if total else "check the inputs and field="
    elif empty == [VALIDATION]:
        remedy = f"give {cut}at least validation={_slightly_above(totals.smallest)}, more documents, or validation=0"
    else:
        remedy = "give a smaller validation="
    raise DataError(f"validation={share} of {count(total, 'document')} leaves no document for {empty[0]}: {remedy}")


def write_results(job: Job, work: Work, splits: dict[str, Any], tokenizer: Tokenizer, bare: float) -> None:
    """Write the report and the index into the folder of the shards. `bare`: the tokenizer's own bytes a second."""
    totals, config, vocab_size = work.totals, job.config, job.vocab_size(tokenizer)
    inputs = {
        "files": len(job.files),
        "bytes": job.size,
        "sha256": hashlib.sha256((work.shards / INPUTS).read_bytes()).hexdigest(),
    }
    made_of = {"words": job.words(), "inputs": inputs, "skipped": totals.skipped}
    told = json.dumps([made_of, digest(tokenizer)], sort_keys=True)
    seconds = max(totals.seconds, 1e-6)
    report = {
        "documents": totals.documents,
        "tokens": totals.tokens,
        "text_bytes": totals.bytes,
        "vocab_size": vocab_size,
        "tokenizer": {"name": tokenizer.name, "tokens": tokenizer.vocab_size, "sha256": digest(tokenizer)},
        "options": job.words() | {"tokenizer": config.tokenizer, "on_error": config.on_error.value},
        "inputs": inputs,
        "skipped": totals.skipped,
        "other_endings": {"files": len(job.other_endings), "first": next(iter(job.other_endings), None)},
        "rate": {
            "seconds": round(seconds, 3),
            "processes": config.count_processes(),
            "bytes_per_second": sum(totals.bytes.values()) / seconds,
            "tokens_per_second": sum(totals.tokens.values()) / seconds,
            "bare_tokenizer_bytes_per_second": bare,
        },
        "notes": _notes(job, tokenizer, vocab_size, totals),
    }
    write_report(work.shards, report, splits)
    index = {"version": VERSION, "dtype": dtype_for(vocab_size), "vocab_size": vocab_size}
    described = f"{count(len(job.files), 'file')}, such as {job.files[0].path}"
    index |= {"source": described, "fingerprint": hashlib.sha256(told.encode()).hexdigest(), "made_of": made_of}
    write_index(work.shards, index | {"splits": splits}, tokenizer)


FEW_TOKENS = 10_000  # of the only document of a validation split


def _notes(job: Job, tokenizer: Tokenizer, vocab_size: int, totals: Totals) -> list[str]:
    notes, wanted = [], job.config.vocab_size or 0
    if totals.skipped:
        notes.append(f"{count(totals.skipped, 'document')} or file left out, with the reasons, in skipped.jsonl")
    if totals.documents.get(VALIDATION) == 1 and totals.tokens[VALIDATION] < FEW_TOKENS:
        cut = f" and {CUT}" * job.has_long_texts
        notes.append(
            f"validation is one document of {count(totals.tokens[VALIDATION], 'token')}, whose loss says little of "
            f"others: give a larger validation= (now {job.config.validation}){cut}, or more documents"
        )
    if job.other_endings:
        notes.append(f"{count(len(job.other_endings), 'file')} with other endings left out")
    if tokenizer.vocab_size < wanted:
        notes.append(f"the tokenizer has {count(tokenizer.vocab_size, 'token')}, not {wanted:,}: {FEW_PAIRS}")
    if job.config.is_trained and (step := every_nth(job.files)) > 1:
        notes.append(f"the tokenizer was trained on every {step}. part of the inputs")
    if vocab_size > tokenizer.vocab_size:
        notes.append(
            f"the vocabulary is padded from {tokenizer.vocab_size:,} to {vocab_size:,} tokens, as "
            f"pad_vocabulary_to asks"
        )
    return notes


def _slightly_above(number: float) -> str:
    """A number with two digits that is a little larger."""
    for digits in range(1, 20):
        if (shown := round(number + 0.6 * 10**-digits, digits)) < min(1, 2 * number + 10**-2):
            return f"{shown:g}"
    return f"{number}"
