"""Exports a checkpoint's weights to files that other programs read: `shardwise export RUN format=…`.

It needs no GPU and no process group, and holds one tensor in memory at a time, whatever strategy wrote the checkpoint.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any

from shardwise.config.schema import MISSING
from shardwise.config.targets import locate
from shardwise.errors import ConfigError, count
from shardwise.run_dir.checkpoints import module_node, named_checkpoint, run_of
from shardwise.run_dir.files import partial_path, put_in_place, sync_all
from shardwise.weights.safetensors import DTYPES, Entry, write_weights
from shardwise_tools import Weights, read_words

HELP = """\
usage: shardwise export RUN format=safetensors|hf|torch [key=value …]

RUN: a run's folder, runs/<id>, whose newest whole checkpoint is taken, or a checkpoint, step-….ckpt or best-….ckpt.

  format=safetensors        model.safetensors, or shards and their index, by the module's names
  format=hf                 config.json and safetensors by Hugging Face's names, where the module says them, and the
                            run's tokenizer, so that from_pretrained gives a model to talk to
  format=torch              model.pt: one state_dict, for torch.load; held in memory whole
  out=PATH                  a folder, new or empty (export-<format> in the run's folder)
  dtype=fp32|bf16|fp16      of floating-point tensors (as they were saved)
  weights=model|average     those that training goes on with, or their moving average (model)
  shard_gb=5                10^9 bytes of one file
"""


class Format(Enum):
    safetensors = "safetensors"
    hf = "hf"
    torch = "torch"


class ExportDtype(Enum):
    fp32 = "float32"
    bf16 = "bfloat16"
    fp16 = "float16"


@dataclass
class ExportConfig:
    format: Format = MISSING
    out: str | None = None
    dtype: ExportDtype | None = None
    weights: Weights = Weights.model
    shard_gb: float = 5.0


def run(words: list[str]) -> None:
    """Export a checkpoint as `words` say.

    Raises:
        ConfigError: a word is wrong, the checkpoint is damaged, the folder is not empty, or a name is unknown.
    """
    from shardwise.checkpoint.files import with_checkpoint

    alone, config = read_words(words, ExportConfig)
    if len(alone) != 1:
        raise ConfigError(f"export takes one run or checkpoint, and got {' '.join(alone) or 'none'}; --help shows how")
    if not config.shard_gb > 0:
        raise ConfigError(f"shard_gb={config.shard_gb}: must be above 0")
    run_dir = run_of(named_checkpoint(alone[0])[0])
    # The export is not put into the checkpoint, which is removed when there are newer ones.
    out = run_dir / f"export-{config.format.value}" if config.out is None else Path(config.out).expanduser().absolute()
    _check_free(out)

    def write(checkpoint: Path, damaged: list[str]) -> Export:
        for line in damaged:
            print(f"{line}; exporting {checkpoint.name}")
        export = Export(checkpoint, config)
        _publish(out, export.write)
        return export

    export = with_checkpoint(alone[0], write)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(
        f"{export.checkpoint.name}: {count(len(export.entries), 'tensor')}, {count(export.parameters, 'value')}, "
        f"{count(size, 'byte')}, in {out}"
    )


def _check_free(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out} is a file: give another out=, a folder that is new or empty")
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"out={out} is not empty, and nothing is overwritten: give another out=, or remove it")


def _publish(out: Path, write: Callable[[Path], None]) -> None:
    """Write a folder so that `out` exists when all of it has been written, or not at all."""
    partial = partial_path(out)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            write(partial)
            sync_all(partial)
            with suppress(FileNotFoundError):
                out.rmdir()
            put_in_place(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written: {error.strerror}; make room, or give another out=") from None


class Export:
    """A checkpoint's tensors, with the names and dtypes that they get in the exported files."""

    def __init__(self, checkpoint: Path, config: ExportConfig) -> None:
        from shardwise.weights.loading import SavedWeights

        self.checkpoint, self.config = checkpoint, config
        self.saved = SavedWeights(checkpoint, average=config.weights is Weights.average)
        own = list(self.saved.shapes)
        self.outside, self.files = {name: name for name in own}, dict[str, str]()
        if config.format is Format.hf:
            self.outside = self._hugging_face()
        self.inside = {theirs: ours for ours, theirs in self.outside.items()}
        self.entries = [self._entry(name) for name in own]
        if config.format is Format.hf:
            self.files = self._files()
        self.parameters = sum(map(prod, self.saved.shapes.values()))

    def _entry(self, name: str) -> Entry:
        dtype = self.saved.dtype(name)
        if dtype.is_floating_point and self.config.dtype is not None:
            import torch

            dtype = getattr(torch, self.config.dtype.value)
        word = str(dtype).removeprefix("torch.")
        if word not in DTYPES and self.config.format is not Format.torch:
            raise ConfigError(f"{name} is of {word}, for which safetensors has no word; use format=torch")
        return Entry(self.outside[name], self.saved.shapes[name], word, dtype.itemsize)

    def _hugging_face(self) -> dict[str, str]:
        """Hugging Face's names of the module's weights, which it makes from its part of the Plan."""
        from shardwise.checkpoint.state import unlike

        node = self.node = module_node(self.checkpoint)
        target = locate(node["_target_"], "module")
        missing = [name for name in ("hugging_face_names", "hugging_face_config") if not hasattr(target, name)]
        if missing:
            raise ConfigError(
                f"format=hf: {node['_target_']} has no {' and no '.join(missing)}: define hugging_face_names(node), "
                f"which gives {{our name: theirs}}, and hugging_face_config(node), config.json, as static methods "
                f"(recipes/README.md), or use format=safetensors"
            )
        names: dict[str, str] = target.hugging_face_names(node)  # type: ignore[attr-defined]
        if difference := unlike(
            dict.fromkeys(names), dict.fromkeys(self.saved.shapes), "hugging_face_names", "the checkpoint"
        ):
            raise ConfigError(f"format=hf: {node['_target_']} names other tensors than were saved: {difference}")
        self.settings: dict[str, Any] = target.hugging_face_config(node)  # type: ignore[attr-defined]
        return names

    def _files(self) -> dict[str, str]:
        """Hugging Face's files besides the weights. With the run's tokenizer one can talk to the model."""
        from shardwise.data.tokenizer import saved_tokenizer

        largest = max(self.entries, key=lambda entry: entry.bytes)
        settings, more = {**self.settings, "torch_dtype": largest.dtype}, {}
        if (tokenizer := saved_tokenizer(self.checkpoint, run_of(self.checkpoint))) is not None:
            end, rows = tokenizer.end_of_document, int(settings.get("vocab_size", 0))
            settings |= {"eos_token_id": end}
            # The rows of a padded vocabulary, which stand for no token
            unused = {"suppress_tokens": list(range(tokenizer.vocab_size, rows))} if rows > tokenizer.vocab_size else {}
            more = {**tokenizer.files(), "generation_config.json": _json({"eos_token_id": end, **unused})}
        return {"config.json": _json(settings), **more}

    def write(self, folder: Path) -> None:
        for name, content in self.files.items():
            (folder / name).write_text(content, encoding="utf-8")
        from tqdm import tqdm

        with tqdm(total=len(self.entries), unit="tensor", disable=not _shown()) as bar:

            def read(entry: Entry) -> Any:
                bar.update()
                return self._read(entry)

            if self.config.format is Format.torch:
                import torch

                from shardwise.checkpoint.dcp import cause_of

                values = {entry.name: read(entry) for entry in self.entries}
                try:
                    with (folder / "model.pt").open("wb") as file:  # of a path, torch's error would not say what failed
                        torch.save(values, file)
                except RuntimeError as error:
                    raise cause_of(error) from error
                return

            def bytes_of(entry: Entry) -> Any:
                import torch

                return read(entry).reshape(-1).view(torch.uint8).numpy()

            write_weights(folder, self.entries, self.config.shard_gb * 1e9, bytes_of)

    def _read(self, entry: Entry) -> Any:
        import torch

        saved = self.saved.read(self.inside[entry.name])
        values = saved.to(getattr(torch, entry.dtype))
        if entry.dtype == "float16" and not torch.equal(saved.isfinite(), values.isfinite()):
            raise ConfigError(
                f"dtype=fp16: {entry.name} reaches {saved.abs().max().item():.3g}, and fp16 ends at 65504; use bf16"
            )
        return values


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def _shown() -> bool:
    return sys.stderr.isatty()
