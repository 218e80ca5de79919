"""What a Plan asks for and its run is too short to reach: the peak of a learning rate, or a metric to monitor."""

from __future__ import annotations

from shardwise.plan.plan import Plan


def explain_unreached(plan: Plan) -> list[str]:
    """Lines for the user. Such a run is valid all the same: it may be a short trial of a long one."""
    if plan.stage != "fit" or plan.quick_check or plan.find_learning_rate:
        return []
    steps, every, epochs = plan.max_steps, plan.validate_every_n_steps, plan.validate_every_n_epochs
    lines = [] if steps is None else explain_warmup(plan, steps)
    unmeasured = ""
    if plan.max_validation_batches == 0:
        unmeasured = "max_validation_batches=0 leaves validation out"
    elif every is not None and steps is not None and every > steps:
        unmeasured = f"validate_every_n_steps={every} is more than max_steps={steps}"
    elif every is None and epochs is not None and plan.max_epochs is not None and epochs > plan.max_epochs:
        unmeasured = f"validate_every_n_epochs={epochs} is more than max_epochs={plan.max_epochs}"
    if plan.checkpoint.monitor is not None and unmeasured:
        lines.append(
            f"checkpoint.monitor={plan.checkpoint.monitor} is not measured in this run, so it chooses no best "
            f"checkpoint: {unmeasured}"
        )
    return lines


def explain_warmup(plan: Plan, steps: int) -> list[str]:
    """A line for the user where the warm-up is longer than the run of so many `steps`."""
    schedule, optimizer = plan.schedule or {}, plan.optimizer or {}
    warmup = schedule.get("warmup_steps")
    ours = str(schedule.get("_target_")).startswith("shardwise.schedules.")
    if not ours or not isinstance(warmup, int) or warmup <= steps:
        return []
    peak = f"optimizer.lr={optimizer.get('lr')}"
    if plan.resume is not None:  # the checkpoint's holds, which is not known here
        peak = "the rate that its run began with"
    length = f"max_steps={steps}" if plan.max_steps else f"the {steps} steps of max_epochs={plan.max_epochs}"
    return [
        f"schedule.warmup_steps={warmup} is more than {length}: the learning rate rises to the end, and "
        f"reaches {steps / warmup:.3g} of {peak}"
    ]
