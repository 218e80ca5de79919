"""Images on one GPU, in one command: the Trainer's path beside a plain loop, with and without its input, and JPEGs.

    python benchmarks/images_gpu.py                             ResNet-50, ViT-B/16, JPEGs from tar shards
    python benchmarks/images_gpu.py --sections resnet50         one of them; the others stay in the file
    python benchmarks/images_gpu.py --accelerator cpu --tiny    tries it out anywhere

Writes benchmarks/results/images-<gpu>.json after every part, so that a run that is cut short leaves what it has. A part
that fails or takes too long is recorded with its error, and the next one starts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib.abc
import importlib.metadata
import importlib.util
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])

PILLOW = importlib.util.find_spec("PIL") is not None


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Without Pillow the recipe and matplotlib cannot be imported: what does not decode or draw works with these."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        known = name.partition(".")[0] in ("PIL", "matplotlib")
        return importlib.util.spec_from_loader(name, self, is_package=True) if known else None

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(__name__=spec.name, __path__=[])
        module.DecompressionBombError = module.UnidentifiedImageError = OSError  # caught by name
        module.subplots.return_value = (MagicMock(), MagicMock())
        return module

    def exec_module(self, module: Any) -> None:
        pass


if not PILLOW:
    sys.meta_path.insert(0, StandIns())

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from lightning.pytorch import Callback, LightningDataModule  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from shardwise.config.compose import compose  # noqa: E402
from shardwise.data.loaders import TrainLoader  # noqa: E402
from shardwise.distributed.process_group import init_process_group  # noqa: E402
from shardwise.optim.optimizers import parameter_groups  # noqa: E402
from shardwise.parallel.precision import set_matmul_mode  # noqa: E402
from shardwise.plan import Host, Plan, make_plan  # noqa: E402
from shardwise.rank import quiet_lightning  # noqa: E402
from shardwise.run_dir.environment import describe_environment  # noqa: E402
from shardwise.trainer import build_data, build_module, build_trainer  # noqa: E402
from shardwise.weights.initialize import Materializer  # noqa: E402

WAITING = (
    "In steps after the timed ones: the device is synchronised, then the host asks the loader for the next batch; the "
    "time until it has it, in which the device has nothing to do, over the time of these steps. Copying the batch to "
    "the device is not in it."
)
COMMON = [
    "recipe=image_classification", "strategy=ddp", "devices=1", "precision=bf16", "schedule=none", "checkpoint=none",
    "gradient_clip_val=null", "validate_every_n_steps=1000000", "log_every_n_steps=1000000", "module.augment=null",
    "module.mixup_alpha=0.0", "module.label_smoothing=0.0",
]  # fmt: skip
MODELS = {
    "resnet50": ["model=resnet50", "optimizer=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.9",
                 "module.channels_last=true"],
    "vit_b16": ["model=vit_b16", "optimizer=adamw"],
}  # fmt: skip
TINY = {
    "resnet50": ["model.width=8", "model.layers=[1,1,1,1]"],
    "vit_b16": ["model.dim=32", "model.n_layers=2", "model.n_heads=2"],
}
LAST_COMPILATION = 5  # steps by which everything has been compiled; what goes on would take the GPU's time for nothing


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is measured."""

    batch: int = 256
    image: int = 224
    classes: int = 1000
    warm_up: int = 15
    plain_warm_up: int = 10
    timed: int = 40
    rounds: int = 8
    waiting: int = 12
    profiled: int = 3
    workers: int = 8
    jpeg_workers: int = 14
    jpegs: int = 4096
    jpeg_size: tuple[int, int] = (500, 375)
    limit_seconds: int = 200

    def overrides(self, name: str, tiny: bool) -> list[str]:
        return [
            f"micro_batch_size={self.batch}", f"global_batch_size={self.batch}", f"data.num_classes={self.classes}",
            f"data.image_size={self.image}", *MODELS[name], *(TINY[name] if tiny else []),
        ]  # fmt: skip


TINY_SIZE = Size(
    batch=8, image=32, classes=10, warm_up=2, plain_warm_up=1, timed=3, rounds=2, waiting=2, profiled=1, workers=1,
    jpeg_workers=2, jpegs=32, jpeg_size=(60, 45), limit_seconds=240,
)  # fmt: skip


class OutOfTimeError(Exception):
    """A part that ran past its limit."""


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise OutOfTimeError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 30)  # again, should a compiler have swallowed the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_afresh(device: torch.device) -> None:
    """Nothing compiled, no memory reserved, counters at zero."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    return round(torch.cuda.max_memory_reserved(device) / 2**30, 2) if device.type == "cuda" else None


def compiled_graphs() -> dict[str, Any]:
    """How often dynamo captured, and why it stopped: a step in one graph has one frame and no breaks."""
    counters = torch._dynamo.utils.counters
    return {"unique_graphs": counters["stats"].get("unique_graphs", 0), "graph_breaks": dict(counters["graph_break"])}


def profiler(device: torch.device) -> profile:
    return profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])])


def profile_summary(trace: profile, steps: int) -> dict[str, Any]:
    """Per step: host calls that launch, copy or wait, the device's busy time, and what it is spent on."""
    events = trace.events() or []
    on_device = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    watched = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cudaMemcpyAsync",
               "cudaMemsetAsync", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize",
               "aten::item", "aten::_local_scalar_dense", "aten::_to_copy", "aten::copy_")  # fmt: skip
    calls = Counter(e.name for e in events if e.name in watched)
    kinds: Counter[str] = Counter()
    for e in on_device:
        kinds[e.name[:90]] += e.time_range.elapsed_us()
    host: Counter[str] = Counter()
    for e in events:
        if e.device_type == torch.autograd.DeviceType.CPU:
            host[e.name[:90]] += e.self_cpu_time_total
    return {
        "steps": steps,
        "calls_per_step": {name: round(count / steps, 1) for name, count in calls.most_common()},
        "device_busy_ms_per_step": round(sum(kinds.values()) / 1e3 / steps, 3) if on_device else None,
        "device_operations_per_step": round(len(on_device) / steps, 1) if on_device else None,
        "device_ms_per_step": {name: round(us / 1e3 / steps, 3) for name, us in kinds.most_common(12)},
        "host_ms_per_step": {name: round(us / 1e3 / steps, 3) for name, us in host.most_common(12)},
    }


# The plain loop


def materialised(plan: Plan, device: torch.device) -> nn.Module:
    """The recipe's model as the Trainer's path would initialise it."""
    module = build_module(plan)
    Materializer(module, device, plan.seed).place(module)
    model = module.model
    assert isinstance(model, nn.Module)
    return model


def resident_batch(plan: Plan, device: torch.device) -> dict[str, Tensor]:
    data, size = plan.data, plan.data["image_size"]
    generator = torch.Generator().manual_seed(0)
    shape = (plan.micro_batch_size, data["channels"], size, size)
    return {
        "image": torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device),
        "label": torch.randint(0, data["num_classes"], shape[:1], generator=generator).to(device),
        "index": torch.arange(shape[0]).to(device),
    }


def plain_step(
    plan: Plan, device: torch.device, *, compiled: bool, weights_channels_last: bool = False
) -> tuple[Callable[[], Tensor], torch.optim.Optimizer]:
    """What one would write by hand: the same model, a fixed normalised batch on the device, autocast, fused optimizer.

    A step has no input, no norm of the gradients and nothing distributed.
    """
    set_matmul_mode(plan.precision)
    model = materialised(plan, device)
    channels_last = plan.module["channels_last"]
    if weights_channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    arguments = {k: v for k, v in (plan.optimizer or {}).items() if k != "_target_"}
    optimizer_class = torch.optim.SGD if "momentum" in arguments else torch.optim.AdamW
    groups = parameter_groups(model, arguments["weight_decay"])
    optimizer = optimizer_class(groups, fused=True, **arguments)
    batch = resident_batch(plan, device)
    mean, std = (torch.tensor(plan.data[k], device=device)[:, None, None] for k in ("mean", "std"))
    images = ((batch["image"].float() / 255 - mean) / std).contiguous(
        memory_format=torch.channels_last if channels_last else torch.contiguous_format
    )
    labels = batch["label"]
    forward: Callable[[Tensor], Tensor] = torch.compile(model) if compiled else model

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(forward(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step, optimizer


def plain_loop(plan: Plan, device: torch.device, size: Size, **options: bool) -> dict[str, Any]:
    step, optimizer = plain_step(plan, device, **options)
    started = time.perf_counter()
    first = float(step().detach())
    compile_seconds = time.perf_counter() - started
    for _ in range(size.plain_warm_up - 1):
        step()
    wait_for(device)
    started = time.perf_counter()
    for _ in range(size.timed):
        loss = step()
    wait_for(device)
    seconds = time.perf_counter() - started
    result = {
        "images_per_second": size.timed * plan.micro_batch_size / seconds,
        "ms_per_step": seconds / size.timed * 1e3,
        "peak_memory_gib": peak_gib(device),
        "first_step_seconds": compile_seconds,
        "first_loss": first,
        "last_loss": float(loss.detach()),
        "optimizer": f"{type(optimizer).__name__}, fused",
        **compiled_graphs(),
    }
    with profiler(device) as trace:
        for _ in range(size.profiled):
            step()
        wait_for(device)
    return result | {"profile": profile_summary(trace, size.profiled)}


# The Trainer's path


class Resident(Dataset[Any]):
    """One batch that lies on the device already, handed out whole whatever is asked for."""

    def __init__(self, batch: dict[str, Tensor], samples: int) -> None:
        self.batch, self.samples = batch, samples

    def __len__(self) -> int:
        return self.samples

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        return self.batch


class ResidentImages(LightningDataModule):
    """No workers, no collation, no copy to the device: what is left of a step is the Trainer's and the recipe's."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        super().__init__()
        self.dataset, self.batch_size = Resident(resident_batch(plan, device), 65536), plan.micro_batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_size=self.batch_size, shuffle=True, collate_fn=whole)


def whole(batch: Any) -> Any:
    return batch


class Clock(Callback):
    """Synchronises at the first and the last timed step and nowhere between; then come the steps that are observed.

    Steps, in order: warm-up, timed, one to settle, those whose waiting is measured, those profiled, one whose
    synchronising calls are named.
    """

    def __init__(self, device: torch.device, size: Size, warm_up: int) -> None:
        self.device, self.size = device, size
        self.start = warm_up
        self.stop = warm_up + size.timed
        self.wait_from = self.stop + 1
        self.profile_from = self.wait_from + size.waiting
        self.name_from = self.profile_from + size.profiled
        self.steps = self.name_from + 2
        self.graphs: list[int] = []  # compiled by dynamo, after each step
        self.waits: list[float] | None = None  # a list while waiting is measured
        self.result: dict[str, Any] = {}

    def on_train_start(self, *_: Any) -> None:
        self.mark = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        done = batch_idx + 1
        self.graphs.append(compiled_graphs()["unique_graphs"])
        if done == LAST_COMPILATION and self.graphs[-1] > self.graphs[-2] > self.graphs[-3]:
            raise RuntimeError(
                f"every step is compiled anew: {self.graphs} graphs after each of the first {done} steps"
            )
        if done == 1:
            wait_for(self.device)
            self.result["first_step_seconds"] = time.perf_counter() - self.mark
            self.result["first_loss"] = float(outputs["loss"])
        if done == self.start:
            wait_for(self.device)
            self.mark = time.perf_counter()
        elif done == self.stop:
            wait_for(self.device)
            seconds = time.perf_counter() - self.mark
            self.result |= {
                "images_per_second": self.size.timed * self.size.batch / seconds,
                "ms_per_step": seconds / self.size.timed * 1e3,
                "peak_memory_gib": peak_gib(self.device),
                "last_loss": float(outputs["loss"]),
                "optimizer": describe_optimizer(trainer.optimizers[0]),
                **compiled_graphs(),
                "graphs_compiled_in_timed_steps": self.graphs[-1] - self.graphs[self.start - 1],
            }
        if done == self.wait_from:
            wait_for(self.device)
            self.waits, self.mark = [], time.perf_counter()
        if done == self.profile_from:
            wait_for(self.device)
            assert self.waits is not None
            seconds = time.perf_counter() - self.mark
            self.result["waiting"] = {
                "share": sum(self.waits) / seconds,
                "ms_per_step": sum(self.waits) / len(self.waits) * 1e3,
                "step_ms": seconds / self.size.waiting * 1e3,
                "steps": len(self.waits),
            }
            self.waits = None
            self.trace = profiler(self.device)
            self.trace.__enter__()
        if done == self.name_from:
            wait_for(self.device)
            self.trace.__exit__(None, None, None)
            self.result["profile"] = profile_summary(self.trace, self.size.profiled)
            if self.device.type == "cuda":
                self.caught = warnings.catch_warnings(record=True)
                self.said = self.caught.__enter__()
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
        if done == self.name_from + 1 and self.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
            self.caught.__exit__(None, None, None)
            self.result["synchronising_calls_in_a_step"] = dict(
                Counter(f"{short(w.filename)}:{w.lineno}" for w in self.said or [] if "synchroniz" in str(w.message))
            )

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, `TrainLoader` measures how long a batch takes to come, while it is asked to."""
        original = TrainLoader.__iter__
        clock = self

        def timed(loader: TrainLoader) -> Iterator[Any]:
            batches = original(loader)
            while True:
                waits = clock.waits
                if waits is not None:
                    wait_for(clock.device)
                asked = time.perf_counter()
                batch = next(batches, None)
                if waits is not None:
                    waits.append(time.perf_counter() - asked)
                if batch is None:
                    return
                yield batch

        TrainLoader.__iter__ = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            TrainLoader.__iter__ = original  # type: ignore[method-assign]


class Beside(Callback):
    """In one process and in turn, round after round: a stretch of the Trainer's steps, one of each plain loop's.

    A GPU's clock moves by more than the contenders differ by; what is measured a minute apart cannot be compared so
    closely. Each stretch settles for a few steps and ends in a synchronisation.
    """

    SETTLE = 5

    def __init__(self, device: torch.device, size: Size, plain: dict[str, Callable[[], Tensor]]) -> None:
        self.device, self.size, self.plain = device, size, plain
        self.steps = size.warm_up + size.rounds * (self.SETTLE + size.timed)
        self.seconds: dict[str, list[float]] = {name: [] for name in ("trainer", *plain)}

    def on_train_start(self, *_: Any) -> None:
        for step in self.plain.values():
            for _ in range(self.size.plain_warm_up):
                step()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        done = batch_idx + 1 - self.size.warm_up
        if done < 0:
            return
        position = done % (self.SETTLE + self.size.timed)
        if position == 0 and done:
            wait_for(self.device)
            self.seconds["trainer"].append(time.perf_counter() - self.mark)
        if position == 0:
            for name, step in self.plain.items():
                for _ in range(self.SETTLE):
                    step()
                wait_for(self.device)
                mark = time.perf_counter()
                for _ in range(self.size.timed):
                    step()
                wait_for(self.device)
                self.seconds[name].append(time.perf_counter() - mark)
        if position == self.SETTLE:
            wait_for(self.device)
            self.mark = time.perf_counter()

    @property
    def result(self) -> dict[str, Any]:
        """A round's ratio is that of the trainer's stretch to the mean of the plain ones before and after it."""
        images = self.size.timed * self.size.batch
        rates = {name: [images / s for s in seconds] for name, seconds in self.seconds.items()}
        found: dict[str, Any] = {"images_per_second": median(rates["trainer"]), "rounds": rates, "ratios": {}}
        for name in self.plain:
            around = zip(rates["trainer"], pairwise(rates[name]), strict=True)
            found["ratios"][name] = [ours / ((before + after) / 2) for ours, (before, after) in around]
        return found


def short(path: str) -> str:
    """Without the machine's own folders."""
    return str(path).split("site-packages/")[-1].removeprefix(f"{ROOT}/")


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    defaults = optimizer.defaults
    return f"{type(optimizer).__name__}, " + ("fused" if defaults.get("fused") else "foreach where it is the default")


def resolve(words: list[str], accelerator: str, folder: Path, name: str) -> Plan:
    job = compose([*words, f"accelerator={accelerator}", f"runs_dir={folder}", f"name={name}"]).jobs[0]
    plan = make_plan(job.config, Host(cuda_devices=torch.cuda.device_count()))
    Path(plan.run_dir).mkdir(parents=True, exist_ok=True)
    return plan


def through_trainer(plan: Plan, clock: Clock | Beside, *, resident: bool = False) -> dict[str, Any]:
    """`python train.py …` from its Plan on, in this process; `resident` replaces its data."""
    quiet_lightning()
    set_matmul_mode(plan.precision)
    said = io.StringIO()
    try:
        watching = clock.watching() if isinstance(clock, Clock) else contextlib.nullcontext()
        with watching, contextlib.redirect_stdout(said):
            module = build_module(plan)
            data = ResidentImages(plan, clock.device) if resident else build_data(plan)
            trainer = build_trainer(plan, module)
            trainer.callbacks.append(clock)  # type: ignore[attr-defined] # the last: it sees steps that are over
            trainer.fit(module, datamodule=data)
    except BaseException:
        print(said.getvalue(), flush=True)
        raise
    return clock.result


# JPEGs


def make_jpeg(job: tuple[int, int, int]) -> bytes:
    """Noise of several scales, smoothed: compresses about as a photograph does."""
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
    Image.fromarray((pixels + 128).clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def write_shards(folder: Path, size: Size, samples: int) -> dict[str, Any]:
    """`size.jpegs` images in 8 shards; links to them make an epoch long enough to have no end within the run."""
    folder.mkdir()
    jobs = [(seed, *size.jpeg_size) for seed in range(size.jpegs)]
    # Forked, as loader workers are: none of them touches the device.
    with multiprocessing.get_context("fork").Pool(min(16, os.cpu_count() or 1)) as pool:
        images = pool.map(make_jpeg, jobs, chunksize=8)
    shards = 8
    for shard in range(shards):
        with tarfile.open(folder / f"train-00-{shard}.tar", "w") as tar:
            for number in range(shard, len(images), shards):
                for suffix, content in (("jpg", images[number]), ("cls", str(number % size.classes).encode())):
                    member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    copies = -(-samples // size.jpegs)
    for copy in range(1, copies):
        for shard in range(shards):
            (folder / f"train-{copy:02d}-{shard}.tar").symlink_to(f"train-00-{shard}.tar")
    (folder / "validation-00.tar").symlink_to("train-00-0.tar")
    return {
        "images": len(images),
        "epoch": copies * len(images),
        "width_height": list(size.jpeg_size),
        "quality": 90,
        "mean_bytes": round(sum(map(len, images)) / len(images)),
        "read_from": "the page cache: written just before",
    }


def decoding_alone(plan: Plan, size: Size, fill: int) -> dict[str, Any]:
    """The recipe's own loader, iterated by nobody but this."""
    data = build_data(plan)
    data.setup("fit")
    batches = iter(data.train_dataloader())
    for _ in range(fill):
        next(batches)
    started = time.perf_counter()
    for _ in range(size.timed):
        next(batches)
    seconds = time.perf_counter() - started
    return {"images_per_second": size.timed * size.batch / seconds, "workers": plan.data["num_workers"]}


class Report:
    """The result file, written after every part."""

    def __init__(
        self, path: Path, head: dict[str, Any], limit_seconds: int, device: torch.device, commit: str | None, only: str
    ) -> None:
        self.path, self.limit_seconds, self.device, self.commit, self.only = path, limit_seconds, device, commit, only
        self.content = head
        with contextlib.suppress(OSError, ValueError, KeyError):
            earlier = json.loads(path.read_text())
            if all(earlier[key] == head[key] for key in ("environment", "size", "tiny")):
                self.content = head | {"sections": earlier["sections"]}

    def begin(self, section: str) -> dict[str, Any]:
        return self.content["sections"].setdefault(section, {})

    def part(self, section: str, name: str, measure: Callable[[], dict[str, Any]], **said: Any) -> dict[str, Any]:
        """Measures `name`, come what may."""
        if not re.search(self.only, name):
            return self.begin(section).get(name, {})  # type: ignore[no-any-return]
        start_afresh(self.device)
        started = time.perf_counter()
        try:
            with at_most(self.limit_seconds):
                row = {"ok": True, **said, **measure()}
        except Exception as error:
            traceback.print_exc()
            text = "".join(traceback.format_exception(error))
            row = {"ok": False, **said, "error": f"{type(error).__name__}: {error}"[:500], "traceback": text[-4000:]}
            error.__traceback__ = None  # its frames hold tensors
        row["commit"] = self.commit
        row["seconds"] = round(time.perf_counter() - started, 1)
        self.begin(section)[name] = row
        self.write()
        if not row["ok"]:
            words = f"FAILED, {row['error']}"
        elif "images_per_second" in row:
            words = f"{row['images_per_second']:,.0f} images/s"
            words += f", {row['ratio_to_plain']:.1%} of the plain loop" if row.get("ratio_to_plain") else ""
            words += f", {row['peak_memory_gib']} GiB" if row.get("peak_memory_gib") else ""
            words += f", waiting {row['waiting']['share']:.1%}" if row.get("waiting") else ""
        else:
            words = "done"
        print(f"{section:9} {name}: {words}  ({row['seconds']} s)", flush=True)
        return row

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")


def training_section(report: Report, name: str, size: Size, arguments: argparse.Namespace, folder: Path) -> None:
    device = report.device
    base = [*COMMON, "data=synthetic_images", *size.overrides(name, arguments.tiny), f"data.num_workers={size.workers}"]
    enough = Clock(device, size, size.warm_up).steps

    def plan_of(compiled: str, run: str, steps: int = enough, *more: str) -> tuple[Plan, dict[str, Any]]:
        words = [*base, f"compile={compiled}", f"max_steps={steps}", *more]
        plan = resolve(words, arguments.accelerator, folder, run)
        record = dataclasses.asdict(plan) | {"run_dir": f"runs/{run}"}
        return plan, {"command": f"python train.py {' '.join(words)}", "plan": record}

    def plain(what: str, **options: Any) -> dict[str, Any]:
        plan, _ = plan_of("none", "plain")
        return report.part(name, f"plain, {what}", lambda: plain_loop(plan, device, size, **options))

    reference = plain("compiled", compiled=True).get("images_per_second")
    if "module.channels_last=true" in MODELS[name]:
        plain("compiled, weights channels_last too", compiled=True, weights_channels_last=True)
    plain("eager", compiled=False)
    variants: dict[str, dict[str, bool]] = {"plain, compiled": {}}
    if "module.channels_last=true" in MODELS[name]:
        variants["plain, compiled, weights channels_last too"] = {"weights_channels_last": True}

    def beside() -> dict[str, Any]:
        hand_made, _ = plan_of("none", "plain")
        steps = {who: plain_step(hand_made, device, compiled=True, **said)[0] for who, said in variants.items()}
        clock = Beside(device, size, steps)
        plan, record = plan_of("model", f"{name}-beside", clock.steps, f"data.samples={clock.steps * size.batch}")
        result = through_trainer(plan, clock)
        ratios = {who: median(ratios) for who, ratios in result["ratios"].items()}
        return record | result | {"ratio_to_plain": ratios["plain, compiled"], "median_ratios": ratios}

    report.part(name, "in turn with plain loops, compile=model", beside,
                input=f"uint8 from memory, {size.workers} workers, pinned")  # fmt: skip

    for compiled, resident in (("model", False), ("model", True), ("layer", False), ("none", False), ("none", True)):
        label = f"trainer, compile={compiled}" + (", batch on the device" if resident else "")
        run = re.sub(r"[^a-z0-9]+", "-", f"{name}-{label}")

        def measure(compiled: str = compiled, resident: bool = resident, run: str = run) -> dict[str, Any]:
            plan, record = plan_of(compiled, run)
            result = through_trainer(plan, Clock(device, size, size.warm_up), resident=resident)
            return record | result | {"ratio_to_plain": result["images_per_second"] / reference if reference else None}

        input_path = "one batch on the device" if resident else f"uint8 from memory, {size.workers} workers, pinned"
        report.part(name, label, measure, input=input_path)


def jpeg_section(report: Report, size: Size, arguments: argparse.Namespace, folder: Path) -> None:
    if not PILLOW:
        print("jpeg      skipped: Pillow is not installed", flush=True)
        report.begin("jpeg")["skipped"] = "Pillow is not installed"
        report.write()
        return
    device, shards = report.device, folder / "shards"
    queue = 2 * size.jpeg_workers + 4  # batches that were decoded before the first step ended, and then some
    clock = Clock(device, size, max(size.warm_up, queue))
    words = [*COMMON, "data=webdataset", *size.overrides("resnet50", arguments.tiny), "compile=model",
             f"data.num_workers={size.jpeg_workers}", f"max_steps={clock.steps}"]  # fmt: skip
    samples = (clock.steps + queue) * size.batch
    made = report.part("jpeg", "shards", lambda: write_shards(shards, size, samples))
    if not made["ok"]:
        return

    def plan_of(run: str) -> Plan:
        return resolve([*words, f"data.directory={shards}"], arguments.accelerator, folder, run)

    report.part("jpeg", "decoding alone", lambda: decoding_alone(plan_of("decoding"), size, queue))

    def measure() -> dict[str, Any]:
        plan = plan_of("jpeg")
        record = dataclasses.asdict(plan) | {"run_dir": "runs/jpeg", "data": plan.data | {"directory": "shards"}}
        said = {"command": f"python train.py {' '.join(words)} data.directory=shards", "plan": record}
        result = through_trainer(plan, clock)
        rows = report.content["sections"]["resnet50"] if "resnet50" in arguments.sections else {}  # of this run
        plain = rows.get("plain, compiled", {}).get("images_per_second")
        ratio = result["images_per_second"] / plain if plain else None
        return said | result | {"ratio_to_plain": ratio, "warm_up_steps": clock.start}

    input_path = f"JPEGs in tar shards, {size.jpeg_workers} workers, pinned"
    report.part("jpeg", "trainer, compile=model", measure, input=input_path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for trying it out on a CPU")
    parser.add_argument("--sections", default="resnet50,vit_b16,jpeg")
    parser.add_argument(
        "--only", default="", help="a regular expression: parts to measure; the others stay in the file"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--commit", help="of this code, where it was copied without its history")
    arguments = parser.parse_args()
    size = TINY_SIZE if arguments.tiny else Size()
    if not arguments.tiny:
        size = dataclasses.replace(size, jpeg_workers=max(1, min(size.jpeg_workers, (os.cpu_count() or 2) - 2)))
    environment = describe_environment()
    gpu = environment["gpus"][0] if arguments.accelerator == "cuda" else "cpu"
    del environment["hostname"]
    commit = arguments.commit or environment.pop("commit")
    environment.pop("commit", None)
    environment["packages"]["pillow"] = importlib.metadata.version("pillow") if PILLOW else None
    environment |= {"cpus": os.cpu_count(), "shared_memory_gib": shared_memory_gib()}
    device = torch.device("cuda", 0) if arguments.accelerator == "cuda" else torch.device("cpu")
    command = ["python benchmarks/images_gpu.py"]
    command += [f"--accelerator {arguments.accelerator}"] * (arguments.accelerator != "cuda")
    head = {
        "command": " ".join(command + ["--tiny"] * arguments.tiny),
        "environment": environment,
        "tiny": arguments.tiny,
        "size": json.loads(json.dumps(dataclasses.asdict(size))),
        "definitions": {
            "images_per_second": "timed steps times micro-batch over the seconds between two synchronisations",
            "ratio_to_plain": "images_per_second over that of 'plain, compiled' of the same model",
            "peak_memory_gib": "torch.cuda.max_memory_reserved up to the end of the timed steps",
            "waiting": WAITING,
        },
        "sections": {},
    }
    file = re.sub(r"[^a-z0-9]+", "-", gpu.lower())
    report = Report(arguments.out / f"images-{file}.json", head, size.limit_seconds, device, commit, arguments.only)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = resolve([*COMMON, "data=synthetic_images", *size.overrides("vit_b16", True), "max_steps=1"],
                       arguments.accelerator, folder, "group")  # fmt: skip
        init_process_group(plan)
        try:
            for section in arguments.sections.split(","):
                if not arguments.only:
                    report.content["sections"][section] = {}
                if section == "jpeg":
                    jpeg_section(report, size, arguments, folder)
                else:
                    training_section(report, section, size, arguments, folder)
        finally:
            torch.distributed.destroy_process_group()
    print(f"written: {report.path}", flush=True)


def shared_memory_gib() -> float | None:
    """What loader workers can hand over at a time."""
    try:
        return round(shutil.disk_usage("/dev/shm").total / 2**30, 1)
    except OSError:
        return None


if __name__ == "__main__":
    main()
