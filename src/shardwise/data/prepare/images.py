"""Makes tar shards of a folder of images, which train.py reads with data=webdataset."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from shardwise.config.schema import MISSING
from shardwise.data.prepare.image_folder import Image, find_images
from shardwise.data.prepare.image_report import page, summary
from shardwise.data.prepare.options import OnError, check_output
from shardwise.data.prepare.progress import say
from shardwise.data.prepare.report import PAGE, REPORT
from shardwise.data.prepare.work import LONE, SKIPPED, locked
from shardwise.data.prepare.worker import interrupts_held
from shardwise.data.shard_writer import flush
from shardwise.devices import count_cpus
from shardwise.errors import ConfigError, DataError
from shardwise.process.parent import kill_with_parent
from shardwise.run_dir.files import sync, sync_all

CLASSES = "classes.txt"  # line n names class n


@dataclass
class ImagesConfig:
    """The words of `shardwise prepare kind=images`."""

    output: str = MISSING
    kind: str = "images"
    validation: float | None = None
    processes: int | None = None
    shard_bytes: int = 1 << 28
    on_error: OnError = OnError.stop

    def check(self) -> None:
        """Raises `ConfigError` for values that cannot work, whatever the folder is."""
        for name in ("processes", "shard_bytes"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        if self.validation is not None and not 0 < self.validation < 1:
            raise ConfigError(
                f"validation={self.validation:g}: must be above 0 and below 1, the share of images held out"
            )
        check_output(self.output)


@dataclass(frozen=True)
class Shard:
    """One tar file that is to be written. `first`: the number of its first image in the split, which makes the keys."""

    path: str
    first: int
    images: tuple[Image, ...]
    skips: bool


@dataclass(frozen=True)
class Written:
    """What became of a shard."""

    labels: tuple[int, ...]
    size: int  # bytes of the images
    pixels: tuple[int, ...]  # of each image
    flaws: tuple[tuple[str, str], ...]  # (path, what is wrong)


def prepare_images(given: list[str], config: ImagesConfig, *, quiet: bool = False) -> Path:
    """Make tar shards of the folder `given` in `config.output`, which appears whole or not at all.

    The folder holds train/<class>/*.jpg, validation/<class>/… and perhaps test/<class>/…, or <class>/*.jpg alone; then
    a share of the images, chosen by their names, is held out. A class's number is its place among the sorted names.

    Raises:
        ConfigError: an option cannot work, the folder is not as described, or (`on_error=stop`) an image is damaged.
    """
    config.check()
    if len(given) != 1 or not Path(given[0]).expanduser().is_dir():
        raise ConfigError(f"kind=images takes one folder, as input=FOLDER; given: {', '.join(given) or 'none'}")
    source, output = Path(given[0]).expanduser(), Path(config.output).expanduser()
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DataError(f"output={output} is there already and is not empty: remove it, or give another output=")
    classes, splits, others = find_images(source, config.validation)
    with locked(output, waits=False) as folder:
        try:
            _make(config, classes, splits, others, folder / "shards", quiet)
            sync_all(folder / "shards")
            (folder / "shards").rename(output)
            sync(output.parent)
        except OSError as error:
            raise DataError(
                f"{error.filename or folder} cannot be written or read ({error.strerror or error}): make room or grant "
                f"permission, and start again"
            ) from error
    if not quiet:
        say(f"{output} holds the shards and {PAGE}")
    return output


def _make(
    config: ImagesConfig, classes: list[str], splits: dict[str, list[Image]], others: int, folder: Path, quiet: bool
) -> None:
    folder.mkdir(exist_ok=True)
    skips = config.on_error is OnError.skip
    shards = [
        (split, shard) for split, images in splits.items() for shard in _shards(folder, split, images, config, skips)
    ]
    report: dict[str, Any] = {"splits": {}, "skipped": 0, "other_files": others}
    pixels: list[int] = []
    counts = {split: Counter[int]() for split in splits}
    sizes, made = Counter[str](), Counter[str]()
    with (
        _processes(config.processes or count_cpus()) as run,
        (folder / SKIPPED).open("w", errors=LONE) as skipped,
    ):
        results = run(_write_shard, [shard for _, shard in shards])
        for (split, shard), written in zip(shards, _shown(results, len(shards), quiet), strict=True):
            if written.flaws and not skips:
                path, rule = written.flaws[0]
                raise DataError(f"{path} {rule}; mend or remove it, or give on_error=skip to leave such images out")
            for path, rule in written.flaws:
                skipped.write(json.dumps({"path": path, "rule": rule}, ensure_ascii=False) + "\n")
            report["skipped"] += len(written.flaws)
            if not written.labels:  # a tar without a sample would be refused when it is read
                Path(shard.path).unlink()
                continue
            made[split] += 1
            counts[split].update(written.labels)
            sizes[split] += written.size
            pixels += written.pixels
    for split, found in counts.items():
        if empty := [name for label, name in enumerate(classes) if not found[label] and split == "train"]:
            raise DataError(f"class {empty[0]} has no image in {split} that can be decoded: look at its folder")
        if not found:
            raise DataError(f"no image of {split} can be decoded: look at them")
        report["splits"][split] = {
            "images": found.total(),
            "bytes": sizes[split],
            "shards": made[split],
            "classes": {name: found[label] for label, name in enumerate(classes)},
        }
    pixels.sort()
    report["pixels"] = {"least": pixels[0], "median": pixels[len(pixels) // 2], "most": pixels[-1]}
    (folder / CLASSES).write_text("".join(f"{name}\n" for name in classes), errors=LONE)
    (folder / REPORT).write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", errors=LONE)
    (folder / PAGE).write_text("\n".join(page(report, folder)) + "\n", errors=LONE)
    if not quiet:
        say("\n".join(summary(report)))


def _shards(folder: Path, split: str, images: list[Image], config: ImagesConfig, skips: bool) -> Iterator[Shard]:
    """The shards depend on the files' sizes alone: an image that is left out moves no other."""
    first, held, size = 0, list[Image](), 0
    number = 0
    for image in images:
        if held and size + image.size > config.shard_bytes:
            yield Shard(str(folder / f"{split}-{number:05d}.tar"), first, tuple(held), skips)
            first, held, size, number = first + len(held), [], 0, number + 1
        held.append(image)
        size += image.size
    yield Shard(str(folder / f"{split}-{number:05d}.tar"), first, tuple(held), skips)


def _write_shard(shard: Shard) -> Written:
    labels, size, pixels, flaws = [], 0, [], []
    with open(shard.path, "wb") as file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, image in enumerate(shard.images, start=shard.first):
            content = Path(image.path).read_bytes()
            found = _look_at(content)
            if isinstance(found, str):
                flaws.append((image.path, found))
                if not shard.skips:
                    break
                continue
            suffix = os.path.splitext(image.path)[1].lower()
            for ending, data in ((suffix, content), (".cls", str(image.label).encode())):
                member = tarfile.TarInfo(f"{number:08d}{ending}")  # its owner and time are 0, so that it is repeatable
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
            labels.append(image.label)
            pixels.append(found)
            size += len(content)
        tar.close()
        flush(file)
    return Written(tuple(labels), size, tuple(pixels), tuple(flaws))


def _look_at(content: bytes) -> int | str:
    """The number of pixels of an image that can be decoded, or what is wrong with it."""
    from PIL import Image as Pillow
    from PIL import UnidentifiedImageError

    damaged = (OSError, SyntaxError, ValueError, EOFError, ArithmeticError, LookupError, Pillow.DecompressionBombError)
    try:
        with warnings.catch_warnings(), Pillow.open(io.BytesIO(content)) as image:
            warnings.simplefilter("ignore")  # about metadata that is not used
            pixels = image.width * image.height
            if image.mode in ("I", "F"):
                return f"has pixels of mode {image.mode}, whose range is not known"
            # A JPEG is read whole, and scaled down.
            image.draft(image.mode, (max(1, image.width // 8), max(1, image.height // 8)))
            image.load()
            return pixels
    except UnidentifiedImageError:
        return f"({len(content):,} bytes) is not an image that Pillow knows"
    except damaged as error:
        return f"({len(content):,} bytes) cannot be decoded: {' '.join(str(error).split())}"


@contextmanager
def _processes(number: int) -> Iterator[Any]:
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ConfigError("kind=images needs Pillow: pip install pillow") from error
    if number == 1:
        yield map
        return
    executor = ProcessPoolExecutor(number, get_context("spawn"), kill_with_parent)
    try:
        yield lambda *given: _started(executor, *given)
    finally:
        executor.shutdown(cancel_futures=True)


def _started(executor: ProcessPoolExecutor, *given: Any) -> Iterator[Any]:
    with interrupts_held():
        return executor.map(*given)


def _shown(results: Iterator[Written], shards: int, quiet: bool) -> Iterator[Written]:
    if quiet or not sys.stderr.isatty():
        yield from results
        return
    from tqdm import tqdm

    yield from tqdm(results, total=shards, unit="shard", desc="prepare")
