"""Images on one GPU, in one command: the Trainer compared with a plain loop, with and without its input, and JPEGs.

    python benchmarks/images_gpu.py                             ResNet-50, ViT-B/16, ViT-L/16, JPEGs from tar shards
    python benchmarks/images_gpu.py --sections resnet50         one of them; the others stay in the file
    make bench-images                                           what docs/performance.md shows
    python benchmarks/images_gpu.py --accelerator cpu --tiny    tries it out anywhere

Writes benchmarks/results/images-<gpu>.json after every part, so that a run that is cut short leaves what it has. A part
that fails or takes too long is recorded with its error, and the next one starts; what was recorded before stays until
its replacement is measured. --missing goes on with a run that was cut short.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import re
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.absent import PILLOW  # noqa: E402
from benchmarks.harness.clock import TurnsClock  # noqa: E402
from benchmarks.harness.device import device_of, shared_memory_gib  # noqa: E402
from benchmarks.harness.gpus import GpuWatch, describe_gpus  # noqa: E402
from benchmarks.harness.jpegs import decoding_alone, write_shards  # noqa: E402
from benchmarks.harness.observed import ObservedSteps, observe_plain, start_afresh, through_trainer  # noqa: E402
from benchmarks.harness.plain_loops import image_step  # noqa: E402
from benchmarks.harness.trainers import resolve  # noqa: E402
from shardwise.distributed.mesh import init_process_group  # noqa: E402
from shardwise.plan import Plan  # noqa: E402
from shardwise.process.signals import end_workers  # noqa: E402

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
    "vit_l16": ["model=vit_b16", "model.dim=1024", "model.n_layers=24", "model.n_heads=16", "optimizer=adamw"],
}  # fmt: skip
HALF_A_BATCH = ("vit_l16",)
TINY_VIT = ["model.dim=32", "model.n_layers=2", "model.n_heads=2"]
TINY = {"resnet50": ["model.width=8", "model.layers=[1,1,1,1]"], "vit_b16": TINY_VIT, "vit_l16": TINY_VIT}


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
    limit_seconds: int = 420  # most of it compiles, on a host that is slow

    def clock(self, device: torch.device, warm_up: int) -> ObservedSteps:
        return ObservedSteps(device, samples=self.batch, warm_up=warm_up, timed=self.timed, waiting=self.waiting,
                             profiled=self.profiled)  # fmt: skip

    def overrides(self, name: str, tiny: bool) -> list[str]:
        return [
            f"micro_batch_size={self.batch}", f"global_batch_size={self.batch}", f"data.num_classes={self.classes}",
            f"data.image_size={self.image}", *MODELS[name], *(TINY[name] if tiny else []),
        ]  # fmt: skip


TINY_SIZE = Size(
    batch=8, image=32, classes=10, warm_up=2, plain_warm_up=1, timed=3, rounds=2, waiting=2, profiled=1, workers=1,
    jpeg_workers=2, jpegs=32, jpeg_size=(60, 45), limit_seconds=240,
)  # fmt: skip


class Training:
    """The parts of one model: plain loops, the Trainer in turn with them, and the Trainer by itself."""

    def __init__(
        self, parts: results.Parts, name: str, size: Size, arguments: argparse.Namespace, folder: Path
    ) -> None:
        if name in HALF_A_BATCH:
            size = dataclasses.replace(size, batch=size.batch // 2)
        self.parts, self.name, self.size, self.folder = parts, name, size, folder
        self.accelerator, self.device = arguments.accelerator, device_of(arguments.accelerator)
        own = size.overrides(name, arguments.tiny)
        self.base = [*COMMON, "data=synthetic_images", *own, f"data.num_workers={size.workers}"]
        self.input = f"uint8 from memory, {size.workers} workers, pinned"

    def measure(self) -> None:
        channels_last = "module.channels_last=true" in MODELS[self.name]
        reference = self.plain("compiled", compiled=True).get("images_per_second")
        variants: dict[str, dict[str, bool]] = {"plain, compiled": {}}
        if channels_last:
            self.plain("compiled, weights channels_last too", compiled=True, weights_channels_last=True)
            variants["plain, compiled, weights channels_last too"] = {"weights_channels_last": True}
        self.plain("eager", compiled=False)
        variants["plain, compiled, its own loader"] = {"loaded": True, "weights_channels_last": channels_last}
        for more in ([], ["compile.cudagraphs=true"]):
            what = " ".join(["in turn with plain loops, compile=model", *more])
            self.parts.part(self.name, what, partial(self.in_turn, variants, more), input=self.input)
        for compiled in ("model", "layer", "none"):
            for resident in (False, True) if compiled != "layer" else (False,):
                self.trainer(compiled, resident, reference)

    def plan_of(self, compiled: str, run: str, steps: int | None = None, *more: str) -> tuple[Plan, dict[str, Any]]:
        """The Plan, and what the result records of it. `steps`: as many as are observed."""
        steps = steps or self.size.clock(self.device, self.size.warm_up).steps
        words = [*self.base, f"compile={compiled}", f"max_steps={steps}", *more]
        plan = resolve(words, self.accelerator, self.folder, run)
        record = dataclasses.asdict(plan) | {"run_dir": f"runs/{run}"}
        return plan, {"command": f"python train.py {' '.join(words)}", "plan": record}

    def plain(self, what: str, **options: Any) -> dict[str, Any]:
        plan, _ = self.plan_of("none", "plain")
        size = self.size

        def measure() -> dict[str, Any]:
            step, optimizer = image_step(plan, self.device, **options)
            found = observe_plain(
                step, self.device, samples=plan.micro_batch_size, warm_up=size.plain_warm_up, timed=size.timed,
                profiled=size.profiled,
            )  # fmt: skip
            return found | {"optimizer": f"{type(optimizer).__name__}, fused"}

        return self.parts.part(self.name, f"plain, {what}", measure)

    def in_turn(self, variants: dict[str, dict[str, bool]], more: list[str]) -> dict[str, Any]:
        size = self.size
        by_hand, _ = self.plan_of("none", "plain", 1, "data.samples=1000000")
        steps = {who: image_step(by_hand, self.device, compiled=True, **said)[0] for who, said in variants.items()}
        watch = GpuWatch(self.accelerator, 1)
        clock = TurnsClock(
            self.device, steps, watch, samples=size.batch, warm_up=size.warm_up, plain_warm_up=size.plain_warm_up,
            timed=size.timed, rounds=size.rounds,
        )  # fmt: skip
        samples = f"data.samples={clock.steps * size.batch}"
        plan, record = self.plan_of("model", f"{self.name}-beside", clock.steps, samples, *more)
        try:
            result = through_trainer(plan, clock) | {"machine": describe_gpus(self.accelerator, 1)}
        finally:
            watch.stop()
        ratios = {who: median(ratios) for who, ratios in result["ratios"].items()}
        return record | result | {"ratio_to_plain": ratios["plain, compiled"], "median_ratios": ratios}

    def trainer(self, compiled: str, resident: bool, reference: float | None) -> None:
        label = f"trainer, compile={compiled}" + (", batch on the device" if resident else "")
        run = re.sub(r"[^a-z0-9]+", "-", f"{self.name}-{label}")

        def measure() -> dict[str, Any]:
            plan, record = self.plan_of(compiled, run)
            result = through_trainer(plan, self.size.clock(self.device, self.size.warm_up), resident=resident)
            return record | result | {"ratio_to_plain": ratio(result, reference)}

        self.parts.part(self.name, label, measure, input="one batch on the device" if resident else self.input)


def ratio(result: dict[str, Any], reference: float | None) -> float | None:
    return result["images_per_second"] / reference if reference else None


def measure_jpegs(parts: results.Parts, size: Size, arguments: argparse.Namespace, folder: Path) -> None:
    if not PILLOW:
        parts.skip("jpeg", "Pillow is not installed")
        return
    shards = folder / "shards"
    queue = 2 * size.jpeg_workers + 4  # batches that were decoded before the first step ended, and then some
    clock = size.clock(device_of(arguments.accelerator), max(size.warm_up, queue))
    words = [*COMMON, "data=webdataset", *size.overrides("resnet50", arguments.tiny), "compile=model",
             f"data.num_workers={size.jpeg_workers}", f"max_steps={clock.steps}"]  # fmt: skip
    samples = (clock.steps + queue) * size.batch

    def write() -> dict[str, Any]:
        return write_shards(shards, size.jpegs, size.jpeg_size, size.classes, samples)

    def plan_of(run: str) -> Plan:
        if not shards.exists():  # --only or --missing has left the part out that writes them
            write()
        return resolve([*words, f"data.directory={shards}"], arguments.accelerator, folder, run)

    def measure() -> dict[str, Any]:
        plan = plan_of("jpeg")
        record = dataclasses.asdict(plan) | {"run_dir": "runs/jpeg", "data": plan.data | {"directory": "shards"}}
        said = {"command": f"python train.py {' '.join(words)} data.directory=shards", "plan": record}
        result = through_trainer(plan, clock)
        rows = parts.section("resnet50") if "resnet50" in arguments.sections else {}
        plain = rows.get("plain, compiled", {}).get("images_per_second")
        return said | result | {"ratio_to_plain": ratio(result, plain), "warm_up_steps": clock.start}

    if parts.part("jpeg", "shards", write).get("ok", True):
        parts.part("jpeg", "decoding alone", lambda: decoding_alone(plan_of("decoding"), queue, size.timed))
        input_path = f"JPEGs in tar shards, {size.jpeg_workers} workers, pinned"
        parts.part("jpeg", "trainer, compile=model", measure, input=input_path)


def words_of(row: dict[str, Any]) -> str:
    """What is printed of a part that was measured."""
    if "images_per_second" not in row:
        return "done"
    words = f"{row['images_per_second']:,.0f} images/s"
    words += f", {row['ratio_to_plain']:.1%} of the plain loop" if row.get("ratio_to_plain") else ""
    words += f", {row['peak_memory_gib']} GiB" if row.get("peak_memory_gib") else ""
    return words + (f", waiting {row['waiting']['share']:.1%}" if row.get("waiting") else "")


def head_of(arguments: argparse.Namespace, size: Size, environment: dict[str, Any]) -> dict[str, Any]:
    environment["packages"]["pillow"] = importlib.metadata.version("pillow") if PILLOW else None
    command = ["python benchmarks/images_gpu.py"]
    command += [f"--accelerator {arguments.accelerator}"] * (arguments.accelerator != "cuda")
    return {
        "command": " ".join(command + ["--tiny"] * arguments.tiny),
        "environment": environment | {"cpus": os.cpu_count(), "shared_memory_gib": shared_memory_gib()},
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


def main() -> None:
    parser = results.command_line(__doc__)
    parser.add_argument("--tiny", action="store_true", help="sizes for trying it out on a CPU")
    sections = (*MODELS, "jpeg")
    parser.add_argument("--sections", type=results.names(sections), default=",".join(sections))
    parser.add_argument("--only", default="", help="a regular expression: parts to measure; the others stay")
    parser.add_argument("--missing", action="store_true", help="only parts that this commit has not measured yet")
    arguments = parser.parse_args()
    results.end_on_signals()
    size = TINY_SIZE if arguments.tiny else Size()
    if not arguments.tiny:
        size = dataclasses.replace(size, jpeg_workers=max(1, min(size.jpeg_workers, (os.cpu_count() or 2) - 2)))
    environment, name = results.measured_on(arguments.accelerator, arguments.commit)
    commit, device = environment.pop("commit"), device_of(arguments.accelerator)
    parts = results.Parts(
        arguments.out / f"images-{name}.json", head_of(arguments, size, environment), words=words_of,
        limit_seconds=size.limit_seconds, commit=commit, only=arguments.only, prepare=lambda: start_afresh(device),
        missing=arguments.missing and not environment["uncommitted_changes"],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        plan = resolve([*COMMON, "data=synthetic_images", *size.overrides("vit_b16", True), "max_steps=1"],
                       arguments.accelerator, folder, "group")  # fmt: skip
        init_process_group(plan)
        try:
            for section in arguments.sections:
                if section == "jpeg":
                    measure_jpegs(parts, size, arguments, folder)
                else:
                    Training(parts, section, size, arguments, folder).measure()
        finally:
            torch.distributed.destroy_process_group()
            end_workers()
    parts.end()


if __name__ == "__main__":
    main()
