"""A run's state: taken for a checkpoint, and taken up again."""

from __future__ import annotations

from collections.abc import Iterator
from pickle import UnpicklingError

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from shardwise.checkpoint.plain import PLAIN, LeftOut

# What torch raises for a checkpoint that is cut short, holds code, or has other weights
_UNLOADABLE = (EOFError, OSError, RuntimeError, ValueError, LookupError, AssertionError, UnpicklingError,
               CheckpointException)  # fmt: skip


# Of Lightning's checkpoint: tensors have files of their own, and a class is no data
_NOT_SAVED = ("state_dict", "optimizer_states", "hparams_type", "datamodule_hparams_type")


# The config's own words, which nothing needs in order to go on: what is not plain data there goes without a word
_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")


# Down to which level a key that is not plain data is left out by itself
_DEPTHS = {"loops": 9, "optimizers": 9, "callbacks": 2, "lr_schedulers": 2, "layers": 1,
           **dict.fromkeys(_HYPERPARAMETERS, 1)}  # fmt: skip


def _in_words(left_out: list[LeftOut]) -> str:
    pickled = [str(left) for left in left_out if left.pickled]
    lost = [str(left) for left in left_out if not left.pickled]
    said = []
    if pickled:
        said.append(
            f"{', '.join(pickled)}: not plain data, so it is kept in trainer.unsafe.pkl, a pickle, which is read only "
            f"where trust=true is given; a run that goes on without it does not get it"
        )
    if lost:
        said.append(f"{', '.join(lost)}: not plain data, and it cannot be pickled: it is left out")
    return f"{'; '.join(said)} ({PLAIN})"


def _with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers that keep something besides parameters and buffers."""
    for name, layer in module.named_modules():
        if type(layer).get_extra_state is not nn.Module.get_extra_state:
            yield name, layer
