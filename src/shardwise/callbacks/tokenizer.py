"""Keeps the files of the data's tokenizer in the run's folder, from where each checkpoint gets them."""

from __future__ import annotations

import shutil
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise.data.tokenizer import Tokenizer, digest, saved_tokenizer
from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.protocols import tokenizer_of_data
from shardwise.run_dir.files import tokenizer_folder, write_whole


class KeepTokenizer(Callback):
    """Refuses to go on from a checkpoint whose tokens are of another tokenizer than the data's."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        tokenizer: Tokenizer | None = tokenizer_of_data(getattr(trainer, "datamodule", None))
        if stage != "fit" or tokenizer is None:
            return
        if self.plan.resume is not None and "data" not in self.plan.resume_allow:
            _check_same(tokenizer, self.plan.resume)
        if trainer.is_global_zero:
            _write(tokenizer, tokenizer_folder(self.plan.run_dir))


def _check_same(tokenizer: Tokenizer, resume: str) -> None:
    before = saved_tokenizer(Path(resume))
    if before is not None and digest(before) != digest(tokenizer):
        raise ConfigError(
            f"resume={resume}: its tokens are those of the tokenizer {before.name} ({before.vocab_size} tokens), and "
            f"the data's are those of {tokenizer.name} ({tokenizer.vocab_size} tokens), where a token stands for "
            f"another text; give data of the same tokenizer, or resume_allow=[data]"
        )


def _write(tokenizer: Tokenizer, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # that of an earlier start, which may have had other files
    folder.mkdir(parents=True)
    for name, content in tokenizer.files().items():
        write_whole(folder / name, content)
