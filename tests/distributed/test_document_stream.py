"""The language model on a stream of text, on two ranks: a run that is resumed, and validation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.config.compose import compose
from shardwise.data.tokenizer import ByteTokenizer
from shardwise.data.tokens import write_token_shards
from shardwise.plan import Host, Plan
from shardwise.plan.resolve import make_plan
from tests.harness.cells import fit
from tests.harness.processes import spawn

STOP, STEPS = 6, 9  # an epoch has four steps


class Texts:
    def __init__(self, documents: int = 40) -> None:
        self.documents, self.start, self.at = documents, 0, -1

    def __iter__(self) -> Iterator[dict[str, str]]:
        for number in range(self.start, self.documents):
            self.at = number
            yield {"body": f"{number}: {'text ' * (number % 5)}"}

    def state_dict(self) -> dict[str, int]:
        return {"next": self.at + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["next"]


def plan_for(run_dir: Path, *words: str) -> Plan:
    run_dir.mkdir(exist_ok=True)
    argv = [
        "data=text_stream", f"data.source._target_={__name__}.Texts", "data.field=body", "data.num_workers=2",
        f"data.validation_directory={run_dir.parent / 'shards'}", "data.sequence_length=16", "model.max_seq_len=16",
        "model.dim=24", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=1", "model.ffn_dim=41",
        "module.sample_tokens=0", "micro_batch_size=2", "global_batch_size=8", "schedule=none", "strategy=fsdp",
        f"runs_dir={run_dir.parent}", f"name={run_dir.name}", "accelerator=cpu", "devices=2", "log_every_n_steps=1",
        f"validate_every_n_steps={STEPS}", f"checkpoint.save_every_n_steps={STOP}", "checkpoint.monitor=null", *words,
    ]  # fmt: skip
    return make_plan(compose(argv).jobs[0].config, Host(cuda_devices=0))


def run_all(folder: Path) -> list[dict[str, Any]]:
    """In each rank: without a stop, and with one in the second epoch."""
    straight = fit(plan_for(folder / "straight", f"max_steps={STEPS}"))
    fit(plan_for(folder / "stopped", f"max_steps={STOP}"))
    checkpoint = folder / "stopped" / "checkpoints" / f"step-{STOP:08d}.ckpt"
    return [straight, fit(plan_for(folder / "stopped", f"max_steps={STEPS}", f"resume={checkpoint}"))]


def test_a_resumed_run_reads_on_in_the_text(tmp_path: Path) -> None:
    text = np.frombuffer(b"held out text " * 20 + b"\0", np.uint8)
    splits = {"train": [text], "validation": [text]}
    write_token_shards(tmp_path / "shards", splits, vocab_size=256, tokenizer=ByteTokenizer())
    for straight, resumed in spawn(2, run_all, tmp_path):
        assert resumed["losses"] == straight["losses"]
        assert resumed["validation"] == straight["validation"]
        assert all(torch.equal(resumed["final"][name], weight) for name, weight in straight["final"].items())
        assert 0 < straight["validation"]["validation/loss"] < 7
