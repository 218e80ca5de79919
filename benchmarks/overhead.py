"""What the Trainer itself costs: the same steps in a plain loop, under stock Lightning and here.

    python benchmarks/overhead.py                             1 GPU, and all of this machine
    python benchmarks/overhead.py --accelerator cpu           1 and 2 processes
    python benchmarks/overhead.py --ranks 2 --sections llm    the other sections stay in the file

`host`: a step with hardly any arithmetic. `gpu2ms`: steps of which the GPU needs 2 ms, of few kernels (three wide
layers) and of many (five, bf16 under autocast). `llm`: language models, against a plain loop alone. `sync`: fsdp with
its reductions in every micro-batch and deferred to the window's end. Writes
benchmarks/results/overhead-<device>-x<ranks>.json after every part; each part has processes of its own and a time
limit, and one that fails is recorded with its error. `--tiny` is for trying it out on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from lightning.pytorch import LightningDataModule, LightningModule, Trainer  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, Dataset, DistributedSampler  # noqa: E402

from benchmarks.machine import measured_on  # noqa: E402
from shardwise.config.compose import compose  # noqa: E402
from shardwise.config.targets import build  # noqa: E402
from shardwise.distributed.process_group import init_process_group  # noqa: E402
from shardwise.optim.optimizers import parameter_groups  # noqa: E402
from shardwise.parallel.precision import (  # noqa: E402
    Places,
    compute_in,
    dtype_of,
    mixed_precision_policy,
    owners,
    parameters_as,
    set_matmul_mode,
)
from shardwise.parallel.units import find_units  # noqa: E402
from shardwise.plan import Host, Plan, make_plan  # noqa: E402
from shardwise.rank import quiet_lightning  # noqa: E402
from shardwise.trainer import build_module, build_trainer  # noqa: E402
from shardwise.weights.initialize import Materializer  # noqa: E402
from tests.harness.processes import spawn  # noqa: E402

FEATURES = 64  # of a row: little to copy to the device
SAMPLES = 1 << 17  # no epoch ends within a run
NEVER = 10**6
CLIP = 1.0
FEW, MANY = "gpu2ms few kernels", "gpu2ms many kernels"
SECTIONS = {"host": ["host"], "gpu2ms": [FEW, MANY], "llm": ["llm"], "sync": ["sync"]}
ACCUMULATE = 4  # sync
PRECISION = {"host": "fp32", FEW: "tf32", MANY: "bf16"}
WANTED_MS = 2.0  # gpu2ms
NOTHING_ELSE = ["checkpoint=none", f"validate_every_n_steps={NEVER}", f"gradient_clip_val={CLIP}"]

PLAIN, STOCK, STOCK_LOGGING = "plain loop", "stock Lightning", "stock Lightning, logging every 10"
OURS_LOGGING, OURS = "shardwise, logging every 10", "shardwise, never logging"
SMALL_CONTENDERS = (PLAIN, STOCK, STOCK_LOGGING, OURS_LOGGING, OURS)
UNCLIPPED = "plain loop, no clipping"
EVERY, DEFERRED = "every micro-batch", "deferred"
LLM_CONTENDERS = (PLAIN, OURS_LOGGING, UNCLIPPED)  # the two that are compared stand close together

LLM = [
    "schedule=none", "optimizer.lr=1e-4", "module.sample_tokens=0", "data._target_=benchmarks.overhead.Held",
    "~data.corpus", "~data.directory", "~data.max_validation_sequences", "~data.num_workers", "precision=bf16",
]  # fmt: skip
MODELS = {
    "gpt2_124m": ["model=gpt2_124m", "model.max_seq_len=2048", "data.sequence_length=2048", "micro_batch_size=8"],
    "llama3_1b": ["model=llama3_1b", "data.sequence_length=2048", "micro_batch_size=4"],
}
TINY = ["model.dim=32", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=2", "model.ffn_dim=48",
        "model.vocab_size=64", "data.sequence_length=16", "micro_batch_size=2"]  # fmt: skip


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    warm_up: int
    timed: int
    rounds: int
    layers: int = 4
    width: int = 64
    rows: int = 8
    limit_seconds: float = 100

    @property
    def steps(self) -> int:
        return self.warm_up + self.timed + 1  # the clock stops when the batch of the step after is asked for


SIZES = {
    "host": Size(warm_up=50, timed=500, rounds=5, layers=3, limit_seconds=180),
    # `rows` is where calibrating starts
    FEW: Size(warm_up=50, timed=500, rounds=4, layers=2, width=8192, rows=1024),
    MANY: Size(warm_up=50, timed=500, rounds=4, width=2048, rows=4096),
    "llm": Size(warm_up=10, timed=30, rounds=4, limit_seconds=180),
    "sync": Size(warm_up=2 * ACCUMULATE, timed=10 * ACCUMULATE, rounds=2, limit_seconds=180),  # micro-batches
}
TINY_SIZES = {
    "host": Size(warm_up=5, timed=20, rounds=2, layers=3),
    FEW: Size(warm_up=3, timed=10, rounds=2, layers=2, width=64, rows=256),
    MANY: Size(warm_up=3, timed=10, rounds=2, width=64, rows=256),
    "llm": Size(warm_up=2, timed=4, rounds=2),
    "sync": Size(warm_up=ACCUMULATE, timed=2 * ACCUMULATE, rounds=2),
}


# What is trained, and what it is fed


class Mlp(LightningModule):
    """A few layers, and an optimizer of its own: the same under every contender."""

    def __init__(self, layers: int, width: int, fused: bool = False) -> None:
        super().__init__()
        sizes = [FEATURES, *[width] * layers]
        self.layers = nn.Sequential(*(layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())))
        self.last = nn.Linear(width, FEATURES)
        self.fused, self.logs = fused, False

    def loss(self, batch: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.layers(batch)).float(), batch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.logs:
            self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=self.fused or None)


class Clock:
    """Stands in the data set, which every contender asks for one batch a step: no callback, no hook is added.

    Waits for the device when the timed steps begin and when they are over, and nowhere between.
    """

    def __init__(self, device: torch.device, size: Size) -> None:
        self.device, self.size = device, size
        self.asked = 0
        self.times: list[float] = []  # at which the timed steps, and the one after them, asked
        self.cpu_seconds = float("nan")

    def tick(self) -> None:
        done = self.asked - self.size.warm_up
        self.asked += 1
        if done < 0 or done > self.size.timed:
            return
        if done in (0, self.size.timed):
            wait_for(self.device)
            self.cpu_seconds = time.process_time() - (0 if done == 0 else self.cpu_seconds)
        self.times.append(time.perf_counter())

    def result(self) -> dict[str, float]:
        """`quiet`: the lowest tenth of stretches of ten steps, which is what they take while nobody else uses the
        machine. For a device that works behind the host's back it says nothing."""
        steps = len(self.times) - 1
        stretches = sorted(end - begin for begin, end in zip(self.times[:-10:10], self.times[10::10], strict=False))
        seconds = {
            "seconds_per_step": (self.times[-1] - self.times[0]) / steps,
            "cpu_seconds_per_step": self.cpu_seconds / steps,
        }
        return seconds | ({"quiet_seconds_per_step": stretches[len(stretches) // 10] / 10} if stretches else {})


class OneBatch(Dataset[Any]):
    """One batch in the host's (pinned) memory, handed out whole whatever is asked for."""

    def __init__(self, batch: Any, clock: Clock) -> None:
        self.batch, self.clock = batch, clock

    def __len__(self) -> int:
        return SAMPLES

    def __getitems__(self, indices: list[int]) -> Any:
        self.clock.tick()
        return self.batch


class Held(LightningDataModule):
    def __init__(self, batch: Any, clock: Clock, batch_size: int) -> None:
        super().__init__()
        self.dataset, self.batch_size = OneBatch(batch, clock), batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_size=self.batch_size, shuffle=True, collate_fn=whole)


def whole(batch: Any) -> Any:
    return batch


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor


# The contenders


def plain_steps(
    loss_of: nn.Module, optimizer: torch.optim.Optimizer, data: Held, clock: Clock, *, clip: bool = True
) -> None:
    """The loop that one writes by hand: its own loader, nothing logged, nothing looked at."""
    ranks, dataset = dist.get_world_size(), data.dataset
    sampler = DistributedSampler(dataset, ranks, dist.get_rank()) if ranks > 1 else None
    loader = DataLoader(dataset, batch_size=data.batch_size, shuffle=sampler is None, sampler=sampler, collate_fn=whole)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for _, batch in zip(range(clock.size.steps), loader, strict=False):
        loss = loss_of(moved(batch, clock.device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()


def moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, dict):
        return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    return batch.to(device, non_blocking=True)


class LossOf(nn.Module):
    """A module's loss as a forward, which DDP and FSDP2 hook into."""

    def __init__(self, module: nn.Module, loss: Callable[[Any], Tensor], low: torch.dtype | None, kind: str) -> None:
        super().__init__()
        self.module, self.loss, self.low, self.kind = module, loss, low, kind

    def forward(self, batch: Any) -> Tensor:
        if self.low is None:
            return self.loss(batch)
        with torch.autocast(self.kind, self.low):
            return self.loss(batch)


def averaged(module: nn.Module, device: torch.device) -> nn.Module:
    if dist.get_world_size() == 1:
        return module
    return DistributedDataParallel(module, device_ids=[device.index] if device.type == "cuda" else None)


def plain_mlp(plan: Plan, data: Held, clock: Clock) -> None:
    module: Any = build(plan.module, "module").to(clock.device)
    low = torch.bfloat16 if plan.precision.is_low else None
    loss_of = averaged(LossOf(module, module.loss, low, clock.device.type), clock.device)
    plain_steps(loss_of, module.configure_optimizers(), data, clock)


def stock(plan: Plan, data: Held, clock: Clock, *, logging: bool) -> None:
    module: Any = build(plan.module, "module")
    module.logs = logging
    if plan.precision.is_low:
        module.fused = False  # its MixedPrecision refuses to clip before a fused optimizer
    logger: Any = False
    if logging:
        from lightning.pytorch.loggers import CSVLogger

        logger = CSVLogger(plan.run_dir)
    trainer = Trainer(
        accelerator="gpu" if plan.accelerator == "cuda" else "cpu",
        devices=plan.topology.devices,
        strategy="ddp" if plan.topology.world_size > 1 else "auto",
        precision="bf16-mixed" if plan.precision.is_low else "32-true",
        max_steps=clock.size.steps,
        gradient_clip_val=CLIP,
        logger=logger,
        log_every_n_steps=10 if logging else NEVER,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=plan.run_dir,
    )
    trainer.fit(module, datamodule=data)


def ours(plan: Plan, data: Held, clock: Clock) -> None:
    """What `python train.py` runs from its Plan on."""
    module = build_module(plan)
    trainer = build_trainer(plan, module)
    # It draws a picture when all is over; and tearing down copies weights and optimizer state to the CPU.
    trainer.callbacks = [c for c in trainer.callbacks if type(c).__name__ != "Summary"]  # type: ignore[attr-defined]
    trainer.strategy.teardown = lambda: None  # type: ignore[method-assign]
    trainer.fit(module, datamodule=data)


def plain_llm(plan: Plan, data: Held, clock: Clock, *, clip: bool) -> None:
    """The recipe's module on the strategy that the Plan names, made by hand from torch's parts."""
    module: Any = build_module(plan)
    make = sharded_by_hand if plan.strategy.name == "fsdp" else cast_by_hand
    loss_of = make(plan, module, clock.device)
    arguments = {key: value for key, value in (plan.optimizer or {}).items() if key != "_target_"}
    groups = parameter_groups(loss_of, arguments["weight_decay"])
    optimizer = torch.optim.AdamW(groups, fused=clock.device.type == "cuda" or None, **arguments)
    plain_steps(loss_of, optimizer, data, clock, clip=clip)


class RootLoss(LossOf):
    """`training_step` over copies of the parameters that no layer casts for itself."""

    root: list[Places] = []

    def forward(self, batch: Any) -> Tensor:
        assert self.low is not None
        # As in `PlannedPrecision`: autocast for what enters root-level layers in fp32
        with torch.autocast(self.kind, self.low, cache_enabled=False), parameters_as(self.root, self.low):
            return self.loss(batch)


def root_loss(plan: Plan, module: Any, device: torch.device) -> RootLoss:
    low = dtype_of(plan.precision.compute_dtype)
    return RootLoss(module, lambda batch: module.training_step(batch, 0), low, device.type)


def cast_by_hand(plan: Plan, module: Any, device: torch.device) -> nn.Module:
    """bf16 copies of fp32 masters per layer, and DDP around."""
    Materializer(module, device, plan.seed).place(module)
    low, units = dtype_of(plan.precision.compute_dtype), [unit for _, unit in find_units(module).modules]
    for unit in units:
        compute_in(unit, low, owners(unit), cast_inputs=True)
    loss_of = root_loss(plan, module, device)
    loss_of.root = owners(module, but=units)
    return averaged(loss_of, device)


def sharded_by_hand(plan: Plan, module: Any, device: torch.device) -> nn.Module:
    """fully_shard per layer and around the whole, under the policies that the Plan means."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    materializer = Materializer(module, device, plan.seed)
    for _, unit in find_units(module).modules:
        materializer.place(unit)
        policy = mixed_precision_policy(plan.precision, is_root=False)
        fully_shard(unit, mesh=mesh, reshard_after_forward=plan.strategy.reshard_after_forward, mp_policy=policy)
    materializer.place(module)
    loss_of = root_loss(plan, module, device)
    fully_shard(loss_of, mesh=mesh, mp_policy=mixed_precision_policy(plan.precision, is_root=True))
    return loss_of


# One part, in each of its ranks


@dataclass(frozen=True)
class Part:
    """What is measured in one group of processes."""

    section: str
    ranks: int
    accelerator: str
    size: Size
    model: str = ""
    strategy: str = "ddp"
    tiny: bool = False

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.section, self.model, self.model and self.strategy)))

    @property
    def device(self) -> torch.device:
        return (
            torch.device("cuda", int(os.environ["LOCAL_RANK"])) if self.accelerator == "cuda" else torch.device("cpu")
        )

    @property
    def contenders(self) -> tuple[str, ...]:
        return {"llm": LLM_CONTENDERS, "sync": (EVERY, DEFERRED)}.get(self.section, SMALL_CONTENDERS)

    @property
    def accumulate(self) -> int:
        return ACCUMULATE if self.section == "sync" else 1

    def overrides(self) -> list[str]:
        if self.section in ("llm", "sync"):
            return [*LLM, *MODELS[self.model], *(TINY if self.tiny else []), f"strategy={self.strategy}"]
        fused = str(self.accelerator == "cuda").lower()
        return ["recipe=custom", "module._target_=benchmarks.overhead.Mlp", "data._target_=benchmarks.overhead.Held",
                f"+module.layers={self.size.layers}", f"+module.width={self.size.width}", f"+module.fused={fused}",
                "micro_batch_size=8", "strategy=ddp",
                f"precision={PRECISION[self.section] if self.accelerator == 'cuda' else 'fp32'}"]  # fmt: skip

    def plan(self, folder: Path) -> Plan:
        words = [*self.overrides(), *NOTHING_ELSE]
        [micro] = [w.split("=")[1] for w in words if w.startswith("micro_batch_size=")][-1:]
        words += [f"devices={self.ranks}", f"global_batch_size={int(micro) * self.ranks * self.accumulate}",
                  f"accelerator={self.accelerator}", f"max_steps={self.size.steps}", f"runs_dir={folder}",
                  "name=base"]  # fmt: skip
        return make_plan(compose(words).jobs[0].config, Host(cuda_devices=torch.cuda.device_count()))

    def batch(self, plan: Plan, rows: int) -> Any:
        generator = torch.Generator().manual_seed(0)
        if self.section not in ("llm", "sync"):
            return pinned(torch.randn(rows, FEATURES, generator=generator), self.device)
        length, vocabulary = plan.data["sequence_length"], plan.module["model"]["vocab_size"]
        tokens = torch.randint(0, vocabulary, (plan.micro_batch_size, length + 1), generator=generator)
        return {"tokens": pinned(tokens[:, :-1].contiguous(), self.device),
                "targets": pinned(tokens[:, 1:].contiguous(), self.device)}  # fmt: skip


def run_contender(part: Part, plan: Plan, contender: str, rows: int) -> dict[str, float]:
    """Seconds per step: see `Clock`."""
    every = 10 if contender == OURS_LOGGING else NEVER
    plan = replace(plan, run_dir=f"{plan.run_dir}-{time.monotonic_ns()}", log_every_n_steps=every)
    Path(plan.run_dir).mkdir(parents=True, exist_ok=True)
    clock = Clock(part.device, part.size)
    data = Held(part.batch(plan, rows), clock, plan.micro_batch_size)
    if contender in (OURS, OURS_LOGGING, EVERY, DEFERRED):
        strategy = replace(plan.strategy, defer_gradient_sync=contender == DEFERRED)
        ours(replace(plan, strategy=strategy), data, clock)
    elif contender in (STOCK, STOCK_LOGGING):
        stock(plan, data, clock, logging=contender == STOCK_LOGGING)
    elif part.section == "llm":
        plain_llm(plan, data, clock, clip=contender != UNCLIPPED)
    else:
        plain_mlp(plan, data, clock)
    return clock.result()


def calibrated(part: Part, plan: Plan) -> int:
    """Rows of a batch with which a step of the plain loop takes `WANTED_MS`, the same on every rank."""
    rows, size = part.size.rows, part.size
    short = replace(part, size=replace(size, warm_up=size.warm_up // 2, timed=size.timed // 10))
    for _ in range(3):
        seconds = torch.tensor(run_contender(short, plan, PLAIN, rows)["seconds_per_step"], device=part.device)
        if part.ranks > 1:
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
        rows = min(max(256, round(rows * WANTED_MS / 1e3 / float(seconds) / 256) * 256), 16 * part.size.rows)
    return rows


def issue_ms(part: Part, plan: Plan, rows: int) -> float:
    """What the host of the plain loop needs to issue a step: the device is far from through with what it was given."""
    module: Any = build(plan.module, "module").to(part.device)
    low = torch.bfloat16 if plan.precision.is_low else None
    loss_of, batch = LossOf(module, module.loss, low, part.device.type), part.batch(plan, rows)
    optimizer, parameters = module.configure_optimizers(), list(module.parameters())
    times = []
    for _ in range(10):
        wait_for(part.device)
        begin = time.perf_counter()
        for _ in range(3):
            loss = loss_of(moved(batch, part.device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
        times.append((time.perf_counter() - begin) / 3)
    return median(times) * 1e3


def measure(part: Part, folder: Path) -> None:
    """Round after round, the contenders in turn: a machine that is shared changes its pace. Rank 0 writes rows."""
    quiet_lightning()
    plan = part.plan(folder)
    init_process_group(plan)
    set_matmul_mode(plan.precision)
    rows = part.size.rows
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        if part.section in (FEW, MANY):
            rows = calibrated(part, plan)
            note(folder, {"rows": rows, "plain_host_ms": issue_ms(part, plan, rows)})
        began = time.perf_counter()
        for number in range(part.size.rounds):
            # A round that would not end in time is not begun, by any rank.
            spent = torch.tensor(time.perf_counter() - began, device=part.device)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            if float(spent) * (number + 1) > 0.8 * part.size.limit_seconds * max(number, 1):
                break
            for contender in part.contenders:
                note(folder, measured(part, plan, contender, rows) | {"round": number})


def measured(part: Part, plan: Plan, contender: str, rows: int) -> dict[str, Any]:
    gc.collect()
    if part.accelerator == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    row: dict[str, Any] = {"contender": contender}
    environment = dict(os.environ)
    try:
        row |= run_contender(part, plan, contender, rows)
        if part.accelerator == "cuda":
            row["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
    except Exception as error:  # the others are measured all the same
        traceback.print_exc()
        row["error"] = f"{type(error).__name__}: {error}"[:500]
        error.__traceback__ = None  # its frames hold tensors
    finally:
        os.environ |= environment  # stock Lightning takes WORLD_SIZE and its like away when it is done
    return row


def note(folder: Path, row: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        with (folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


# All parts


def parts_of(section: str, ranks: int, accelerator: str, tiny: bool) -> list[Part]:
    size = (TINY_SIZES if tiny else SIZES)[section]
    if section not in ("llm", "sync"):
        return [Part(section, ranks, accelerator, size, tiny=tiny)]
    strategies = ("fsdp",) if section == "sync" else ("ddp", "fsdp") if ranks > 1 else ("ddp",)
    return [Part(section, ranks, accelerator, size, m, s, tiny) for m in MODELS for s in strategies]


def result_of(part: Part, commit: str | None) -> dict[str, Any]:
    """Measures a part in processes of its own, come what may."""
    began = time.perf_counter()
    result: dict[str, Any] = {"overrides": part.overrides(), "size": asdict(part.size), "commit": commit}
    with tempfile.TemporaryDirectory() as name:
        try:
            spawn(part.ranks, measure, part, Path(name), timeout_seconds=part.size.limit_seconds)
        except Exception as error:
            result["error"] = str(error)[-1500:].replace(f"{ROOT}/", "")
        file = Path(name) / "rows.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for row in rows:
        if "contender" not in row:
            result |= row
    result["contenders"] = {who: summary([r for r in rows if r.get("contender") == who]) for who in part.contenders}
    result["seconds"] = round(time.perf_counter() - began, 1)
    return result


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [row["error"] for row in rows if "error" in row]
    times = [row["seconds_per_step"] for row in rows if "error" not in row]
    told: dict[str, Any] = {"error": errors[0]} if errors else {} if times else {"error": "did not come to it"}
    if times:
        told |= {"seconds_per_step": median(times), "lowest": min(times), "highest": max(times), "rounds": times}
        if peaks := [row["peak_allocated_gib"] for row in rows if "peak_allocated_gib" in row]:
            told["peak_allocated_gib"] = max(peaks)
        told["cpu_seconds_per_step"] = median(row["cpu_seconds_per_step"] for row in rows if "error" not in row)
        if quiet := [row["quiet_seconds_per_step"] for row in rows if "quiet_seconds_per_step" in row]:
            told["quiet_seconds_per_step"] = min(quiet)
    return told


def show(part: Part, result: dict[str, Any]) -> None:
    for who, row in result["contenders"].items():
        words = f"{row['seconds_per_step'] * 1e6:,.0f} µs" if "seconds_per_step" in row else row["error"]
        print(f"{part.ranks} ranks  {part.name}  {who}: {words}", flush=True)
    if "error" in result:
        print(f"{part.ranks} ranks  {part.name}: {result['error']}", flush=True)
    print(f"{part.ranks} ranks  {part.name}: {result['seconds']} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", help="comma-separated; default: 1 and all GPUs, on the CPU 1 and 2")
    parser.add_argument("--sections", default="host,gpu2ms,llm")
    parser.add_argument("--only", default="", help="a regular expression: parts to measure; the others stay")
    parser.add_argument("--tiny", action="store_true", help="sizes for trying it out, on a CPU too")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--commit", help="of this code, where it was copied without its history")
    arguments = parser.parse_args()
    cuda = arguments.accelerator == "cuda"
    every = sorted({1, torch.cuda.device_count() if cuda else 2})
    environment, device = measured_on(arguments)
    environment["cpus"] = os.cpu_count()
    for ranks in map(int, arguments.ranks.split(",")) if arguments.ranks else every:
        path = arguments.out / f"overhead-{device}-x{ranks}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        earlier = json.loads(path.read_text()) if path.exists() else {"parts": {}}
        command = "python benchmarks/overhead.py" + " --accelerator cpu" * (not cuda) + f" --ranks {ranks}"
        content = {
            "command": command + " --tiny" * arguments.tiny,
            "ranks": ranks,
            "tiny": arguments.tiny,
            "environment": environment,
            "settings": {"gradient_clip_val": CLIP, "learning": "AdamW"},
            "parts": earlier["parts"],
        }
        for section in [part for name in arguments.sections.split(",") for part in SECTIONS[name]]:
            if section != "host" and not (cuda or arguments.tiny):
                print(f"{ranks} ranks  {section}: needs a GPU", flush=True)
                continue
            parts = parts_of(section, ranks, arguments.accelerator, arguments.tiny)
            for part in (part for part in parts if re.search(arguments.only, part.name)):
                content["parts"][part.name] = result_of(part, environment["commit"])
                path.write_text(json.dumps(content, indent=1) + "\n")  # at once: what is cut short keeps what it has
                show(part, content["parts"][part.name])


if __name__ == "__main__":
    main()
