"""Loops as one writes them by hand, from torch's parts: what the Trainer is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import repeat
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.harness.clock import DataClock
from benchmarks.harness.data import Held, batch_of_images, moved, whole
from benchmarks.harness.device import wait_for
from shardwise.config.targets import build
from shardwise.optim.optimizers import parameter_groups
from shardwise.parallel.precision import (
    ParameterSites,
    cast_forward,
    cast_parameters,
    dtype_of,
    mixed_precision_policy,
    parameter_sites,
    set_matmul_mode,
)
from shardwise.parallel.units import find_units
from shardwise.plan import Plan
from shardwise.trainer import build_data, build_module
from shardwise.weights.initialize import Materializer

CLIP = 1.0


def run_steps(
    loss_of: nn.Module, optimizer: torch.optim.Optimizer, data: Held, clock: DataClock, *, clip: bool = True
) -> None:
    """The loop: its own loader, nothing logged, nothing looked at."""
    ranks, dataset = dist.get_world_size(), data.dataset
    sampler = DistributedSampler(dataset, ranks, dist.get_rank()) if ranks > 1 else None
    loader = DataLoader(dataset, batch_size=data.batch_size, shuffle=sampler is None, sampler=sampler, collate_fn=whole)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for _, batch in zip(range(clock.steps), loader, strict=False):
        run_step(loss_of, optimizer, parameters, moved(batch, clock.device), clip=clip)


def run_step(
    loss_of: nn.Module, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], batch: Any, *, clip: bool
) -> None:
    loss = loss_of(batch)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    if clip:
        nn.utils.clip_grad_norm_(parameters, CLIP)
    optimizer.step()


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


# Modules that have a loss and an optimizer of their own


def loss_of_module(plan: Plan, device: torch.device) -> tuple[LossOf, torch.optim.Optimizer]:
    """The loss of the Plan's module on the device, under autocast where the Plan computes in 16 bits."""
    module: Any = build(plan.module, "module").to(device)
    low = torch.bfloat16 if plan.precision.is_low else None
    return LossOf(module, module.loss, low, device.type), module.configure_optimizers()


def train_module(plan: Plan, data: Held, clock: DataClock) -> None:
    loss_of, optimizer = loss_of_module(plan, clock.device)
    run_steps(averaged(loss_of, clock.device), optimizer, data, clock)


def host_ms(plan: Plan, batch: Any, device: torch.device) -> float:
    """What the host of `train_module` needs to issue a step, while the device still has most of its work to do."""
    loss_of, optimizer = loss_of_module(plan, device)
    parameters, times = list(loss_of.module.parameters()), []
    for _ in range(10):
        wait_for(device)
        begin = time.perf_counter()
        for _ in range(3):
            run_step(loss_of, optimizer, parameters, moved(batch, device), clip=True)
        times.append((time.perf_counter() - begin) / 3)
    return median(times) * 1e3


# Language models


def train_language_model(plan: Plan, data: Held, clock: DataClock, *, clip: bool) -> None:
    """The recipe's module on the strategy that the Plan names, made by hand from torch's parts."""
    module: Any = build_module(plan)
    make = sharded_by_hand if plan.strategy.name == "fsdp" else cast_by_hand
    loss_of = make(plan, module, clock.device)
    arguments = {key: value for key, value in (plan.optimizer or {}).items() if key != "_target_"}
    groups = parameter_groups(loss_of, arguments["weight_decay"])
    optimizer = torch.optim.AdamW(groups, fused=clock.device.type == "cuda" or None, **arguments)
    run_steps(loss_of, optimizer, data, clock, clip=clip)


class RootLoss(LossOf):
    """`training_step` over copies of the parameters that no layer casts for itself."""

    root: list[ParameterSites] = []

    def forward(self, batch: Any) -> Tensor:
        assert self.low is not None
        # Autocast is for what enters root-level layers in fp32, as in the Trainer's precision.
        with torch.autocast(self.kind, self.low, cache_enabled=False), cast_parameters(self.root, self.low):
            return self.loss(batch)


def root_loss(plan: Plan, module: Any, device: torch.device) -> RootLoss:
    low = dtype_of(plan.precision.compute_dtype)
    return RootLoss(module, lambda batch: module.training_step(batch, 0), low, device.type)


def cast_by_hand(plan: Plan, module: Any, device: torch.device) -> nn.Module:
    """bf16 copies of fp32 masters per layer, and DDP around the whole."""
    Materializer(module, device, plan.seed).materialize(module)
    low, units = dtype_of(plan.precision.compute_dtype), [unit for _, unit in find_units(module).modules]
    for unit in units:
        cast_forward(unit, low, parameter_sites(unit), cast_inputs=True)
    loss_of = root_loss(plan, module, device)
    loss_of.root = parameter_sites(module, but=units)
    return averaged(loss_of, device)


def sharded_by_hand(plan: Plan, module: Any, device: torch.device) -> nn.Module:
    """fully_shard per layer and around the whole, under the policies that the Plan means."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    materializer = Materializer(module, device, plan.seed)
    for _, unit in find_units(module).modules:
        materializer.materialize(unit)
        policy = mixed_precision_policy(plan.precision, is_root=False)
        fully_shard(unit, mesh=mesh, reshard_after_forward=plan.strategy.reshard_after_forward, mp_policy=policy)
    materializer.materialize(module)
    loss_of = root_loss(plan, module, device)
    fully_shard(loss_of, mesh=mesh, mp_policy=mixed_precision_policy(plan.precision, is_root=True))
    return loss_of


# Images


def image_step(
    plan: Plan, device: torch.device, *, compiled: bool, weights_channels_last: bool = False, loaded: bool = False
) -> tuple[Callable[[], Tensor], torch.optim.Optimizer]:
    """A step of the recipe's model, initialised as the Trainer would, with autocast and a fused optimizer: no norm of
    the gradients, nothing distributed. The batch is a fixed one on the device, normalised before; `loaded`: each batch
    comes from the loader's workers and is normalised in the graph."""
    set_matmul_mode(plan.precision)
    module = build_module(plan)
    Materializer(module, device, plan.seed).materialize(module)
    model: Any = module.model
    if weights_channels_last:
        model = model.to(memory_format=torch.channels_last)
    arguments = {k: v for k, v in (plan.optimizer or {}).items() if k != "_target_"}
    optimizer_class = torch.optim.SGD if "momentum" in arguments else torch.optim.AdamW
    groups = parameter_groups(model, arguments["weight_decay"])
    optimizer = optimizer_class(groups, fused=True, **arguments)
    batches = loaded_batches(plan, device) if loaded else repeat(normalised(plan, device))
    whole_model = nn.Sequential(Normalise(plan, device), model) if loaded else model
    forward: Callable[[Tensor], Tensor] = torch.compile(whole_model) if compiled else whole_model

    def step() -> Tensor:
        images, labels = next(batches)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(forward(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step, optimizer


class Normalise(nn.Module):
    """uint8 images [N, C, H, W] as the recipe's module hands them to its model."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        super().__init__()
        self.mean, self.std = (torch.tensor(plan.data[k], device=device)[:, None, None] for k in ("mean", "std"))
        self.layout = torch.channels_last if plan.module["channels_last"] else torch.contiguous_format

    def forward(self, images: Tensor) -> Tensor:
        return ((images.float() / 255 - self.mean) / self.std).contiguous(memory_format=self.layout)


def normalised(plan: Plan, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images and labels of one micro-batch."""
    batch = batch_of_images(plan, device)
    return Normalise(plan, device)(batch["image"]), batch["label"]


def loaded_batches(plan: Plan, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Images in uint8 and labels from the workers of the Plan's data, copied from pinned memory, epoch after epoch."""
    data = build_data(plan)
    data.setup("fit")
    loader = data.train_dataloader()
    while True:
        for batch in loader:
            yield batch["image"].to(device, non_blocking=True), batch["label"].to(device, non_blocking=True)
