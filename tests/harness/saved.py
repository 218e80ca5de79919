"""Checkpoints without a run: a module's weights, written as a rank would write them. A tokenizer of few tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from lightning import LightningModule
from torch import Tensor

from shardwise.checkpoint.dcp import ChunkedTensor, TensorWriter, range_of
from shardwise.checkpoint.plain import Packed
from shardwise.checkpoint.publish import Snapshot, publish
from shardwise.checkpoint.state import persistent_buffers
from shardwise.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from shardwise.run_dir.files import checkpoint_path

END = "<|endoftext|>"
TEXT = ["once upon a time there was a größe, and 日本語 too; once more upon a time 🙂", "the end of the time"]


def save(run: Path, module: LightningModule, node: dict[str, Any], step: int = 3, average: bool = False) -> Path:
    """A checkpoint as a rank would write it, every tensor in two parts. There is a process group."""

    def parts(tensor: Tensor) -> ChunkedTensor:
        shape, flat = tuple(tensor.shape), tensor.detach().reshape(-1)
        cut = flat.numel() // 3
        return ChunkedTensor(shape, [*range_of(shape, 0, flat[:cut]), *range_of(shape, cut, flat[cut:])])

    tensors = {f"model.{name}": parts(tensor) for name, tensor in module.named_parameters()}
    tensors |= {f"model.{name}": parts(tensor) for name, tensor in persistent_buffers(module)}
    if average:
        tensors |= {f"average.{name}": parts(tensor + 1) for name, tensor in module.named_parameters()}
    tensors |= {f"optimizer.0.{name}.exp_avg": parts(tensor * 0) for name, tensor in module.named_parameters()}
    path = checkpoint_path(run, step)
    run.mkdir(exist_ok=True)
    (run / "plan.json").write_text(json.dumps({"module": node}))
    publish(path, Snapshot(tensors, Packed(), Packed(), {"step": step}, frozenset()), TensorWriter(None))
    return path


def trained_tokenizer(vocab_size: int = 300) -> Tokenizer:
    """A byte-level BPE of at least 257 tokens."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXT * 3,
        tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return HuggingFaceTokenizer(made.to_str(), {}, "trained")
