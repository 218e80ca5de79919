"""Trains a tokenizer on the inputs: a byte-level BPE, the same one for the same inputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardwise.data.prepare.documents import documents
from shardwise.data.prepare.inputs import InputFile
from shardwise.data.prepare.job import Job
from shardwise.data.prepare.parts import Flaw, Position
from shardwise.data.prepare.worker import held_out_number
from shardwise.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from shardwise.errors import DataError
from shardwise.run_dir.files import write_whole

END = "<|endoftext|>"
MOST_BYTES = 100_000_000  # of the inputs, evenly spread over them


def train_tokenizer(job: Job) -> Tokenizer:
    """A byte-level BPE like GPT-2's, trained on at most about `MOST_BYTES` of the inputs.

    Where there are more, that is every n-th part of them. Documents that are held out for validation are not used.

    Raises:
        DataError: no document can be read.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=job.config.vocab_size or 0,
        min_frequency=2,
        show_progress=False,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    inner.train_from_iterator(_texts(job), trainer)
    return HuggingFaceTokenizer(inner.to_str(), {"eos_token": END}, "train")


def every_nth(files: list[InputFile]) -> int:
    """Of how many parts one is used."""
    return max(1, -(-sum(file.size for file in files) // MOST_BYTES))


def _texts(job: Job) -> Iterator[str]:
    step, number, config = every_nth(job.files), 0, job.config
    for part in job.parts(Position()):
        if not part.kind:
            continue
        if number % step == 0:
            for item in documents(part, config.field):
                if isinstance(item, Flaw):
                    if config.on_error.value == "stop":
                        raise DataError(f"{item} (on_error=skip leaves such out and lists them)")
                elif held_out_number(item[1]) >= config.validation:
                    yield item[0]
        number += 1


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer.files().items():
        write_whole(folder / name, content)
