"""What hooks see in a pipeline, and what is logged there: a stage has its own layers, and the last one has the loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from shardwise.errors import ConfigError
from shardwise.lightning_internals.hooks import LOOK_AT_GRADIENTS
from shardwise.lightning_internals.results import LoggedValue
from shardwise.parallel.pipeline.placeholders import NothingFromMeta, is_absent, refusal_of
from shardwise.strategies.fsdp_gathering import free_gathered
from shardwise.strategies.fsdp_weights import FsdpWeights

_ONE = "use strategy.pipeline_parallel_size=1"
_LOOK_AT_RESULTS = [f"on_{stage}_{when}" for stage in ("validation", "test") for when in ("batch_end", "epoch_end")]


class PipelinedWeights(FsdpWeights):
    """Weights of which a rank has those of its own stages."""

    strategy: Any

    def take_logged(self, logged: LoggedValue) -> Any:
        """Refuse what the last stage logs and does not have. Another stage's values are not looked at."""
        of = logged.value
        absent = of if is_absent(of) else absent_state(of) if isinstance(of, Metric) else None
        if absent is None:
            return super().take_logged(logged)
        if self.strategy.pipeline.is_last:
            raise refusal_of(absent, f"{self.name}: {logged.hook} logs {logged.name!r}, which comes from")
        return None

    @contextmanager
    def make_whole(self, hook: str) -> Iterator[None]:
        free_gathered(self.module)  # while each weight is where FSDP2 put it: a weight that stages share moves below
        try:
            meta: Any = NothingFromMeta  # other stages' weights have no memory
            with self.strategy.pipeline.stages.whole(), super().make_whole(hook), meta():
                yield
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error):
                raise
            raise ConfigError(
                f"{hook} of {self.name} or of a callback computes with weights of all layers, and in a pipeline "
                f"a rank has those of its own stage; {_ONE}, or shardwise export for the weights of a checkpoint"
            ) from error

    def around_hook(self, hook: str, *, whole: bool) -> AbstractContextManager[None]:
        if hook == "on_after_backward" and self.plan.strategy.reshard_after_forward is False:
            # It comes after each micro-batch, and sees shards and their gradients
            self.strategy.sharding.backwards.reshard()
        if hook == "on_before_zero_grad" and whole:
            raise ConfigError(
                f"whole_weights_in=[on_before_zero_grad]: in a pipeline this hook of {self.name} or of a "
                f"callback comes before all layers have run; do that in on_train_batch_end, or {_ONE}"
            )
        around = super().around_hook(hook, whole=whole)
        if hook in LOOK_AT_GRADIENTS:
            return self._showing_weights(around)
        if hook == "on_train_batch_end":
            return self._explaining_outputs(around)
        return (
            around
            if hook not in _LOOK_AT_RESULTS or self.strategy.pipeline.is_last
            else self._explaining_results(hook, around)
        )

    @contextmanager
    def _showing_weights(self, around: AbstractContextManager[None]) -> Iterator[None]:
        with self.strategy.pipeline.stages.shown(), around:
            yield

    @contextmanager
    def _explaining_outputs(self, around: AbstractContextManager[None]) -> Iterator[None]:
        """Say why what else training_step returns is not in the outputs that `on_train_batch_end` is given."""
        try:
            with around:
                yield
        except KeyError as error:
            raise ConfigError(
                f"on_train_batch_end of {self.name} or of a callback finds no {error}: in a pipeline the "
                f"micro-batches of a step run together, when the last of them has come, and what training_step returns "
                f"beside the loss is not kept; log it in training_step, or {_ONE}"
            ) from error

    @contextmanager
    def _explaining_results(self, hook: str, around: AbstractContextManager[None]) -> Iterator[None]:
        """Say why a hook fails that does not where there are results."""
        try:
            with around:
                yield
        except (TypeError, AttributeError, LookupError, ArithmeticError, ValueError, RuntimeError) as error:
            if isinstance(error, ConfigError) or (isinstance(error, RuntimeError) and "non-empty" not in str(error)):
                raise
            step = f"{hook.split('_')[1]}_step"
            raise ConfigError(
                f"{hook} of {self.name} or of a callback failed on a stage of the pipeline that has no results "
                f"({type(error).__name__}: {error}): {step} runs to its end on the last stage alone, so elsewhere its "
                f"outputs are None and lists that it fills are empty; let the hook do nothing there, or log in {step}"
            ) from error

    @contextmanager
    def kept_gathered(self) -> Iterator[None]:
        raise ConfigError(
            f"{self.name} generates text, which takes many passes through its layers, and a pipeline makes one "
            f"in a step; leave it out, or use strategy.pipeline_parallel_size=1"
        )
        yield


def absent_state(metric: Metric) -> Tensor | None:
    """A state of `metric` that was computed from numbers that are not here."""
    for name in metric.metric_state:
        state: Any = getattr(metric, name)
        for tensor in state if isinstance(state, list) else [state]:
            if isinstance(tensor, torch.Tensor) and is_absent(tensor):
                return tensor
    return None
