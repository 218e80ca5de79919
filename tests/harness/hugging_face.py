"""Small Llama and Qwen3 models of Hugging Face, as a user brings them, beside a plain loop."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from shardwise.config.compose import compose
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from shardwise.trainer import build_module
from tests.harness.cells import fit
from tests.harness.parity import OPTIMIZERS, largest
from tests.harness.reference import WEIGHT_DECAY, plain_loop, update_deviation

STEPS, BATCH, CLIP, LENGTH, IGNORE = 3, 8, 0.1, 16, -100
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 4, "max_position_embeddings": 32,
}  # fmt: skip


def loss_in_its_dtype(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, shift_labels: Any = None, **_: Any
) -> Tensor:
    """Transformers' own loss, which rounds logits to fp32, without that."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=IGNORE)[:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return total / ((shift_labels != IGNORE).sum() if num_items_in_batch is None else num_items_in_batch)


class UnweighedLM(LightningModule):
    """Knows nothing of this repository."""

    def __init__(
        self, family: str = "Llama", tied: bool = True, own_loss: bool = True, continues: bool = False,
        counts: bool = False, **sizes: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.continues, self.counts = continues, counts
        import transformers

        config = getattr(transformers, f"{family}Config")(**SIZES | sizes, tie_word_embeddings=tied)
        self.lm = getattr(transformers, f"{family}ForCausalLM")(config)
        if own_loss:
            self.lm.loss_function = loss_in_its_dtype

    def count(self, batch: dict[str, Tensor]) -> int:
        return int((batch["labels"][:, 1:] != IGNORE).sum())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.lm(**batch, **(self.own_targets(batch) if self.counts else {})).loss
        return loss

    def own_targets(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Targets that are not the labels moved by one, and twice their number, so that the loss is half a mean."""
        following = F.pad(batch["labels"], (0, 1), value=IGNORE)[:, 1:]
        targets = torch.where(following == IGNORE, IGNORE, (following + 7) % SIZES["vocab_size"])
        return {"shift_labels": targets, "num_items_in_batch": 2 * self.count(batch)}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.training_step(batch, batch_idx).double()
        self.log("validation/loss", loss, sync_dist=True, batch_size=self.count(batch))
        if self.continues:
            for name, value in self.looked_at(batch).items():
                self.log(f"validation/{name}", value, sync_dist=True, batch_size=len(batch["input_ids"]))

    def looked_at(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What continues the texts, and their logits: what one rank alone gives."""
        tokens = batch["input_ids"]
        more = self.lm.generate(tokens[:, :5], max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert more.shape[1] == 9
        logits = self.lm(input_ids=tokens).logits
        assert logits.shape[:2] == tokens.shape
        return {"continued": more.double().mean(), "logits": logits.double().pow(2).mean()}


class CausalLM(UnweighedLM):
    """Says the weight of a batch, too."""

    def loss_weight(self, batch: dict[str, Tensor]) -> int:
        return self.count(batch)


class Texts(LightningDataModule):
    """Of some sequences hardly a label is left: the rest is padding. `kind`: see `texts`."""

    def __init__(self, batch_size: int, kind: str = "plain") -> None:
        super().__init__()
        self.batch_size, self.kind = batch_size, kind

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(texts(3 * BATCH, kind=self.kind), batch_size=self.batch_size)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(texts(5, seed=1, kind=self.kind), batch_size=2)  # type: ignore[arg-type]


def texts(samples: int, seed: int = 0, kind: str = "plain") -> list[dict[str, Tensor]]:
    """`masked`: a mask tells what is padding, before or behind a text. `packed`: a sample is two texts."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for i in range(samples):
        tokens = torch.randint(0, SIZES["vocab_size"], (LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[LENGTH - i * 5 % (LENGTH - 2) :] = IGNORE
        row = {"input_ids": tokens, "labels": labels}
        if kind == "masked":
            row["attention_mask"] = (labels != IGNORE).long()
            if i % 2:
                row = {name: tensor.flip(0) for name, tensor in row.items()}
        elif kind == "packed":
            row["position_ids"] = torch.cat([torch.arange(3 + i % 7), torch.arange(LENGTH - 3 - i % 7)])
        rows.append(row)
    return rows


@dataclass(frozen=True)
class Run:
    """One model under one layout."""

    layout: tuple[str, ...] = ()
    family: str = "Llama"
    tied: bool = True
    data_ranks: int = 1
    accumulate: int = 2
    precision: str = "fp64"
    optimizer: str = "adamw"
    clip: float | None = CLIP
    model: tuple[str, ...] = ()  # arguments of the model's config
    more: tuple[str, ...] = ()
    kind: str = "plain"  # of texts

    def words(self) -> list[str]:
        return [
            "recipe=custom", "module._target_=tests.harness.hugging_face.CausalLM",
            "data._target_=tests.harness.hugging_face.Texts", "data.batch_size=${micro_batch_size}", "accelerator=cpu",
            f"data.kind={self.kind}",
            f"module.family={self.family}", f"module.tied={self.tied}", *(f"module.{word}" for word in self.model),
            "strategy=fsdp", *self.layout, f"precision={self.precision}", *OPTIMIZERS[self.optimizer],
            f"optimizer.weight_decay={WEIGHT_DECAY}", "schedule=none", f"max_steps={STEPS}",
            f"global_batch_size={BATCH}", f"micro_batch_size={BATCH // self.data_ranks // self.accumulate}",
            f"gradient_clip_val={'null' if self.clip is None else self.clip}", "checkpoint=none",
            "log_every_n_steps=1", f"validate_every_n_steps={STEPS}", *self.more,
        ]  # fmt: skip


def plan_of(run: Run, folder: Path, ranks: int, *words: str) -> Plan:
    folder.mkdir(parents=True, exist_ok=True)
    named = [f"runs_dir={folder.parent}", f"name={folder.name}", f"devices={ranks}"]
    return make_plan(compose([*named, *run.words(), *words]).jobs[0].config, Host(cuda_devices=0))


def run_all(folder: Path, ranks: int, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """In each rank: one run after the other."""
    return [fit(plan_of(run, folder / str(number), ranks)) for number, run in enumerate(runs)]


@functools.cache
def _reference(
    run: Run, folder: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float], list[float], dict[str, float]]:
    module: Any = build_module(plan_of(run, folder / "reference", 1))
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    rows = texts(3 * BATCH, kind=run.kind)
    final, losses, norms = plain_loop(module, rows, _loss_sum, run.optimizer, STEPS, BATCH, run.clip)
    module.load_state_dict(final, strict=False)
    batches = [{key: value[None] for key, value in row.items()} for row in texts(5, seed=1, kind=run.kind)]
    with torch.no_grad():
        sums = [_loss_sum(module, batch) for batch in batches]
        looked = [module.looked_at(batch) for batch in batches] if module.continues else []
    validation = {"validation/loss": float(sum(total for total, _ in sums) / sum(number for _, number in sums))}
    for name in looked[0] if looked else ():
        validation[f"validation/{name}"] = float(sum(one[name] for one in looked) / len(looked))
    return start, final, losses, norms, validation


def _loss_sum(module: CausalLM, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    number = torch.tensor(module.count(batch))
    return module.training_step(batch, 0) * number, number


def deviations(run: Run, result: dict[str, Any], folder: Path, *, resumed: bool = False) -> dict[str, float]:
    """The largest relative deviations from the plain loop. Initial weights are equal to the bit."""
    alone = Run(family=run.family, tied=run.tied, precision=run.precision, optimizer=run.optimizer, clip=run.clip,
                model=run.model, kind=run.kind)  # fmt: skip
    start, final, losses, norms, validation = _reference(alone, folder)
    assert result["start"].keys() == start.keys()
    if not resumed:
        assert all(torch.equal(result["start"][name], tensor) for name, tensor in start.items()), f"{run}: its start"
    assert run.clip is None or min(norms) > 2 * run.clip, "must bite"
    done = STEPS - len(result["losses"])
    assert done == 0 or resumed
    return {
        "update": max(update_deviation(start, result["final"], final).values()),
        "loss": largest(result["losses"], losses[done:]),
        "gradient_norm": largest(result["norms"], norms[done:]),
        "validation": max(abs(result["validation"][name] / value - 1) for name, value in validation.items()),
    }
