"""Weights in hooks under ZeRO. Where they are made whole, writes into trained ones are refused.

DeepSpeed's next step overwrites these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError
from shardwise.lightning_internals.hooks import has_weights, is_of_training
from shardwise.strategies.weights_in_hooks import WeightsInHooks
from shardwise.strategies.zero.empty_weights import EmptyWeightsRefused
from shardwise.strategies.zero.internals import gathered, kept_gathered

_WATCHED = 8  # steps of each kind in which reads of empty weights are refused: each call of torch takes a little longer


class ZeroWeights(WeightsInHooks):
    """Weights that are in DeepSpeed's hands."""

    hides = True
    strategy: Any

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self._before_evaluation: dict[str, float] | None = None  # the norm of each trained weight
        self._steps_of: Counter[str] = Counter()  # how many steps of each kind this process has begun

    def around_step(self, name: str) -> AbstractContextManager[Any]:
        """What is put around the step `name`: in the first ones, reads of empty weights are refused."""
        self._steps_of[name] += 1
        # What is compiled would be compiled once more; a resumed run computes its steps as it did before
        is_watched = self._steps_of[name] <= _WATCHED and self.plan.compile.name == "none"
        if self.plan.zero_stage < 3 or not is_watched:
            return nullcontext()
        return self.refusing_empty(f"{self.name}.{name}")

    def around_hook(self, hook: str, *, whole: bool) -> AbstractContextManager[None]:
        around = super().around_hook(hook, whole=whole)
        if self.plan.zero_stage < 3 or not has_weights(hook):
            return around
        return self._refusing_empty_around(around, f"{hook} of {self.name} or of a callback")

    @contextmanager
    def _refusing_empty_around(self, around: AbstractContextManager[None], where: str) -> Iterator[None]:
        with around, self.refusing_empty(where):
            yield

    def refusing_empty(self, where: str) -> EmptyWeightsRefused:
        return EmptyWeightsRefused(self._names, where)

    @cached_property
    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self.module.named_parameters()}

    @contextmanager
    def make_whole(self, hook: str) -> Iterator[None]:
        """Gather the weights for a hook. It may write into frozen parameters, such as an average.

        DeepSpeed's next step overwrites trained ones: who sets others for an evaluation puts them back at its end.
        """
        trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        with self._gathered(list(trained.values())):
            before = _norms(trained)
            if self.strategy.groups is None:
                yield
            else:
                with self.strategy.groups.shown():
                    yield
            after = _norms(trained)
        if is_of_training(hook) or hook.endswith("model_train"):  # that one comes at the end of an evaluation
            self._refuse_writes(before, after, hook)
        else:
            self._before_evaluation = self._before_evaluation or before

    def check_evaluation(self) -> None:
        before, self._before_evaluation = self._before_evaluation, None
        if before is not None:
            trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
            with self._gathered(list(trained.values())):
                self._refuse_writes(before, _norms(trained), "validation, and does not put back what was there")

    def _refuse_writes(self, before: dict[str, float], after: dict[str, float], where: str) -> None:
        # NaN differs from itself, and is no sign of a write.
        changed = [name for name, norm in after.items() if norm != before[name] and not math.isnan(norm)]
        if changed and self.strategy.state.is_training:
            raise ConfigError(
                f"{self.name} or a callback writes into {', '.join(changed[:4])} in {where}: under "
                f"{self.plan.strategy.name} trained weights are in DeepSpeed's hands, and this would be lost; use "
                f"strategy=ddp or fsdp"
            )

    @contextmanager
    def _gathered(self, trained: list[nn.Parameter]) -> Iterator[None]:
        if self.plan.zero_stage < 3:
            yield
            return
        with gathered(self.strategy.model, self.module, trained):
            yield

    def _bytes_to_gather(self) -> int:
        if self.plan.zero_stage < 3:
            return 0
        parameters: list[Any] = list(self.module.parameters())
        return sum(p.ds_numel * p.element_size() for p in parameters if hasattr(p, "ds_numel"))

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        with kept_gathered(self.strategy.model, self.module), self.strategy.order.paused():
            yield


def _norms(parameters: dict[str, nn.Parameter]) -> dict[str, float]:
    """One number for each tensor, which shows a write through p.data."""
    filled = {name: p.detach() for name, p in parameters.items() if p.numel()}
    if not filled:
        return {}
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(list(filled.values()))])
    return dict(zip(filled, norms.tolist(), strict=True))
