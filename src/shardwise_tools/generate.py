"""Continues texts with a run's model: `shardwise generate RUN prompt="…"`. It needs one device and no process group."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from shardwise.config.targets import locate
from shardwise.data.tokenizer import BYTES, ByteTokenizer, Tokenizer, load_tokenizer, saved_tokenizer
from shardwise.devices import count_cuda_devices
from shardwise.errors import ConfigError, count
from shardwise.protocols import lacks_to_continue_texts
from shardwise.run_dir.checkpoints import module_node, run_of
from shardwise_tools import Weights, read_words

if TYPE_CHECKING:
    import torch

    from shardwise.nn.generation import Generates, Sampling


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


HELP = """\
usage: shardwise generate RUN prompt="Once upon a time" [key=value …]
       shardwise generate RUN input=prompts.txt [output=texts.jsonl] [key=value …]
       shardwise chat RUN [key=value …]

chat keeps the model loaded, and continues each line that you type, until Ctrl-D.

RUN: a run's folder, runs/<id>, whose newest whole checkpoint is taken, or a checkpoint, step-….ckpt or best-….ckpt.
The text is shown as it is written. It ends at the token that ends a document, or after max_new_tokens.

  prompt=TEXT               what the model continues
  input=FILE                many prompts: a .jsonl file with a "prompt" in each line, or a text file of one each line
  output=FILE               a new file of JSON lines, in the order of the prompts (standard output)
  batch_size=8              prompts of input= that are continued together; each is as it would be alone
  max_new_tokens=200        at most
  temperature=0.8           0 takes the most likely token; above 1 is more varied than the model
  top_k=50                  only from the 50 most likely tokens (all)
  top_p=0.9                 only from the fewest tokens that together have this probability (1)
  seed=0                    of the random numbers; prompt n of input=, counted from 0, has seed + n
  weights=model|average     those that training goes on with, or their moving average (model)
  device=auto|cpu|cuda      (auto: cuda where there is a GPU)
  dtype=fp32|bf16|fp16|fp64 of the weights and of what is computed (as they were saved)
  tokenizer=PATH|bytes      for a checkpoint that does not hold one: a tokenizer.json, or a folder with one

A model sees at most model.max_seq_len tokens. A longer prompt is refused. When prompt and text together are longer,
the model goes on with the later half of what it sees, and forgets the rest.
"""


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(Enum):
    fp32 = "float32"
    bf16 = "bfloat16"
    fp16 = "float16"
    fp64 = "float64"


@dataclass
class GenerateConfig:
    prompt: str | None = None
    input: str | None = None
    output: str | None = None
    batch_size: int = 8
    max_new_tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    weights: Weights = Weights.model
    device: Device = Device.auto
    dtype: Dtype | None = None
    tokenizer: str | None = None


def run(words: list[str], *, chats: bool = False) -> None:
    """Continue texts as `words` say. `chats`: the prompts are the lines of standard input, one after the other.

    Raises:
        ConfigError: a word is wrong, a file cannot be read or written, or the run's module cannot continue texts.
    """
    from shardwise.checkpoint.files import with_checkpoint

    alone, config = read_words(words, GenerateConfig)
    if len(alone) != 1:
        hint = f'give the text to continue as prompt="{alone[1]}"' if len(alone) == 2 else "--help shows how"
        tool = "chat" if chats else "generate"
        raise ConfigError(f"{tool} takes one run or checkpoint, and got {' '.join(alone) or 'none'}; {hint}")
    _check(config, chats)
    numbered: dict[int, str] = {}
    if not chats:
        numbered = {1: config.prompt} if config.prompt is not None else read_prompts(str(config.input))
    prompts = list(numbered.values())
    if (last := config.seed + len(prompts) - 1) >= 2**64:
        raise ConfigError(f"seed={config.seed}: the seeds go up to {last}, and must be below 2^64; give a smaller one")

    def load(checkpoint: Path, damaged: list[str]) -> Writer:
        for line in damaged:
            sys.stderr.write(f"{line}; taking {checkpoint.name}\n")
        node = module_node(checkpoint)
        _check_target(node)
        return Writer(checkpoint, node, config)

    writer = with_checkpoint(alone[0], load)
    if chats:
        _chat(writer)
        return
    tokens = writer.encode(numbered)
    if writer.tokenizer.name != BYTES and any(prompt.endswith(" ") for prompt in prompts):
        sys.stderr.write(
            "a prompt ends in a space, which tokenizers mostly join to the word behind it: the text is better without\n"
        )
    if config.prompt is not None:
        _show(writer, config.prompt, tokens[0])
    else:
        _write_lines(writer, prompts, tokens, config)


def chat(words: list[str]) -> None:
    """Continue the lines of standard input, one after the other."""
    run(words, chats=True)


def _check(config: GenerateConfig, chats: bool) -> None:
    if chats and (config.prompt is not None or config.input is not None):
        raise ConfigError("chat reads prompts line by line: leave prompt= and input= out, or use shardwise generate")
    if not chats and (config.prompt is None) == (config.input is None):
        raise ConfigError('give prompt="…", or input=FILE with one prompt each line, and not both')
    if config.output is not None and config.input is None:
        raise ConfigError(f"output={config.output} is for input=FILE: a single prompt's text is shown as it is written")
    for name in ("batch_size", "max_new_tokens"):
        if (value := getattr(config, name)) < 1:
            raise ConfigError(f"{name}={value}: must be at least 1")
    if config.seed < 0:
        raise ConfigError(f"seed={config.seed}: must be at least 0")
    if config.output is not None:
        path, given = Path(config.output).expanduser(), f"output={config.output}"
        if path.exists():
            raise ConfigError(f"{given} is there already, and nothing is overwritten: give another output=")
        if not path.parent.is_dir():
            raise ConfigError(f"{given}: there is no folder {path.parent}; make it, or give another output=")
    _sampling(config)
    if config.device is Device.cuda and not count_cuda_devices():
        raise ConfigError("device=cuda: this machine shows no GPU; give device=cpu")


def _sampling(config: GenerateConfig) -> Sampling:
    from shardwise.nn.generation import Sampling

    try:
        return Sampling(config.temperature, config.top_k, config.top_p)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_target(node: dict[str, Any]) -> None:
    if missing := lacks_to_continue_texts(locate(node["_target_"], "module")):
        raise ConfigError(
            f"{node['_target_']} cannot continue texts: it has no {', '.join(missing)} (recipes/README.md says what a "
            f"module needs for generate); give a run of a language model"
        )


class Writer:
    """A checkpoint's model and its tokenizer, which continue prompts."""

    def __init__(self, checkpoint: Path, node: dict[str, Any], config: GenerateConfig) -> None:
        import torch

        from shardwise.accelerator import device_named
        from shardwise.weights.loading import SavedWeights, build_saved

        self.device, self.config = device_named(config.device.value), config
        dtype: torch.dtype | None = None if config.dtype is None else getattr(torch, config.dtype.value)
        weights = SavedWeights(checkpoint, average=config.weights is Weights.average)
        self.model: Any = build_saved(node, weights, self.device, dtype)
        self.tokenizer = self._tokenizer(checkpoint)

    def _tokenizer(self, checkpoint: Path) -> Tokenizer:
        given = self.config.tokenizer
        if given is not None:
            return load_tokenizer(given)
        found = saved_tokenizer(checkpoint, run_of(checkpoint))
        if found is None and self.vocab_size == ByteTokenizer.vocab_size:
            return ByteTokenizer()
        if found is None:
            raise ConfigError(
                f"{checkpoint} holds no tokenizer, since its data did not say theirs: give tokenizer=PATH, a "
                f"tokenizer.json or a folder with one, or tokenizer={BYTES}"
            )
        return found

    @property
    def vocab_size(self) -> int:
        """How many tokens the model knows."""
        model: Generates = self.model
        return int(model.vocab_size)

    def encode(self, prompts: dict[int, str]) -> list[list[int]]:
        """The tokens of each prompt. `prompts`: by their lines.

        Raises:
            ConfigError: a prompt is no Unicode, has no tokens, or more than the model sees or knows.
        """

        def name(line: int) -> str:
            return "prompt" if self.config.input is None else f"input={self.config.input}, line {line},"

        for number, prompt in prompts.items():
            check_unicode(prompt, name(number))
        longest, rows = self.model.context_length, self.tokenizer.encode(list(prompts.values()))
        for number, tokens in zip(prompts, rows, strict=True):
            where = name(number)
            if not tokens:
                raise ConfigError(f"{where} has no tokens, and the model continues at least one: give it some text")
            if len(tokens) > longest:
                raise ConfigError(
                    f"{where} has {count(len(tokens), 'token')}, and the model sees at most {longest}: shorten it"
                )
            if max(tokens) >= self.vocab_size:
                raise ConfigError(
                    f"{where} has the token {max(tokens)}, and the model knows {self.vocab_size}: give the tokenizer "
                    f"that it was trained with"
                )
        return rows

    def continue_all(self, prompts: list[list[int]], first_seed: int) -> Iterator[list[int | None]]:
        """Yield the next token of each prompt, or None behind its end, until all have ended."""
        import torch

        from shardwise.nn.generation import continue_texts

        seeds = range(first_seed, first_seed + len(prompts))
        generators = [torch.Generator(self.device).manual_seed(seed) for seed in seeds]
        ended = [False] * len(prompts)
        for drawn in continue_texts(
            self.model, prompts, self.config.max_new_tokens, _sampling(self.config), device=self.device,
            generator=generators, vocab_size=self.tokenizer.vocab_size,
        ):  # fmt: skip
            ended = [was or token == self.tokenizer.end_of_document for was, token in zip(ended, drawn, strict=True)]
            yield [None if is_over else token for is_over, token in zip(ended, drawn, strict=True)]
            if all(ended):
                return


def _chat(writer: Writer) -> None:
    """Continue each line of standard input. A line that cannot be continued gets a message, and the next is read."""
    is_typed = sys.stdin.isatty()
    while True:
        if is_typed:
            sys.stderr.write("> ")
            sys.stderr.flush()
        if not (line := sys.stdin.readline()):
            return
        if prompt := line.rstrip("\n"):
            try:
                [tokens] = writer.encode({1: prompt})
            except ConfigError as error:
                sys.stderr.write(f"{error}\n")
            else:
                _show(writer, prompt, tokens)


def _show(writer: Writer, prompt: str, tokens: list[int]) -> None:
    """Write the prompt and its continuation to the terminal, as it comes."""
    out = sys.stdout
    stream = TextStream(writer.tokenizer, tokens)
    _put(out, prompt)
    try:
        for [token] in writer.continue_all([tokens], writer.config.seed):
            if token is not None:
                _put(out, stream.add(token))
        _put(out, stream.end())
    finally:
        _put(out, "\n")


def _put(out: TextIO, text: str) -> None:
    try:
        out.write(text)
    except UnicodeEncodeError:  # a terminal that is not UTF-8
        out.write(text.encode(out.encoding, "replace").decode(out.encoding))
    out.flush()


def _write_lines(writer: Writer, prompts: list[str], tokens: list[list[int]], config: GenerateConfig) -> None:
    """Write a JSON line for each prompt. What is written when this is stopped stays."""
    path = None if config.output is None else Path(config.output).expanduser()
    written = 0
    try:
        with nullcontext(sys.stdout) if path is None else path.open("x", encoding="utf-8") as file:
            for first in range(0, len(prompts), config.batch_size):
                batch = slice(first, first + config.batch_size)
                for line in _continued(writer, prompts[batch], tokens[batch], config.seed + first):
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
                    written += 1
                file.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        path, name = None, config.output or "standard output"  # how much has reached the disk is not known
        remedy = "make room, or " * (error.errno in (errno.ENOSPC, errno.EDQUOT)) + "give another output="
        raise ConfigError(f"{name} cannot be written: {error.strerror}; {remedy}") from None
    finally:
        if path is not None and path.exists():
            sys.stderr.write(f"{written} of {count(len(prompts), 'prompt')} continued, in {path}\n")


def _continued(writer: Writer, prompts: list[str], tokens: list[list[int]], seed: int) -> Iterator[dict[str, Any]]:
    new: list[list[int]] = [[] for _ in prompts]
    for step in writer.continue_all(tokens, seed):
        for row, token in zip(new, step, strict=True):
            if token is not None:
                row.append(token)
    for prompt, given, row in zip(prompts, tokens, new, strict=True):
        stream = TextStream(writer.tokenizer, given)
        text = "".join(map(stream.add, row)) + stream.end()
        ended = len(row) < writer.config.max_new_tokens
        yield {"prompt": prompt, "text": text, "tokens": len(row), "ended": ended}
