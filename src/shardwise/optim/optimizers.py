"""Builds the Plan's optimizer and schedule, for modules that define none."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial, wraps
from itertools import chain
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn, optim
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shardwise.config.schema import remedy_for_text
from shardwise.config.targets import locate
from shardwise.distributed.mesh import gather_objects
from shardwise.errors import ConfigError, describe_error
from shardwise.optim.matrices import LAYERS, Matrices, muon_groups
from shardwise.plan import Plan
from shardwise.protocols import optional

_STEPS_OF_A_TRIAL = 1000  # for which a schedule is tried where max_epochs says the length
_ELEMENTWISE = (optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad,
                optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD)  # fmt: skip


def treats_weights_one_by_one(optimizer: Optimizer) -> bool:
    """Whether the optimizer gives the same result if its parameters are cut into any pieces."""
    # A subclass may have a step of its own, such as one that looks at the norm of each gradient.
    known = isinstance(optimizer, _ELEMENTWISE) and _step_is_of_torch(type(optimizer))
    return known or type(optimizer).__module__.startswith("deepspeed.") or bool(optional(optimizer, "is_elementwise"))


def _step_is_of_torch(kind: type[Optimizer]) -> bool:
    """Whether torch's own step runs: a step that names nothing but `super().step` can only call it."""
    for parent in kind.__mro__:
        step = inspect.unwrap(vars(parent).get("step", Optimizer))
        if str(step.__module__).startswith("torch.optim.") and step is not Optimizer:
            return True
        if isinstance(step, FunctionType):
            code = step.__code__
            has_more = any(isinstance(constant, CodeType) for constant in code.co_consts)
            if has_more or not set(code.co_names) <= {"super", "step"}:
                return False
    return False


def steps_on_shards(optimizer: Optimizer) -> bool:
    """Whether the optimizer gives the same result if each rank gives it some rows of every parameter."""
    return treats_weights_one_by_one(optimizer) or bool(
        optional(optimizer, "is_rowwise") or optional(optimizer, "use_matrices")
    )


def use_matrices(optimizer: Optimizer, make: Callable[[], Matrices]) -> None:
    """Let an optimizer that needs whole matrices compute with what `make` gives."""
    if optional(optimizer, "use_matrices") is not None:
        optimizer.use_matrices(make())  # type: ignore[attr-defined]


def check_by_hand(optimizer: Optimizer, strategy_name: str) -> None:
    """Refuse an optimizer that needs plain tensors, where a module that optimizes by hand gives it DTensors.

    Raises:
        ConfigError: the optimizer is one of shardwise's.
    """
    if optional(optimizer, "make_state") is not None:
        raise ConfigError(
            f"{type(optimizer).__name__} in a module that optimizes by hand: under {strategy_name} it would be given "
            f"sharded tensors; use AdamW or SGD there, or strategy=ddp"
        )


def step_without_closure(optimizer: Optimizer, module_name: str, **arguments: Any) -> None:
    """Step behind the closure, so that bad gradients are found before weights change.

    Raises:
        ConfigError: the optimizer asks for the closure.
    """
    around = getattr(optimizer, "around_step", nullcontext)  # what the strategy puts around it
    try:
        with around():
            optimizer.step(**arguments)
    except Exception as error:
        if "closure" not in str(error):
            raise
        raise ConfigError(
            f"{module_name} uses {type(optimizer).__name__}, whose step asks for a closure ({describe_error(error)}): "
            f"set self.automatic_optimization = False and step it in training_step, or use another optimizer"
        ) from error


def check_of_parts(optimizer: Optimizer) -> None:
    """Refuse an optimizer that needs rows or whole matrices, of which tensor parallelism leaves each rank a part.

    Raises:
        ConfigError: the optimizer does not treat every weight by itself.
    """
    if not treats_weights_one_by_one(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} computes with rows or whole matrices, of which each rank has a part under "
            f"strategy.tensor_parallel_size: use AdamW or SGD, or leave it out"
        )


def try_optimizer(plan: Plan) -> None:
    """Build optimizer and schedule for one small matrix, so that they can refuse their values before the run starts.

    Raises:
        ConfigError: a value that they refuse.
    """
    if plan.optimizer is None or plan.stage != "fit":
        return
    try:
        steps = plan.max_steps or _STEPS_OF_A_TRIAL
        made = configure_optimizers(plan, nn.Linear(2, 2, bias=False), {"weight"}, steps)
        if plan.topology.tensor > 1:
            check_of_parts(made if isinstance(made, Optimizer) else made["optimizer"])
        if plan.schedule is not None:
            float(made["lr_scheduler"]["scheduler"].lr_lambdas[0](steps - 1))
    except (TypeError, ValueError, ArithmeticError) as error:
        nodes = {"optimizer": plan.optimizer, "schedule": plan.schedule or {}}
        for word, node in nodes.items():
            for key, value in node.items():
                if isinstance(error, TypeError) and key != "_target_" and isinstance(value, str):
                    raise ConfigError(f"{word}.{key}={value}: must be a number{remedy_for_text(value)}") from error
        every = {f"{word}.{k}={v}": k for word, node in nodes.items() for k, v in node.items() if k != "_target_"}
        named = [given for given, key in every.items() if re.search(rf"\b{re.escape(key)}=", str(error))]
        given = named[0] if len(named) == 1 else f"one of {' '.join(named or every)}"
        raise ConfigError(f"optimizer or schedule: {error}; mend {given}") from error


def configure_optimizers(
    plan: Plan, module: nn.Module, matrices: Collection[str] = (), steps: int | None = None
) -> Any:
    """Build the Plan's optimizer over `parameter_groups`, and its schedule, which moves on after every step.

    `matrices`: the names of the parameters that Muon has, if it is the optimizer. `steps`: of the run; the schedule
    needs it.
    """
    assert plan.optimizer is not None
    arguments = {key: value for key, value in plan.optimizer.items() if key != "_target_"}
    optimizer_class = locate(plan.optimizer["_target_"], "optimizer")
    if plan.strategy.offload_optimizer and optimizer_class in (torch.optim.Adam, torch.optim.AdamW):
        from shardwise.optim.deepspeed import cpu_adam

        if (built := cpu_adam(plan)) is not None:
            arguments |= {"adamw_mode": optimizer_class is torch.optim.AdamW}
            optimizer_class = built
    if plan.accelerator == "cuda" and not plan.strategy.offload_optimizer:
        # In torch 2.11 the fused SGD does not work on DTensors.
        whole = () if plan.capabilities.uses_dtensors else (torch.optim.SGD,)
        if optimizer_class in (torch.optim.Adam, torch.optim.AdamW, *whole):
            arguments.setdefault("fused", True)
    groups = parameter_groups(module, arguments.get("weight_decay", 0.0))
    if optional(optimizer_class, "use_matrices") is not None:
        groups = muon_groups(groups, [p for name, p in module.named_parameters() if name in matrices])
    optimizer = optimizer_class(groups, **arguments)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer._target_={plan.optimizer['_target_']} is not a torch.optim.Optimizer")
    if isinstance(optimizer, optim.SGD) and arguments.get("fused"):
        optimizer.register_step_pre_hook(_begin_momentum)
    if plan.schedule is None:
        return optimizer
    options = {key: value for key, value in plan.schedule.items() if key != "_target_"}
    factor = partial(locate(plan.schedule["_target_"], "schedule"), total_steps=steps, **options)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}


def _begin_momentum(optimizer: Optimizer, *_: Any) -> None:
    """Let the momentum of a weight that steps for the first time be zero, which changes no step.

    torch's fused SGD takes momentum of all weights or of none: it would fail where a weight is thawed during a run. And
    if the first step is one that `found_inf` skips, its momentum is whatever was in memory.
    """
    for group in optimizer.param_groups:
        if group["momentum"] and not group["dampening"]:
            for p in group["params"]:
                if p.grad is not None and optimizer.state[p].get("momentum_buffer") is None:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


def muon_matrices(plan: Plan) -> str | list[str] | None:
    """What the Plan says about which matrices Muon has; None: it has another optimizer."""
    node = plan.optimizer
    if node is None or plan.stage != "fit" or not optional(locate(node["_target_"], "optimizer"), "use_matrices"):
        return None
    found: str | list[str] = node.get("matrices", LAYERS)
    return found


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Sort the trainable parameters into two groups: matrices decay; norms, biases and embeddings do not.

    A head that is tied to an embedding counts as an embedding.
    """
    embeddings = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    decay: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for parameter in module.parameters():
        if parameter.requires_grad:
            (rest if parameter.ndim < 2 or id(parameter) in embeddings else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def check_one_owner(optimizers: list[Optimizer], module_name: str) -> None:
    """Refuse a parameter that is in two optimizers, since a checkpoint holds one state of each parameter.

    Raises:
        ConfigError: a parameter is in two optimizers.
    """
    owned = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    if len(set(owned)) < len(owned):
        raise ConfigError(
            f"{module_name}: a parameter is in two optimizers, and a checkpoint holds one state of each; give "
            f"it to one of them, or checkpoint=none"
        )


def order_alike(module: LightningModule, optimizers: list[Optimizer], group: dist.ProcessGroup | None) -> None:
    """Put the parameters of each group into the module's order, where ranks have them in different orders. Collective.

    A group that was made of a Python set is ordered by addresses in memory. DeepSpeed would add up the gradients of
    different parameters.

    Args:
        group: all hosts; None where there is one rank.
    """
    place = {id(p): number for number, p in enumerate(module.parameters())}
    groups = [params["params"] for optimizer in optimizers for params in optimizer.param_groups]
    orders = gather_objects(group, [[place.get(id(p), -1) for p in params] for params in groups]) if group else []
    if any(order != orders[0] for order in orders):
        for params in groups:
            params.sort(key=lambda p: place.get(id(p), len(place)))
        if dist.get_rank() == 0:
            print(
                "ranks had the optimizer's groups in different orders, as of a Python set: they have the module's now"
            )


def step_schedules_unless(module: LightningModule, skipped: Callable[[], bool]) -> None:
    """Keep the module's schedules where they are after a step that was skipped."""
    schedule_step = module.lr_scheduler_step

    @wraps(schedule_step)
    def unless_skipped(*args: Any, **kwargs: Any) -> None:
        if not skipped():
            schedule_step(*args, **kwargs)

    module.lr_scheduler_step = unless_skipped  # type: ignore[method-assign]


class NewWeights:
    """Lets weights that an optimizer gets in mid-run begin without the gradients that the steps before have left.

    Lightning forgets gradients in front of a backward pass, when they are there. Here that is done behind a step.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()  # ids

    def forget_gradients(self, optimizers: list[Optimizer]) -> None:
        """In front of a step."""
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        if sum(map(len, groups)) == len(self._known):
            return
        for p in chain.from_iterable(groups) if self._known else ():
            if id(p) not in self._known:
                p.grad = None
        self._known = {id(p) for p in chain.from_iterable(groups)}


# Checks that either the module or the config defines the optimizer, and the data.

_LOADERS = {"fit": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader",
            "predict": "predict_dataloader"}  # fmt: skip


def check_ownership(plan: Plan, module: Any) -> None:
    """Check who defines the optimizer and the data.

    `module`: a LightningModule, or its class. If the target is a function, only its result can be checked.

    Raises:
        ConfigError: both define an optimizer, neither defines one, or neither defines the data.
    """
    target = plan.module["_target_"]
    brings_optimizer = _defines(module, "configure_optimizers")
    if brings_optimizer and plan.optimizer is not None and not plan.optimizer_override:
        raise ConfigError(
            f"{target} has configure_optimizers, and optimizer={plan.optimizer.get('_target_')} is "
            f"given as well: use optimizer=none schedule=none, or optimizer_override=true to overrule the module"
        )
    if not brings_optimizer and plan.optimizer is None and plan.stage == "fit":
        raise ConfigError(f"{target} has no configure_optimizers, and optimizer is none: give optimizer=adamw")
    loader = _LOADERS[plan.stage]
    if plan.data is None and not _defines(module, loader):
        raise ConfigError(
            f"{target} has no {loader}, and no data is given: give data._target_=package.Data, a LightningDataModule, "
            f"or define {loader} in the module"
        )


def _defines(module: Any, name: str) -> bool:
    method = getattr(module, name, None)
    return method is not None and getattr(method, "__func__", method) is not getattr(LightningModule, name)


# Clips gradients by their norm: within the step of the optimizer where its kernel can, else in a pass of its own.


def clip_by_norm(gradients: list[Tensor], norm: Tensor, most: float, within: Optimizer | None = None) -> None:
    """Scale `gradients` in place as `torch.nn.utils.clip_grad_norm_` does, so that their norm is at most `most`.

    A pass of its own reads and writes all gradients. torch's fused Adam and AdamW divide them by a number while they
    update the weights, and write them too, so that they are the same after the step. Both ways give the same bits,
    since one rank alone may have to take the other one.

    Args:
        gradients: of one rank.
        norm: a scalar, the norm of the gradients of all ranks.
        within: the optimizer that steps next, before which nothing looks at the gradients; None: clip now.
    """
    if not gradients:
        return
    divisor = ((norm + 1e-6) / most).clamp(min=1.0)
    if within is not None and _divides(within, gradients, divisor):
        within.grad_scale = divisor  # type: ignore[attr-defined]
    else:
        torch._foreach_div_(gradients, divisor)


def after_step(optimizer: Optimizer) -> None:
    """Forget what `clip_by_norm` has left for the step."""
    optimizer.__dict__.pop("grad_scale", None)


def _divides(optimizer: Optimizer, gradients: list[Tensor], divisor: Tensor) -> bool:
    """Whether its kernel can, and no hook sees the gradients before that.

    It reads the divisor as fp32. Gradients in fp64 would lose digits; in 16 bits they would be rounded differently.
    """
    return (
        type(optimizer) in (Adam, AdamW)
        and all(group["fused"] for group in optimizer.param_groups)
        and all(tensor.dtype == torch.float32 for tensor in (divisor, *gradients))
        and not _hooks_of_others(optimizer)
    )


def _hooks_of_others(optimizer: Optimizer) -> int:
    own = hasattr(optimizer, "sharded_parameters")  # strategies/fsdp_step.py has one
    return len(optimizer._optimizer_step_pre_hooks) - own + len(_global_optimizer_pre_hooks)


def has_hooks_of_others(optimizer: Optimizer) -> bool:
    """Whether hooks that shardwise has not registered run before or after each step of `optimizer`."""
    own = hasattr(optimizer, "sharded_parameters")
    behind = len(optimizer._optimizer_step_post_hooks) - own + len(_global_optimizer_post_hooks)
    return _hooks_of_others(optimizer) + behind > 0
