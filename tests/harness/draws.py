"""A masked language model that notes all random numbers that it draws, and can compute with given ones instead."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardwise.config.compose import compose
from shardwise.nn.linear_cross_entropy import linear_cross_entropy, vocabulary_part_of
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from tests.harness.cells import fit, masked_tokens
from tests.harness.hugging_face import CausalLM, Run, plan_of

STEPS, BATCH, RATE = 3, 4, 0.1
MASK = 60  # a token


class Drop(nn.Module):
    """Dropout that notes what it keeps. `along`: the dim of which a tensor rank has a part."""

    last: Tensor

    def __init__(self, along: int) -> None:
        super().__init__()
        self.along = along
        self.noted: list[Tensor] = []
        self.whole: list[Tensor] = []  # what was drawn without gradients, for whole sequences
        self.given: list[Tensor] = []  # what to keep, in place of random numbers
        self.register_buffer("last", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.given:
            return x * self.given.pop(0) / 0.75
        kept = torch.rand_like(x) > 0.25
        if torch.compiler.is_compiling():
            self.last.copy_(kept.double().mul(torch.arange(kept.numel()).view(kept.shape)).sum())
        else:
            (self.noted if torch.is_grad_enabled() else self.whole).append(kept)
        return x * kept / 0.75


class Mlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim), Drop(-1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.drop(torch.tanh(self.up(x))))
        return out


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.mlp, self.drop = nn.LayerNorm(dim), Mlp(dim), Drop(-2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop(self.mlp(self.norm(x)))
        return out


class Body(nn.Module):
    """Drops behind the embedding, in and behind its blocks, and before the head."""

    tensor_parallel_layers: ClassVar[dict[str, str]] = {
        "embedding": "embedding", "blocks.*.norm": "norm", "blocks.*.mlp": "gather", "blocks.*.mlp.up": "column",
        "blocks.*.mlp.down": "row", "norm": "norm", "head": "head",
    }  # fmt: skip

    def __init__(self, recomputes_blocks: bool, dim: int = 8) -> None:
        super().__init__()
        self.recomputes_blocks = recomputes_blocks
        self.embedding, self.first = nn.Embedding(61, dim), Drop(-2)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm, self.last, self.head = nn.LayerNorm(dim), Drop(-2), nn.Linear(dim, 61, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.embedding(tokens))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes_blocks else block(x)
        out: Tensor = self.last(self.norm(x))
        return out


class Masking(LightningModule):
    """Masks tokens, and masks others in a second pass through the model. Rank 0 draws more than others between steps.

    `passes`: through the model in a step. `recomputes`: what the module itself computes again in the backward pass,
    "blocks" or the "body". `calls`: whether it calls its head.
    """

    mask: Tensor

    def __init__(self, passes: int = 2, recomputes: str = "", calls: bool = False) -> None:
        super().__init__()
        self.body = Body(recomputes == "blocks")
        self.passes, self.recomputes, self.calls = passes, recomputes, calls
        self.noted: dict[str, list[Any]] = {"transfer": [], "hook": [], "python": [], "step": [], "validation": []}
        self.given: list[Tensor] = []
        self.register_buffer("mask", torch.zeros(BATCH, 16), persistent=False)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.noted["transfer"].append(torch.rand(()))
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.noted["hook"].append(torch.rand(()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            torch.rand(3), random.random()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if not torch.compiler.is_compiling():
            self.noted["python"].append(random.random())
        return torch.stack([self._loss(batch["tokens"]) for _ in range(self.passes)]).mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.noted["validation"].append(torch.rand(()))
        self.body(batch["tokens"])
        self.noted["validation"].append(torch.rand(()))

    def _loss(self, tokens: Tensor) -> Tensor:
        masked = self.given.pop(0) if self.given else torch.rand(tokens.shape) < 0.3
        if torch.compiler.is_compiling():
            self.mask.copy_(masked)
        else:
            self.noted["step"].append(masked)
        inputs, head = torch.where(masked, MASK, tokens), self.body.head
        targets = torch.where(masked, tokens, -100)
        hidden = checkpoint(self.body, inputs, use_reentrant=False) if self.recomputes == "body" else self.body(inputs)
        if self.calls:
            return F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten())
        return linear_cross_entropy(
            hidden, head.weight, targets, loss="full", reduction="mean", part=vocabulary_part_of(head)
        )


class NotingLM(CausalLM):
    """A model of Hugging Face whose step and layers note what they draw."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.noted: dict[str, list[Tensor]] = {"step": [], "behind": [], "layers": [], "whole": []}
        for layer in self.lm.model.layers:
            layer.register_forward_hook(self._note)

    def _note(self, *_: Any) -> None:
        self.noted["layers" if torch.is_grad_enabled() else "whole"].append(torch.rand(()))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.noted["step"].append(torch.rand(()))
        loss = super().training_step(batch, batch_idx)
        self.noted["behind"].append(torch.rand(()))
        return loss


def run_models(folder: Path, ranks: int, runs: Sequence[Run]) -> list[dict[str, list[Tensor]]]:
    """In each rank: what `NotingLM` drew in one run after the other."""
    found = []
    for number, run in enumerate(runs):
        keep = Keep()
        fit(plan_of(run, folder / str(number), ranks, "module._target_=tests.harness.draws.NotingLM"), keep)
        found.append(keep.module.noted)
    return found


@dataclass(frozen=True)
class Case:
    """The words of a run, and what its module does."""

    words: tuple[str, ...]
    passes: int = 2
    recomputes: str = ""
    calls: bool = False
    accumulate: int = 1

    def plan(self, folder: Path, ranks: int) -> Plan:
        folder.mkdir(parents=True, exist_ok=True)
        argv = [
            "recipe=custom", "module._target_=tests.harness.draws.Masking", f"module.passes={self.passes}",
            f"module.recomputes={self.recomputes}", f"module.calls={self.calls}",
            "data._target_=tests.harness.cells.MaskedTokens", "data.batch_size=${micro_batch_size}", "accelerator=cpu",
            f"runs_dir={folder.parent}", f"name={folder.name}", f"devices={ranks}", "precision=fp64", "optimizer=sgd",
            f"optimizer.lr={RATE}", "optimizer.momentum=0", "gradient_clip_val=null", f"max_steps={STEPS}",
            f"global_batch_size={BATCH}", f"micro_batch_size={BATCH // self.accumulate}",
            "checkpoint=none", "log_every_n_steps=1",
            f"validate_every_n_steps={STEPS}", *self.words,
        ]  # fmt: skip
        return make_plan(compose(argv).jobs[0].config, Host(cuda_devices=0))


class Keep(Callback):
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.module: Any = pl_module


def run_cases(folder: Path, ranks: int, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """In each rank: one case after the other, with all that was drawn."""
    found = []
    for number, case in enumerate(cases):
        torch._dynamo.reset()
        counters.clear()
        keep = Keep()
        result = fit(case.plan(folder / str(number), ranks), keep)
        drops = {name: layer for name, layer in keep.module.named_modules() if isinstance(layer, Drop)}
        found.append(
            result
            | keep.module.noted
            | {"drops": {name: (drop.along, drop.noted) for name, drop in drops.items()}}
            | {"graphs": counters["stats"]["unique_graphs"], "breaks": dict(counters["graph_break"])}
            | {"whole": {name: drop.whole for name, drop in drops.items()}}
        )
    return found


def plain_run(case: Case, start: dict[str, Tensor], masks: list[Tensor], drops: dict[str, list[Tensor]]) -> Any:
    """Final weights and losses of one process that computes with what was drawn elsewhere."""
    module = Masking(case.passes, calls=case.calls).double()
    module.load_state_dict(start, strict=False)
    module.given = list(masks)
    for name, kept in drops.items():
        module.get_submodule(name).given = list(kept)
    rows = torch.stack([row["tokens"] for row in masked_tokens(STEPS * BATCH)])
    losses = []
    for step in rows.split(BATCH):
        found = [module.training_step({"tokens": tokens}, 0) for tokens in step.split(BATCH // case.accumulate)]
        loss = torch.stack(found).mean()
        module.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= RATE * parameter.grad
        losses.append(loss.item())
    return {name: p.detach() for name, p in module.named_parameters()}, losses
