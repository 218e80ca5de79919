"""Turns parts into tokens, in several processes or within the one that was started."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.data.shard_index import DTYPES, Tokens, dtype_for
from shardwise.data.tokenizer import ByteTokenizer, load_tokenizer
from shardwise.process.signals import ENDS, kill_with_parent
from shardwise_tools.prepare.documents import Flaw, Part, documents

TRAIN, VALIDATION = SPLITS = ("train", "validation")
_BATCH = 1 << 20  # characters that the tokenizer gets at once: its answer takes many times their memory
_SAMPLE = 1 << 22  # characters that a process keeps, to measure the bare tokenizer
_BLOCKED = {signal.SIGINT, signal.SIGHUP}  # in every process that is started
_THREADS = "TOKENIZERS_PARALLELISM"  # the tokenizers library reads it: the processes are its parallelism here


@dataclass(frozen=True)
class Rules:
    """What decides which tokens a document becomes, and where they go."""

    tokenizer: str  # the folder of its files
    field: str
    validation: float
    stops: bool  # at the first flaw


@dataclass
class Documents:
    """The documents of one split, end to end."""

    tokens: Tokens
    lengths: npt.NDArray[np.int64]  # tokens of each, with the one that ends it
    size: int  # bytes of their text, as UTF-8


@dataclass
class Result:
    """What some parts have become. If the rules stop at flaws and there is one, there is nothing else."""

    splits: dict[str, Documents] = field(default_factory=dict)
    flaws: list[Flaw] = field(default_factory=list)
    smallest: float = 1.0  # the smallest `held_out_number` of a document


def held_out_number(raw: bytes) -> float:
    """A number in [0, 1) from a document's text alone. Below the share, it is held out."""
    return int.from_bytes(hashlib.sha256(raw).digest()[:6], "big") / (1 << 48)


@dataclass
class _Read:
    """The documents of some parts, before they are tokenized."""

    texts: list[str] = field(default_factory=list)
    raws: list[bytes] = field(default_factory=list)
    places: list[tuple[str, int]] = field(default_factory=list)
    flaws: list[tuple[int, Flaw]] = field(default_factory=list)  # each with the number of documents before it


class Worker:
    """Tokenizes parts. What it has read last is kept as a sample."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.tokenizer = load_tokenizer(rules.tokenizer)
        self.dtype = DTYPES[dtype_for(self.tokenizer.vocab_size)]
        self.sample = _Read()

    def tokenize(self, parts: Sequence[Part]) -> Result:
        read = self._read(parts)
        if read.texts:
            self.sample = read
        arrays = [array for batch in _batches(read) for array in self._encode(*batch)]
        end = self.tokenizer.end_of_document
        wrong = {number for number, array in enumerate(arrays) if np.count_nonzero(array == end) > 1}
        rule = f"the text holds {self.tokenizer.decode([end])!r}, the token that ends a document: take it out"
        if not isinstance(self.tokenizer, ByteTokenizer):
            rule += ", or name another token by end_of_document=…"
        flaws = sorted(
            [*read.flaws, *((number, Flaw(*read.places[number], rule)) for number in wrong)], key=lambda found: found[0]
        )
        if flaws and self.rules.stops:
            return Result(flaws=[flaws[0][1]])
        numbers = [held_out_number(raw) for raw in read.raws]
        result = Result(flaws=[flaw for _, flaw in flaws], smallest=min(numbers, default=1.0))
        for split in SPLITS:
            is_wanted = split == VALIDATION
            chosen = [
                n for n in range(len(arrays)) if (numbers[n] < self.rules.validation) == is_wanted and n not in wrong
            ]
            if chosen:
                result.splits[split] = Documents(
                    np.concatenate([arrays[n] for n in chosen]),
                    np.array([len(arrays[n]) for n in chosen]),
                    sum(len(read.raws[n]) for n in chosen),
                )
        return result

    def measure(self) -> tuple[int, float]:
        """How many bytes of the sample the bare tokenizer takes, and in how many seconds."""
        size, seconds = 0, 0.0
        for texts, raws in _batches(self.sample):
            begin = time.perf_counter()
            self.tokenizer.encode(texts)
            seconds += time.perf_counter() - begin
            size += sum(map(len, raws))
            if size >= _SAMPLE:
                break
        return size, seconds

    def _read(self, parts: Sequence[Part]) -> _Read:
        read = _Read()
        for part in parts:
            for item in documents(part, self.rules.field) if part.kind else part.flaws:
                if isinstance(item, Flaw):
                    read.flaws.append((len(read.texts), item))
                    if self.rules.stops:
                        return read
                else:
                    text, raw, line = item
                    read.texts.append(text)
                    read.raws.append(raw)
                    read.places.append((part.path, line))
        return read

    def _encode(self, texts: list[str], raws: list[bytes]) -> list[Tokens]:
        """The tokens of each document, with the one that ends it."""
        end = self.tokenizer.end_of_document
        if isinstance(self.tokenizer, ByteTokenizer):
            return [np.frombuffer(raw + b"\0", np.uint8) for raw in raws]
        return [np.array([*tokens, end], self.dtype) for tokens in self.tokenizer.encode(texts)]


def _batches(read: _Read) -> Iterator[tuple[list[str], list[bytes]]]:
    begin = length = 0
    for number, text in enumerate(read.texts, 1):
        length += len(text)
        if length >= _BATCH or number == len(read.texts):
            yield read.texts[begin:number], read.raws[begin:number]
            begin, length = number, 0


class Pool:
    """Workers, each in a process of its own if there are several."""

    def __init__(self, executor: Executor | None, worker: Worker | None, processes: int) -> None:
        self._executor, self._worker, self.processes = executor, worker, processes

    def submit(self, parts: Sequence[Part]) -> Future[Result]:
        if self._executor is not None:
            with interrupts_held():  # a call may start a process
                return self._executor.submit(_tokenize, parts)
        assert self._worker is not None
        done: Future[Result] = Future()
        done.set_result(self._worker.tokenize(parts))
        return done

    def _submit_measures(self) -> list[Future[tuple[int, float]]]:
        assert self._executor is not None
        with interrupts_held():
            return [self._executor.submit(_measure) for _ in range(self.processes)]

    def measure(self) -> float:
        """Bytes a second of the bare tokenizer, in all processes at once. 0: there is nothing to measure with."""
        if self._executor is None:
            assert self._worker is not None
            measured = [self._worker.measure()]
        else:
            measured = [done.result() for done in self._submit_measures()]
        used = [(size, seconds) for size, seconds in measured if size]
        return sum(size / max(seconds, 1e-9) for size, seconds in used)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C, SIGTERM and SIGHUP back while processes are started. In the main thread.

    The processes inherit that Ctrl-C and SIGHUP are blocked, and so never see one: we end them. Here that is not
    enough: a thread of the tokenizers library may get it, and then Python would interrupt the main thread all the same.
    SIGTERM is not blocked, since a pool that is broken ends its processes by it.
    """
    came: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: came.append(number)) for number in _held()}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _held() -> list[int]:
    """The signals that have a handler of Python's: what is ignored stays so in a process that is started, too."""
    return [number for number in (signal.SIGINT, *ENDS) if callable(signal.getsignal(number))]


@contextmanager
def threads_off(processes: int) -> Iterator[None]:
    """Keep the tokenizers library from using threads, where one process is wanted.

    After it has used them it warns whenever this process is forked, as it is by a DataLoader.
    """
    before = os.environ.get(_THREADS)
    os.environ |= {_THREADS: "false"} if processes == 1 else {}
    try:
        yield
    finally:
        os.environ.pop(_THREADS, None)
        os.environ |= {} if before is None else {_THREADS: before}


@contextmanager
def worker_pool(rules: Rules, processes: int) -> Iterator[Pool]:
    if processes == 1:
        yield Pool(None, Worker(rules), 1)
        return
    # A fork would inherit the threads' locks of whoever calls; a fork server would not end with us.
    context = get_context("spawn")
    with interrupts_held():  # a barrier starts a process that counts what is shared
        start = (rules, os.getpid(), context.Barrier(processes))
        executor = ProcessPoolExecutor(processes, context, _begin, start)
    try:
        yield Pool(executor, None, processes)
    finally:
        executor.shutdown(cancel_futures=True)


_of_this_process: Any = None  # (worker, barrier), in a process of the pool


def _begin(rules: Rules, parent: int, barrier: Any) -> None:
    global _of_this_process
    kill_with_parent()
    if os.getppid() != parent:
        sys.exit("shardwise: the process that reads is gone")
    for number in _BLOCKED:
        signal.signal(number, signal.SIG_IGN)  # the parent gets it too, and ends us
    os.environ[_THREADS] = "false"
    _of_this_process = Worker(rules), barrier


def _tokenize(parts: Sequence[Part]) -> Result:
    result: Result = _of_this_process[0].tokenize(parts)
    return result


def _measure() -> tuple[int, float]:
    worker, barrier = _of_this_process
    barrier.wait(60)  # so that each process measures once, and all of them at the same time
    measured: tuple[int, float] = worker.measure()
    return measured
