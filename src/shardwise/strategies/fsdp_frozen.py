"""Lets a weight be frozen, or trained again, while FSDP2 has gathered its layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


def keep_frozen() -> Callable[[], None]:
    """From here on, the `requires_grad` that is set on a gathered weight holds for its shard. Returns the undoing.

    FSDP2 gives a gathered weight that of its shard, and not the other way round (as of torch 2.13). A step that takes a
    gradient with regard to its inputs while weights are frozen finds them gathered when it lets them be trained again.
    """
    gather, free, free_partly = FSDPParam.to_unsharded, FSDPParam.to_sharded, FSDPParam.to_sharded_post_forward

    def gathering(parameter: Any) -> None:
        gather(parameter)
        parameter.gathered_as = parameter.sharded_param.requires_grad

    def freeing(parameter: Any, original: Callable[[Any], None]) -> None:
        gathered, before = getattr(parameter, "_unsharded_param", None), getattr(parameter, "gathered_as", None)
        # If the shard's own has been changed meanwhile, that is what the user wants.
        if gathered is not None and before is not None and parameter.sharded_param.requires_grad == before:
            parameter.sharded_param.requires_grad_(gathered.requires_grad)
        parameter.gathered_as = None
        original(parameter)

    changes: dict[str, Callable[[Any], None]] = {
        "to_unsharded": gathering,
        "to_sharded": lambda parameter: freeing(parameter, free),
        "to_sharded_post_forward": lambda parameter: freeing(parameter, free_partly),
    }
    stack = ExitStack()
    for name, change in changes.items():
        stack.enter_context(patch.object(FSDPParam, name, change))
    return stack.close
