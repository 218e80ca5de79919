"""The order of things in `shardwise prepare`."""

from __future__ import annotations

import json
import shlex
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from shardwise.data.prepare.finish import CUT, FEW_PAIRS, check_same, check_splits, write_results
from shardwise.data.prepare.job import Job
from shardwise.data.prepare.options import OnError, PrepareConfig
from shardwise.data.prepare.parts import InputChanged, Part
from shardwise.data.prepare.progress import Progress, magnitude
from shardwise.data.prepare.report import PAGE, REPORT, summary
from shardwise.data.prepare.training import END, save_tokenizer, train_tokenizer
from shardwise.data.prepare.work import TRAINED, Work, begin_or_go_on, how_to_go_on, locked
from shardwise.data.prepare.worker import Pool, Result, Rules, threads_off, worker_pool
from shardwise.data.shard_index import TOKENIZER
from shardwise.data.shard_writer import publish
from shardwise.data.tokenizer import FILE, HuggingFaceTokenizer, Tokenizer, digest
from shardwise.errors import DataError, count
from shardwise.run_dir.files import partial_path, put_in_place

PART_BYTES = 1 << 22


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
