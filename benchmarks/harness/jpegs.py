"""JPEGs that are made up, and how fast they are decoded."""

from __future__ import annotations

import io
import multiprocessing
import os
import tarfile
import time
from pathlib import Path
from typing import Any

from shardwise.plan import Plan
from shardwise.trainer import build_data

QUALITY = 90
SHARDS = 8


def make_jpeg(job: tuple[int, int, int]) -> bytes:
    """Noise of several scales, smoothed: compresses about as a photograph does. `job` is seed, width and height."""
    import numpy as np
    from PIL import Image

    seed, width, height = job
    rng = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3), np.float32)
    for scale, strength in ((64, 90.0), (16, 40.0), (4, 18.0), (1, 6.0)):
        noise = rng.normal(size=(height // scale + 2, width // scale + 2, 3)).astype(np.float32)
        noise = (noise * strength + 128).clip(0, 255).astype(np.uint8)
        grown = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
        pixels += np.asarray(grown, np.float32) - 128
    buffer = io.BytesIO()
    Image.fromarray((pixels + 128).clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def write_shards(folder: Path, count: int, size: tuple[int, int], classes: int, samples: int) -> dict[str, Any]:
    """`count` images in 8 shards. Links to them make an epoch of at least `samples`: it does not end within the run."""
    folder.mkdir()
    jobs = [(seed, *size) for seed in range(count)]
    # Forked, as loader workers are: none of them touches the device.
    with multiprocessing.get_context("fork").Pool(min(16, os.cpu_count() or 1)) as pool:
        images = pool.map(make_jpeg, jobs, chunksize=8)
        pool.close()
        pool.join()  # to be terminated, they would have to die of SIGTERM, whose handler they share with a run
    for shard in range(SHARDS):
        with tarfile.open(folder / f"train-00-{shard}.tar", "w") as tar:
            for number in range(shard, len(images), SHARDS):
                for suffix, content in (("jpg", images[number]), ("cls", str(number % classes).encode())):
                    member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    copies = -(-samples // count)
    for copy in range(1, copies):
        for shard in range(SHARDS):
            (folder / f"train-{copy:02d}-{shard}.tar").symlink_to(f"train-00-{shard}.tar")
    (folder / "validation-00.tar").symlink_to("train-00-0.tar")
    return {
        "images": len(images),
        "epoch": copies * len(images),
        "width_height": list(size),
        "quality": QUALITY,
        "mean_bytes": round(sum(map(len, images)) / len(images)),
        "read_from": "the page cache: written just before",
    }


def decoding_alone(plan: Plan, fill: int, timed: int) -> dict[str, Any]:
    """The recipe's own loader, iterated by nobody but this: `timed` batches after `fill` that may have been ready."""
    data = build_data(plan)
    data.setup("fit")
    batches = iter(data.train_dataloader())
    for _ in range(fill):
        next(batches)
    started = time.perf_counter()
    for _ in range(timed):
        next(batches)
    seconds = time.perf_counter() - started
    return {"images_per_second": timed * plan.micro_batch_size / seconds, "workers": plan.data["num_workers"]}
