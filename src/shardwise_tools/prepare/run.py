"""Makes token shards of text, one thing after the other: `shardwise prepare input=books/*.jsonl output=data/books`."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from shardwise.data.shard_index import INDEX, TOKENIZER, VERSION, dtype_for, load_index
from shardwise.data.tokenizer import FILE, HuggingFaceTokenizer, Tokenizer, digest
from shardwise.data.tokens import publish, write_index
from shardwise.errors import DataError, count
from shardwise.process.signals import ends_as_at_ctrl_c
from shardwise.run_dir.files import partial_path, put_in_place, read_text
from shardwise_tools import read_words
from shardwise_tools.prepare.documents import Flaw, InputChanged, Part
from shardwise_tools.prepare.inputs import OnError, PrepareConfig, split_words
from shardwise_tools.prepare.job import END, Job, every_nth, save_tokenizer, train_tokenizer
from shardwise_tools.prepare.report import PAGE, REPORT, Progress, magnitude, summary, write_report
from shardwise_tools.prepare.work import (
    INPUTS,
    SKIPPED,
    TRAINED,
    Totals,
    Work,
    begin_or_go_on,
    how_to_go_on,
    locked,
    other_word,
)
from shardwise_tools.prepare.worker import VALIDATION, Pool, Result, Rules, threads_off, worker_pool

PART_BYTES = 1 << 22
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


def prepare(
    given: list[str],
    config: PrepareConfig,
    *,
    part_bytes: int = PART_BYTES,
    waits: bool = False,
    quiet: bool = False,
) -> Path:
    """Make token shards of the inputs `given` in the folder `config.output`, which appears whole or not at all.

    `waits`: for another process that makes the same folder; otherwise it is refused. `quiet`: print nothing.

    Raises:
        ConfigError: an option or an input cannot work, or the folder has other content. What is done is kept, and a
            later call with the same options goes on from there.
    """
    config.check()
    job = Job.make(given, config, part_bytes, quiet)
    output = Path(config.output).expanduser()
    with locked(output, waits) as folder, threads_off(config.count_processes()):
        try:
            if output.exists() and (not output.is_dir() or any(output.iterdir())):
                check_same(job, output)
                job.say(f"{output} is complete already, from these inputs and with these words: nothing to do")
            else:
                _refuse_link(output)
                _make(job, folder, output)
        except OSError as error:
            if error.errno is None:  # raised here, of a file that is not as it was left
                raise DataError(f"{error}: remove {folder}, then start with the same words") from error
            raise DataError(
                f"{error.filename or folder} cannot be written ({error.strerror or error}): make room or grant "
                f"permission, then {how_to_go_on(folder)}"
            ) from error
        except KeyboardInterrupt as stopped:
            stopped.args = (how_to_go_on(folder),)
            raise
        except BrokenProcessPool as error:
            raise DataError(
                f"one of {count(config.count_processes(), 'process')} was killed, perhaps because memory ran out: "
                f"{how_to_go_on(folder)}; give fewer processes="
            ) from error
    return output


def _refuse_link(output: Path) -> None:
    if output.is_symlink():
        raise DataError(
            f"output={output} is a symbolic link to {output.readlink()}, in whose place no folder can be put: remove "
            f"the link, or give output={output.resolve()}"
        )


def _make(job: Job, folder: Path, output: Path) -> None:
    config = job.config
    if config.validation and len(job.files) == 1 and job.has_whole_texts:
        raise DataError(
            f"validation={config.validation} of 1 document leaves no document for validation: {job.files[0].path} is "
            f"one document; give {CUT}, or validation=0"
        )
    identity = {
        "words": job.words() | {"part_bytes": job.part_bytes},
        "tokenizer": None if job.tokenizer is None else digest(job.tokenizer),
        "on_error": config.on_error.value,
    }
    begin_or_go_on(folder, identity, [[file.path, file.size, file.changed] for file in job.files])
    tokenizer = job.tokenizer or _trained(job, folder)
    save_tokenizer(tokenizer, folder / TOKENIZER)
    vocab_size, processes = job.vocab_size(tokenizer), config.count_processes()
    job.say(
        f"{count(len(job.files), 'file')}, {magnitude(job.size, 'B')}; tokenizer {tokenizer.name} with "
        f"{count(tokenizer.vocab_size, 'token')}; {count(processes, 'process')}"
    )
    rules = Rules(str(folder / TOKENIZER), config.field, config.validation, config.on_error is OnError.stop)
    with worker_pool(rules, processes) as pool:
        with Work(folder, vocab_size, config.shard_tokens) as work:
            if work.is_resumed:
                done = count(sum(work.totals.documents.values()), "document")
                job.say(f"goes on after {done}, which an earlier start has made")
            _tokenize(job, pool, work)
            splits = work.finish()
        check_splits(job, folder, work.totals)
        bare = pool.measure()
    write_results(job, work, splits, tokenizer, bare)
    publish(work.shards, output)
    if work.shards.exists():
        raise DataError(f"{output} has been made by another process: remove it, or give another output=")
    for line in summary(json.loads((output / REPORT).read_text(encoding="utf-8"))):
        job.say(line)
    job.say(f"{output} holds the shards and {PAGE}; to train on them:")
    job.say(f"python train.py data=token_shards data.directory={shlex.quote(str(output))}")


def _trained(job: Job, folder: Path) -> Tokenizer:
    """The tokenizer that is trained on the inputs, once."""
    place, wanted = folder / TRAINED, job.config.vocab_size or 0
    if not place.exists():
        chosen = (
            ""
            if job.is_size_given
            else f", which suits {magnitude(job.size, 'B')} of text; vocab_size= sets another number"
        )
        job.say(f"trains a tokenizer with {count(wanted, 'token')}{chosen}")
        beside = partial_path(place)
        shutil.rmtree(beside, ignore_errors=True)
        save_tokenizer(train_tokenizer(job), beside)
        put_in_place(place)
    found = HuggingFaceTokenizer((place / FILE).read_text(encoding="utf-8"), {"eos_token": END}, "train")
    if found.vocab_size < wanted:
        job.say(f"the tokenizer has {count(found.vocab_size, 'token')}, not {wanted:,}: {FEW_PAIRS}")
    return found


def _tokenize(job: Job, pool: Pool, work: Work) -> None:
    progress = Progress(job.size, work.totals, job.quiet)
    pending: deque[tuple[list[Part], Future[Result]]] = deque()
    waiting = 2 * pool.processes if pool.processes > 1 else 0  # so that every process has something to do
    try:
        for parts in bundles(job.parts(work.position), job.part_bytes):
            pending.append((parts, pool.submit(parts)))
            while len(pending) > waiting:
                _add(job, work, *pending.popleft())
                progress.show(work.totals)
        while pending:
            _add(job, work, *pending.popleft())
            progress.show(work.totals)
    except InputChanged as error:
        raise DataError(
            f"{error} has changed since a part of it was prepared: its shards would hold both versions; put it back as "
            f"it was, or remove {work.folder} to begin anew"
        ) from error
    finally:
        progress.close()


def _add(job: Job, work: Work, parts: list[Part], future: Future[Result]) -> None:
    result = future.result()
    if result.flaws and job.config.on_error is OnError.stop:
        raise DataError(f"{result.flaws[0]} (on_error=skip leaves such out and lists them)")
    work.add(parts, result)


def bundles(parts: Iterator[Part], size: int) -> Iterator[list[Part]]:
    """Parts together that are small, such as text files of a few lines: a process gets about `size` bytes at once."""
    held: list[Part] = []
    length = 0
    for part in parts:
        held.append(part)
        length += max(part.read, len(part.content) if isinstance(part.content, bytes) else 0)
        if length >= size:
            yield held
            held, length = [], 0
    if held:
        yield held


HELP = """\
usage: shardwise prepare INPUT… output=FOLDER [key=value …]

Makes token shards of text, which train.py reads with data=token_shards data.directory=FOLDER.

INPUT, or input=INPUT,…: files, folders and patterns ('books/**/*.jsonl'; quote it where the shell objects).
  .txt and .md hold one document; .jsonl, .json and .ndjson hold a JSON object a line; these also with .gz or .zst
  behind; .parquet has a row a document. Of a folder all such files below it are taken, sorted by name.

  tokenizer=train           a byte-level BPE is trained on the inputs (the default)
  tokenizer=bytes           a token is a byte
  tokenizer=PATH            a tokenizer.json of Hugging Face's, or a folder with one, such as runs/first/tokenizer
  vocab_size=8192           tokens of a trained tokenizer (1,024 to 32,768, by the size of the inputs)
  field=text                the field or column that holds the text; field=title,body joins several
  validation=0.01           share of the documents that is held out, chosen by their text; 0: none
  end_of_document=TEXT      the token that ends a document, where the tokenizer does not name it
  on_error=stop|skip        at what is no document: stop, or leave it out and list it in the report
  processes=N               all CPUs; the shards are the same with any number
  shard_tokens=134217728    the most tokens of a file
  cut_texts=N               a .txt or .md file is cut at empty lines into documents of about N bytes (default: not)
  pad_vocabulary_to=N       the vocabulary that the shards state, at least the tokenizer's

Started again after an interruption, with the same words, it goes on from what is done.
"""


def run(words: list[str]) -> None:
    """Prepare what `words` say.

    Raises:
        ConfigError: a word is wrong, an input cannot be read, or the folder has other content.
    """
    inputs = [word.partition("=")[2] for word in words if word.startswith("input=")]
    with ends_as_at_ctrl_c():
        alone, config = read_words([word for word in words if not word.startswith("input=")], PrepareConfig)
        prepare([part for word in [*inputs, *alone] for part in split_words(word)], config)
