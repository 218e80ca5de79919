"""What torchtitan imports when harness/titan.py runs it: our models in its words, and our random tokens, so that it
needs no tokenizer and no data set."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.models import llama3
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.protocols.train_spec import register_train_spec

from benchmarks.harness.data import RandomTokens

FLAVORS = {
    # Of Llama 3.2 1B; torchtitan ties no embeddings
    "1.5B": TransformerModelArgs(
        dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.5, multiple_of=256, rope_theta=500000
    ),
    "8B": llama3.llama3_args["8B"],
}


class Batches(BaseDataLoader):  # type: ignore[misc]
    """`RandomTokens` as torchtitan takes them."""

    def __init__(self, data: RandomTokens, rank: int, ranks: int) -> None:
        self.data, self.rank, self.ranks = data, rank, ranks

    def __iter__(self) -> Iterator[Any]:
        for batch in self.data.batches_of(self.rank, self.ranks):
            yield {"input": batch["tokens"]}, batch["targets"]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def build_batches(*, job_config: Any, dp_rank: int, dp_world_size: int, **_: Any) -> Batches:
    training = job_config.training
    vocabulary = FLAVORS[job_config.model.flavor].vocab_size
    return Batches(RandomTokens(training.local_batch_size, training.seq_len, vocabulary), dp_rank, dp_world_size)


register_train_spec(
    "race",
    dataclasses.replace(
        llama3.get_train_spec(), model_args=FLAVORS, build_dataloader_fn=build_batches, build_tokenizer_fn=None,
        state_dict_adapter=None,
    ),
)  # fmt: skip
