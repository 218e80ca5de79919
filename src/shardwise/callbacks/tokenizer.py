"""Keeps the files of the data's tokenizer in the run's folder, from where each checkpoint gets them."""

from __future__ import annotations

import shutil
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise.data.tokenizer import FILE, Tokenizer, same_tokens, tokenizer_beside
from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.protocols import optional
from shardwise.run_dir.files import tokenizer_folder, write_whole


class KeepTokenizer(Callback):
    """Refuses weights that were trained with another tokenizer than the data's."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        tokenizer: Tokenizer | None = optional(getattr(trainer, "datamodule", None), "tokenizer")
        if tokenizer is None:
            return
        if "tokenizer" not in self.plan.resume_allow:
            _check_same(tokenizer, self.plan)
        if stage == "fit" and trainer.is_global_zero:
            _write(tokenizer, tokenizer_folder(self.plan.run_dir))


def _check_same(tokenizer: Tokenizer, plan: Plan) -> None:
    option = "resume" if plan.resume is not None else "init_from"
    weights = plan.resume or plan.init_from
    before = None if weights is None else tokenizer_beside(Path(weights))
    if before is not None and not same_tokens(before.read_text(encoding="utf-8"), tokenizer.files()[FILE]):
        raise ConfigError(
            f"{option}={weights} was trained with the tokenizer {before}, and the data's tokens are those of "
            f"{tokenizer.name}, where a number stands for another text: prepare the data with "
            f"tokenizer={before.parent}, or give resume_allow=[tokenizer] if this is meant"
        )


def _write(tokenizer: Tokenizer, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # that of an earlier start, which may have had other files
    folder.mkdir(parents=True)
    for name, content in tokenizer.files().items():
        write_whole(folder / name, content)
