"""Exports a checkpoint's weights to files that other programs read: `shardwise export RUN format=…`.

It needs no GPU and no process group, and holds one tensor in memory at a time, whatever strategy wrote the checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
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
from shardwise.run_dir.checkpoints import damage, list_checkpoints, newest_whole
from shardwise.run_dir.files import CHECKPOINTS, MANIFEST, PLAN, partial_path
from shardwise.tools import read_words
from shardwise.weights.safetensors import DTYPES, Entry, write_weights

HELP = """\
usage: shardwise export RUN format=safetensors|hf|torch [key=value …]

RUN: a run's folder, runs/<id>, whose newest whole checkpoint is taken, or a checkpoint, step-….ckpt or best-….ckpt.

  format=safetensors        model.safetensors, or shards and their index, by the module's names
  format=hf                 config.json and safetensors by Hugging Face's names, where the module says them
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


class Weights(Enum):
    model = "model"
    average = "average"


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
    alone, config = read_words(words, ExportConfig)
    if len(alone) != 1:
        raise ConfigError(f"export takes one run or checkpoint, and got {' '.join(alone) or 'none'}; --help shows how")
    if not config.shard_gb > 0:
        raise ConfigError(f"shard_gb={config.shard_gb}: must be above 0")
    checkpoint = find_checkpoint(alone[0])
    run_dir = checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else checkpoint.parent
    # The export is not put into the checkpoint, which is removed when there are newer ones.
    out = run_dir / f"export-{config.format.value}" if config.out is None else Path(config.out).expanduser().absolute()
    _check_free(out)
    _check_bytes(checkpoint)
    export = Export(checkpoint, run_dir, config)
    _publish(out, export.write)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(
        f"{checkpoint.name}: {count(len(export.entries), 'tensor')}, {count(export.parameters, 'value')}, "
        f"{count(size, 'byte')}, in {out}"
    )


def find_checkpoint(given: str) -> Path:
    """A run's newest checkpoint that is whole, or the checkpoint that is named.

    Raises:
        ConfigError: there is neither.
    """
    path = Path(given).expanduser().absolute()
    if not path.exists():
        raise ConfigError(f"{given}: there is no such run or checkpoint; give runs/<id>, or a step-….ckpt in it")
    if (path / MANIFEST).is_file():
        if found := damage(path):
            raise ConfigError(f"{given} is damaged: {found}; give another checkpoint")
        return path
    newest, all_checkpoints = newest_whole(path), list_checkpoints(path)
    if newest is None:
        why = f"neither a {MANIFEST} nor checkpoints"
        if all_checkpoints:
            why = f"{all_checkpoints[-1].name} is damaged: {damage(all_checkpoints[-1])}"
        raise ConfigError(f"{given} holds no whole checkpoint: {why}; give runs/<id>, or a step-….ckpt in it")
    for passed in all_checkpoints[all_checkpoints.index(newest) + 1 :]:
        print(f"{passed.name} is damaged: {damage(passed)}; exporting {newest.name}")
    return newest


def _check_free(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={out} is a file: give another out=, a folder that is new or empty")
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"out={out} is not empty, and nothing is overwritten: give another out=, or remove it")


def _check_bytes(checkpoint: Path) -> None:
    from shardwise.checkpoint.verify import changed

    if found := changed(checkpoint):
        raise ConfigError(f"{checkpoint} is damaged: {found}; give another checkpoint")


def _publish(out: Path, write: Callable[[Path], None]) -> None:
    """Write a folder so that `out` exists when all of it has been written, or not at all."""
    partial = partial_path(out)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            write(partial)
            with suppress(FileNotFoundError):
                out.rmdir()
            os.rename(partial, out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"out={out} cannot be written: {error.strerror}; make room, or give another out=") from None


class Export:
    """A checkpoint's tensors, with the names and dtypes that they get in the exported files."""

    def __init__(self, checkpoint: Path, run_dir: Path, config: ExportConfig) -> None:
        from shardwise.checkpoint.metadata import read_metadata

        self.checkpoint, self.config = checkpoint, config
        self.metadata = read_metadata(checkpoint)
        known: dict[str, Any] = self.metadata.state_dict_metadata
        self.known = {name: metadata for name, metadata in known.items() if name.startswith(("model.", "average."))}
        own = [name.removeprefix("model.") for name in known if name.startswith("model.")]
        if config.weights is Weights.average and not any(name.startswith("average.") for name in known):
            raise ConfigError(
                f"weights=average: {checkpoint} holds no average, the run had no ema_decay; give weights=model"
            )
        self.shapes = {name: tuple(self.known[f"model.{name}"].size) for name in own}
        self.sources = {name: self._source(name) for name in own}
        self.outside, self.settings = {name: name for name in own}, None
        if config.format is Format.hf:
            self.outside, self.settings = self._hugging_face(run_dir)
        self.inside = {theirs: ours for ours, theirs in self.outside.items()}
        self.entries = [self._entry(name) for name in own]
        self.parameters = sum(map(prod, self.shapes.values()))

    def _source(self, name: str) -> str:
        """The checkpoint's name of a tensor; of the model's if there is no average, as for frozen parameters."""
        source = f"{self.config.weights.value}.{name}"
        return source if source in self.known else f"model.{name}"

    def _entry(self, name: str) -> Entry:
        dtype = self.known[self.sources[name]].properties.dtype
        if dtype.is_floating_point and self.config.dtype is not None:
            import torch

            dtype = getattr(torch, self.config.dtype.value)
        word = str(dtype).removeprefix("torch.")
        if word not in DTYPES and self.config.format is not Format.torch:
            raise ConfigError(f"{name} is of {word}, for which safetensors has no word; use format=torch")
        return Entry(self.outside[name], self.shapes[name], word, dtype.itemsize)

    def _hugging_face(self, run_dir: Path) -> tuple[dict[str, str], dict[str, Any]]:
        """The module's Hugging Face names and config.json, which it makes from its part of the Plan."""
        from shardwise.checkpoint.state import unlike

        try:
            node = json.loads((run_dir / PLAN).read_text())["module"]
            target = locate(node["_target_"], "module")
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"format=hf: {run_dir / PLAN} has to say which module it was ({type(error).__name__}); "
                f"use format=safetensors"
            ) from None
        missing = [name for name in ("hugging_face_names", "hugging_face_config") if not hasattr(target, name)]
        if missing:
            raise ConfigError(
                f"format=hf: {node['_target_']} has no {' and no '.join(missing)}: define hugging_face_names(node), "
                f"which gives {{our name: theirs}}, and hugging_face_config(node), config.json, as static methods "
                f"(recipes/README.md), or use format=safetensors"
            )
        names: dict[str, str] = target.hugging_face_names(node)  # type: ignore[attr-defined]
        if difference := unlike(
            dict.fromkeys(names), dict.fromkeys(self.shapes), "hugging_face_names", "the checkpoint"
        ):
            raise ConfigError(f"format=hf: {node['_target_']} names other tensors than were saved: {difference}")
        settings: dict[str, Any] = target.hugging_face_config(node)  # type: ignore[attr-defined]
        return names, settings

    def write(self, folder: Path) -> None:
        if self.settings is not None:
            largest = max(self.entries, key=lambda entry: entry.bytes)
            settings = {**self.settings, "torch_dtype": largest.dtype}
            (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
        from tqdm import tqdm

        with warnings.catch_warnings(), tqdm(total=len(self.entries), unit="tensor", disable=not _shown()) as bar:
            warnings.filterwarnings("ignore", "torch.distributed is disabled")

            def read(entry: Entry) -> Any:
                bar.update()
                return self._read(entry)

            if self.config.format is Format.torch:
                import torch

                torch.save({entry.name: read(entry) for entry in self.entries}, folder / "model.pt")
                return

            def bytes_of(entry: Entry) -> Any:
                import torch

                return read(entry).reshape(-1).view(torch.uint8).numpy()

            write_weights(folder, self.entries, self.config.shard_gb * 1e9, bytes_of)

    def _read(self, entry: Entry) -> Any:
        import torch

        from shardwise.checkpoint.chunks import whole
        from shardwise.checkpoint.dcp import read_tensors

        source = self.sources[self.inside[entry.name]]
        saved = torch.empty(entry.shape, dtype=self.known[source].properties.dtype)
        read_tensors(self.checkpoint, {source: whole(saved)}, None, self.metadata)
        values = saved.to(getattr(torch, entry.dtype))
        if entry.dtype == "float16" and not torch.equal(saved.isfinite(), values.isfinite()):
            raise ConfigError(
                f"dtype=fp16: {entry.name} reaches {saved.abs().max().item():.3g}, and fp16 ends at 65504; use bf16"
            )
        return values


def _shown() -> bool:
    return sys.stderr.isatty()
