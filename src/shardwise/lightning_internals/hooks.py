"""Calls only the hooks that somebody has overridden, and replaces Lightning's fetcher of batches (`WindowFetcher`).

Lightning calls every hook of module, strategy and callbacks, also those that do nothing, under a profiler that records
nothing, and with two assignments through `nn.Module.__setattr__`. That is done about 70 times a step, which makes short
steps slower.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.loops import fit_loop, utilities
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import Optimizer

from shardwise.distributed.rng import derived_seed, random_state, seed_streams, set_random_state
from shardwise.errors import ConfigError, class_name
from shardwise.lightning_internals.results import step_logging
from shardwise.protocols import optional

_original_fetcher = utilities._select_data_fetcher
_original_callback_hooks = call._call_callback_hooks
_MONITORING = (EarlyStopping, Checkpoint)  # which Lightning calls last at the end of an epoch
_original_module_hook, _original_strategy_hook = call._call_lightning_module_hook, call._call_strategy_hook

# LightningModule's own versions of these hooks do nothing.
_EMPTY = ("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward",
          "on_after_backward", "on_before_optimizer_step")  # fmt: skip
_ENDS_OF_EVALUATION = ("on_validation_batch_end", "on_test_batch_end", "on_predict_batch_end")
_END = "on_train_batch_end"  # checkpoints are saved after the module's own hook


class Unprofiled(PassThroughProfiler):
    """A profiler that records nothing, and makes no object for each hook."""

    _nothing = nullcontext()

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        return self._nothing


def install_fast_hooks(trainer: Trainer, module: LightningModule) -> None:
    """Install these hooks on `trainer` for good. Callbacks may be added until it starts."""
    trainer._callbacks_with = {}  # type: ignore[attr-defined] # (hook, number of callbacks) → see `_having`
    trainer._known_hooks = {}  # type: ignore[attr-defined] # (host, hook) → see `_known`
    trainer._draws = {}  # type: ignore[attr-defined] # see `_begin`
    trainer._idle_hooks = set()  # type: ignore[attr-defined] # the module's hooks that do nothing
    fit_loop._select_data_fetcher = _fetcher  # type: ignore[attr-defined]
    call._call_callback_hooks = _callback_hooks
    call._call_lightning_module_hook, call._call_strategy_hook = _module_hook, _strategy_hook
    takes_index: list[bool] = []  # whether training_step takes batch_idx: found at the first batch

    def build_kwargs(kwargs: dict[str, Any], batch: Any, batch_idx: int) -> dict[str, Any]:
        if not takes_index:
            takes_index.append(is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2))
        kwargs["batch"] = batch
        if takes_index[0]:
            kwargs["batch_idx"] = batch_idx
        return kwargs

    trainer.fit_loop.epoch_loop._build_kwargs = build_kwargs  # type: ignore[assignment,method-assign]


class WindowFetcher(_DataFetcher):
    """Fetches no batch ahead. `TrainLoader` reads whole windows, and knows the last one also without a length."""

    def __next__(self) -> Any:
        batch = super().__next__()
        self.done = self.done or any(getattr(loader, "has_ended", False) for loader in self.combined_loader.flattened)
        return batch


def _fetcher(trainer: Any, stage: Any) -> _DataFetcher:
    if not hasattr(trainer, "_callbacks_with"):
        return _original_fetcher(trainer, stage)
    if is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True):
        raise ConfigError(
            f"{class_name(trainer.lightning_module)}.training_step takes dataloader_iter: a step's micro-batches "
            f"are weighed before the first of them is computed, so they are fetched here; take batch and batch_idx"
        )
    return WindowFetcher()


def _callback_hooks(trainer: Any, hook_name: str, *args: Any, monitoring_callbacks: Any = None, **kwargs: Any) -> None:
    known = getattr(trainer, "_callbacks_with", None)
    if known is not None and monitoring_callbacks:  # these look at metrics at the end of an epoch
        step_logging(trainer).share_metrics()
    if known is None:
        _original_callback_hooks(trainer, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)
        return
    if monitoring_callbacks is not None:
        having, wanted = _having(trainer, hook_name)[0], bool(monitoring_callbacks)
        _call(trainer, [c for c in having if isinstance(c, _MONITORING) is wanted], hook_name, *args, **kwargs)
        return
    if hook_name == "on_fit_start":
        trainer._checkpoint_connector._restore_modules_and_callbacks(trainer.strategy.plan.resume)
    if hook_name == "on_train_start":  # after the set-up all hooks are known
        known.clear()
        module = trainer.lightning_module
        idle = {name for name in _EMPTY if not has_own(name, module)}
        if module.automatic_optimization and not (
            has_own("optimizer_step", module) or has_own("optimizer_zero_grad", module)
        ):
            idle.add("optimizer_zero_grad")  # the strategy does it after each step
        trainer._idle_hooks = idle
        draw_alike_in_steps(trainer)
    _call(trainer, _having(trainer, hook_name)[0], hook_name, *args, **kwargs)


def _having(trainer: Any, hook_name: str) -> tuple[list[Callback], list[Callback]]:
    """The callbacks that have this hook: those called before the module's own hook, and those called after it."""
    key = hook_name, len(trainer.callbacks)
    if key not in trainer._callbacks_with:
        having = [c for c in trainer.callbacks if is_overridden(hook_name, c, Callback) or hook_name in vars(c)]
        last = [c for c in having if hook_name == _END and getattr(c, "ends_step", False)]
        trainer._callbacks_with[key] = [c for c in having if c not in last], last
    found: tuple[list[Callback], list[Callback]] = trainer._callbacks_with[key]
    return found


def _call(trainer: Any, callbacks: list[Callback], hook_name: str, *args: Any, **kwargs: Any) -> None:
    if not callbacks:
        return
    module = trainer.lightning_module
    before, module.__dict__["_current_fx_name"] = module._current_fx_name, hook_name
    for callback in callbacks:
        with _around(trainer, callback, hook_name):
            getattr(callback, hook_name)(trainer, module, *args, **kwargs)
    module.__dict__["_current_fx_name"] = before


def _around(trainer: Any, host: Any, hook_name: str) -> AbstractContextManager[Any]:
    """What is put around a hook: whole weights, random numbers that all ranks draw, layers in low precision."""
    if getattr(trainer, "_known_hooks", None) is None or type(host).__module__.startswith("shardwise."):
        return nullcontext()
    key = id(host), hook_name
    if key not in trainer._known_hooks:
        trainer._known_hooks[key] = _known(trainer, host, hook_name)
    whole, purpose, runs_layers = trainer._known_hooks[key]
    strategy: Any = trainer.strategy
    around = strategy.weights.around_hook(hook_name, whole=whole) if strategy.weights.hides else nullcontext()
    more = strategy.weights.outside_steps() if runs_layers else []
    if purpose is not None:
        more = [*more, drawn_alike(trainer, purpose, whole=hook_name not in LOOK_AT_GRADIENTS)]
    return _all_of(around, *more) if more else around


def _known(trainer: Any, host: Any, hook_name: str) -> tuple[bool, str | None, bool]:
    """Whether it sees whole weights, for what purpose it draws what all ranks draw, whether it may run layers."""
    strategy, module = trainer.strategy, trainer.lightning_module
    whole = strategy.weights.hides and sees_whole_weights(host, hook_name, strategy.plan.whole_weights_in)
    # The next batch's hook draws for samples, which differ between ranks. Others may draw for weights.
    for_weights = has_weights(hook_name) and is_of_training(hook_name) and hook_name != "on_train_batch_start"
    alike = trainer.world_size > 1 and is_users(host, hook_name) and (for_weights or hook_name in LOOK_AT_GRADIENTS)
    purpose = f"{hook_name} of {class_name(host)}" if alike else None
    return whole, purpose, may_run_layers(hook_name, module.automatic_optimization)


@contextmanager
def _all_of(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _is_fast(trainer: Any) -> bool:
    """Whether hooks are called directly. With a profiler Lightning calls them, under the names of the hooks."""
    return hasattr(trainer, "_callbacks_with") and isinstance(trainer.profiler, Unprofiled)


def is_hooked(trainer: Any, hook_name: str) -> bool:
    """Whether a callback or the module does something in this hook."""
    return any(_having(trainer, hook_name)) or has_own(hook_name, trainer.lightning_module)


def current_hook(module: LightningModule) -> str | None:
    """The name of the hook or step that runs now."""
    name: str | None = module._current_fx_name
    return name


def _module_hook(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    if hook_name == _END and hasattr(trainer, "_callbacks_with"):
        if hook_name not in trainer._idle_hooks:
            with _around(trainer, trainer.lightning_module, hook_name):
                _named(trainer.lightning_module, hook_name, trainer.lightning_module, *args, **kwargs)
        _call(trainer, _having(trainer, hook_name)[1], hook_name, *args, **kwargs)
        return None
    if hook_name in getattr(trainer, "_idle_hooks", ()):
        return None
    module = trainer.lightning_module
    with _around(trainer, module, hook_name) if "pl_module" not in kwargs else nullcontext():
        if not _is_fast(trainer) or "pl_module" in kwargs:
            output = _original_module_hook(trainer, hook_name, *args, **kwargs)
        else:
            output = _named(module, hook_name, module, *args, **kwargs)
    if hook_name in _ENDS_OF_EVALUATION and hasattr(trainer, "_callbacks_with"):
        trainer.strategy.evaluation.end_batch()  # callbacks have been called before
    if hook_name == "on_train_batch_start" and output == -1 and hasattr(trainer, "_callbacks_with"):
        raise ConfigError(
            f"{trainer.strategy.module_name}.on_train_batch_start returned -1, which skips the rest of the epoch: here "
            f"the next epoch would begin with the samples that were skipped; leave samples out in the data set"
        )
    return output


def _strategy_hook(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    if not _is_fast(trainer):
        return _original_strategy_hook(trainer, hook_name, *args, **kwargs)
    return _named(trainer.lightning_module, hook_name, trainer.strategy, *args, **kwargs)


def _named(module: LightningModule, hook_name: str, host: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a hook and set its name, which `self.log` reads."""
    before, module.__dict__["_current_fx_name"] = module._current_fx_name, hook_name
    output = getattr(host, hook_name)(*args, **kwargs)
    module.__dict__["_current_fx_name"] = before
    return output


# Which hooks see whole weights under strategies that shard them: those of a run, an epoch, a validation, a checkpoint.
#
# Hooks of a batch or of a step see what the strategy has there.

# These hooks look at gradients, which belong to the shards. In on_before_zero_grad there are none any more.
_OF_GRADIENTS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")
# In these they have been computed, and may be changed.
LOOK_AT_GRADIENTS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
# In these, weights and gradients are in the strategy's hands. The last ones are called where Lightning's do all, too.
NOT_GATHERED = (*LOOK_AT_GRADIENTS, "on_before_backward", "optimizer_step", "lr_scheduler_step")
_OF_LIGHTNING = ("configure_gradient_clipping", "optimizer_step", "lr_scheduler_step")
_OF_BATCH_TRANSFER = ("on_before_batch_transfer", "on_after_batch_transfer")
# Hooks of a batch in which `whole_weights_in` may ask for whole weights.
OF_BATCHES = ("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", *(
    f"on_{stage}_batch_{when}" for stage in ("validation", "test", "predict") for when in ("start", "end")
))  # fmt: skip
_OURS = ("lightning", "shardwise")  # whose hooks do without whole weights


def has_weights(hook: str) -> bool:
    """Whether a hook of this name comes where weights may be whole. Every rank calls it (unlike `prepare_data`)."""
    return hook.startswith("on_") and hook not in (*_OF_GRADIENTS, *_OF_BATCH_TRANSFER, "on_exception")


def of_longer_than_batches(hook: str) -> bool:
    """Whether it is a hook of a run, of an epoch, of a validation or of a checkpoint."""
    return has_weights(hook) and hook not in OF_BATCHES


def sees_whole_weights(host: LightningModule | Callback, hook: str, chosen: Sequence[str] | None) -> bool:
    """Whether weights are made whole for `hook` of `host`. `chosen`: the run's `whole_weights_in`; None: the host's."""
    chosen = optional(host, "whole_weights_in") if chosen is None else chosen
    return (of_longer_than_batches(hook) if chosen is None else hook in chosen) and is_users(host, hook)


def is_users(host: Any, hook: str) -> bool:
    """Whether the code of this hook is the user's."""
    function = inspect.unwrap(getattr(host, hook))
    module = str(getattr(function, "__module__", None) or type(host).__module__)
    return module.partition(".")[0] not in _OURS


def runs_own_code(hook: str, module: LightningModule) -> bool:
    """Whether `hook`, one of `NOT_GATHERED`, runs code that is not Lightning's, if it is called."""
    return hook not in _OF_LIGHTNING or has_own(hook, module)


def has_own(hook: str, module: LightningModule) -> bool:
    """Whether the module has overridden the hook, in its class or by an attribute."""
    return is_overridden(hook, module) or hook in vars(module)


def may_run_layers(hook: str, automatic: bool) -> bool:
    """Whether a hook of this name can run layers outside of a step, and runs no step itself (as `optimizer_step` does).

    `automatic`: whether Lightning optimizes. A module that does so by hand calls the hooks of gradients in its step.
    """
    return has_weights(hook) or (automatic and hook in (*_OF_GRADIENTS, "lr_scheduler_step"))


# What is drawn at random for weights is the same on all ranks that have a copy of them.
#
# Each rank has random streams of its own, so that dropout differs between ranks. Noise that a hook adds to weights or
# gradients, or that an optimizer draws in its step, would make copies of the weights different models. So such code
# draws from other streams. They depend on the seed, the hook and the number of batches: a run that goes on draws the
# same.

_EVALUATION = ("on_validation", "on_test", "on_predict")  # their hooks draw for samples, which differ between ranks
_DRAW_NOTHING = ("torch.optim.", "shardwise.", "deepspeed.")  # in their steps


def is_of_training(hook: str) -> bool:
    return not hook.startswith(_EVALUATION)


@contextmanager
def drawn_alike(trainer: Any, purpose: str, *, whole: bool) -> Iterator[None]:
    """Draw from the streams for `purpose` inside. `whole`: for whole weights, else for what this rank has of them."""
    before = _begin(trainer, purpose, whole)
    try:
        yield
    finally:
        set_random_state(before, trainer.strategy.root_device)


def draw_alike_in_steps(trainer: Any) -> None:
    """Let optimizers of the user's draw alike in their steps."""
    if trainer.world_size == 1:
        return
    for number, optimizer in enumerate(trainer.strategy.optimizers):
        if isinstance(optimizer, Optimizer) and not type(optimizer).__module__.startswith(_DRAW_NOTHING):
            _watch(trainer, optimizer, f"step of optimizer {number}")


def _begin(trainer: Any, purpose: str, whole: bool) -> dict[str, Any]:
    """Returns the state of this rank's own streams."""
    strategy = trainer.strategy
    # Ranks of a tensor axis have the same norms. Their parts of matrices get the same noise.
    copies = strategy.plan.topology.groups(("replicate", "tensor"))
    part = 0 if whole else next(ranks[0] for ranks in copies if strategy.global_rank in ranks)
    clock = trainer.fit_loop.total_batch_idx + 1, trainer.global_step
    calls = trainer._draws  # purpose → when it drew last, and how often it did so then
    at, times = calls.get(purpose, (None, 0))
    calls[purpose] = clock, (times + 1 if at == clock else 0)
    before = random_state(strategy.root_device)
    seed_streams(derived_seed(strategy.plan.seed, purpose, part, *clock, calls[purpose][1]))
    return before


def _watch(trainer: Any, optimizer: Optimizer, purpose: str) -> None:
    before: list[dict[str, Any]] = []

    def begin(*_: Any) -> None:
        before.append(_begin(trainer, purpose, whole=False))  # a step that calls super().step() begins twice

    def end(*_: Any) -> None:
        set_random_state(before.pop(), trainer.strategy.root_device)

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(end)
