"""Weights in hooks under ZeRO. They are whole where a hook looks at them, also in the hooks of a step.

DeepSpeed's next step overwrites what is written into trained weights, so that is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.lightning_internals.drawn_alike import is_of_training
from shardwise.lightning_internals.hook_analysis import OF_STEPS
from shardwise.strategies.base import PlannedStrategy
from shardwise.strategies.zero.groups import ParameterGroups
from shardwise.strategies.zero.internals import gathered


class HooksUnderZero(PlannedStrategy):
    """The part of a ZeRO strategy that is put around hooks."""

    hides_weights = True
    weights_in_steps = OF_STEPS
    groups: ParameterGroups | None = None  # of the optimizer, in training
    _before_evaluation: dict[str, float] | None = None  # the norm of each trained weight
    # In the module's optimizer_step weights are whole before and after the step, if it looks at them.
    _step_looks = False
    _whole: AbstractContextManager[None] | None = None

    def around_hook(self, hook: str, *, looks: bool) -> AbstractContextManager[None]:
        if hook == "optimizer_step":
            return self._around_optimizer_step(looks)
        return super().around_hook(hook, looks=looks)

    @contextmanager
    def _around_optimizer_step(self, looks: bool) -> Iterator[None]:
        self._step_looks = looks
        self._make_whole()
        yield  # an error ends the run
        self._make_parts()
        self._step_looks = False

    def _make_whole(self) -> None:
        if self._step_looks and self._whole is None:
            self._whole = self.whole_parameters("optimizer_step")
            self._whole.__enter__()

    def _make_parts(self) -> None:
        whole, self._whole = self._whole, None
        if whole is not None:
            whole.__exit__(None, None, None)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._make_parts()
        if "training_step" not in self.reads or self.groups is None:
            return super().training_step(*args, **kwargs)
        with self.groups.shown():
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)
        self.order.end()
        self._make_whole()  # the module may have called the closure by itself, and step later
        return loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        self._make_parts()
        looks, self._step_looks = self._step_looks, False  # the closure is called within
        if self.groups is not None:
            self.groups.check()
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._step_looks = looks
        self._make_whole()
        return result

    @contextmanager
    def whole_parameters(self, hook: str) -> Iterator[None]:
        """Gather the weights for a hook. It may write into frozen parameters, such as an average.

        DeepSpeed's next step overwrites trained ones: who sets others for an evaluation puts them back at its end.
        """
        trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        with self._gathered(list(trained.values())):
            before = _norms(trained)
            if self.groups is None:
                yield
            else:
                with self.groups.shown():
                    yield
            after = _norms(trained)
        if is_of_training(hook) or hook.endswith("model_train"):  # that one comes at the end of an evaluation
            self._refuse_writes(before, after, hook)
        else:
            self._before_evaluation = self._before_evaluation or before

    def on_validation_end(self) -> None:
        """Check the weights, after the hooks of module and callbacks."""
        super().on_validation_end()
        self._check_evaluation()

    def _check_evaluation(self) -> None:
        before, self._before_evaluation = self._before_evaluation, None
        if before is not None:
            trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
            with self._gathered(list(trained.values())):
                self._refuse_writes(before, _norms(trained), "validation, and does not put back what was there")

    def _refuse_writes(self, before: dict[str, float], after: dict[str, float], where: str) -> None:
        # NaN differs from itself, and is no sign of a write.
        changed = [name for name, norm in after.items() if norm != before[name] and not math.isnan(norm)]
        if changed and self.state.is_training:
            raise ConfigError(
                f"{self.module_name} or a callback writes into {', '.join(changed[:4])} in {where}: under "
                f"{self.plan.strategy.name} trained weights are in DeepSpeed's hands, and this would be lost; use "
                f"strategy=ddp or fsdp"
            )

    @contextmanager
    def _gathered(self, trained: list[nn.Parameter]) -> Iterator[None]:
        if self.plan.strategy.zero_stage < 3:
            yield
            return
        with gathered(self.model, self.module, trained):
            yield


def _norms(parameters: dict[str, nn.Parameter]) -> dict[str, float]:
    """One number for each tensor, which shows a write through p.data."""
    filled = {name: p.detach() for name, p in parameters.items() if p.numel()}
    if not filled:
        return {}
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(list(filled.values()))])
    return dict(zip(filled, norms.tolist(), strict=True))
