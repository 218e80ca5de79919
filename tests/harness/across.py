"""What the checkpoint tests and `make checkpoint-matrix` run: saved under one strategy, gone on with under another."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.config.compose import compose
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.run_dir.files import checkpoint_path
from tests.harness.cells import fit
from tests.harness.everything import BATCH, Network, rows
from tests.harness.parity import OPTIMIZERS, STRATEGIES
from tests.harness.pipelines import SIZE
from tests.harness.reference import WEIGHT_DECAY, plain_loop, update_deviation

SAVED, FURTHER = 3, 20  # steps
BOUND = 1e-5
LAYOUTS = {**STRATEGIES, "pipeline": ["strategy=fsdp", *SIZE]}
NAMES = ["ddp", "fsdp", "fsdp_hybrid", "zero1", "zero2", "zero3"]


@dataclass(frozen=True)
class Side:
    """A strategy on a number of ranks."""

    strategy: str
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.strategy}-{self.ranks}".replace(" ", "-").replace(",", "")


def sides(names: list[str], ranks: int) -> list[Side]:
    """None on more than four ranks, of which each has four samples."""
    return [Side(name, ranks) for name in names if not (name == "fsdp_hybrid" and ranks == 1) and ranks <= 4]


def plan_of(side: Side, optimizer: str, folder: Path, steps: int, accelerator: str, *words: str) -> Plan:
    micro = 2 if side.ranks < 4 else 4  # another number of micro-batches on every number of ranks
    argv = [
        "recipe=custom", "module._target_=tests.harness.everything.Everything",
        "data._target_=tests.harness.everything.Rows", "+data.batch_size=${micro_batch_size}",
        f"runs_dir={folder.parent}", f"name={folder.name}", f"accelerator={accelerator}", f"devices={side.ranks}",
        f"max_steps={steps}", "checkpoint.monitor=null", "checkpoint.save_every_n_steps=null", "log_every_n_steps=1",
        *LAYOUTS[side.strategy], *OPTIMIZERS[optimizer], f"optimizer.weight_decay={WEIGHT_DECAY}",
        "+module.occasional=false", f"global_batch_size={BATCH}", f"micro_batch_size={micro}",
        "gradient_clip_val=null", *words,
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    return make_plan(compose(argv).jobs[0].config, Host(cuda_devices=torch.cuda.device_count()))


def save_all(folder: Path, mine: list[Side], optimizers: list[str], accelerator: str = "cpu") -> None:
    """In each rank: the first steps, and a checkpoint after them."""
    for side in mine:
        for optimizer in optimizers:
            fit(plan_of(side, optimizer, folder / f"{side.name}-{optimizer}", SAVED, accelerator))


def resume_all(
    folder: Path, pairs: list[tuple[Side, Side]], optimizers: list[str], accelerator: str = "cpu"
) -> dict[tuple[Side, Side, str], dict[str, Any]]:
    """In each rank: (saved, resumed) and what came of the further steps."""
    found = {}
    for saved, resumed in pairs:
        for optimizer in optimizers:
            path = checkpoint_path(folder / f"{saved.name}-{optimizer}", SAVED)
            to = folder / f"{saved.name}-to-{resumed.name}-{optimizer}"
            words = [f"resume={path}", "checkpoint.save_at_end=false"]
            plan = plan_of(resumed, optimizer, to, SAVED + FURTHER, accelerator, *words)
            try:
                result = fit(plan)
            except Exception as error:
                raise AssertionError(f"{saved} → {resumed}, {optimizer}: {type(error).__name__}: {error}") from error
            if dist.get_rank() == 0:
                found[saved, resumed, optimizer] = deviations(optimizer, result)
    return found


@functools.cache
def reference(optimizer: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Parameters at the start, when the checkpoint is written and at the end, and losses: of the plain loop."""
    network = Network(False)
    start = {f"network.{name}": p.detach().clone() for name, p in network.named_parameters()}
    states = []
    for steps in (SAVED, SAVED + FURTHER):
        final, losses, _ = plain_loop(Network(False), rows(), Network.loss_sum, optimizer, steps, BATCH, None)
        states.append({f"network.{name}": p for name, p in final.items()})
    return start, states[0], states[1], losses


def deviations(optimizer: str, result: dict[str, Any]) -> dict[str, float]:
    """From a plain loop that was never interrupted: of losses, relative; of the further steps' update, as in parity."""
    _, saved, final, losses = reference(optimizer)
    trained = [name for name in saved if not torch.equal(saved[name], final[name])]
    updates = update_deviation(*({n: state[n] for n in trained} for state in (saved, result["final"], final)))
    further = losses[SAVED:]
    assert len(result["losses"]) == len(further), f"{len(result['losses'])} losses of {len(further)} steps"
    return {
        "loss": max(abs(a / b - 1) for a, b in zip(result["losses"], further, strict=True)),
        "update": max(updates.values()),
    }
