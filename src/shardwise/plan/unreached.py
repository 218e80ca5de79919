"""What a Plan asks for and its run is too short to reach: the peak of a learning rate, or a metric to monitor."""

from __future__ import annotations

from shardwise.plan.plan import Plan


def explain_unreached(plan: Plan) -> list[str]:
    """Lines for the user. Such a run is valid all the same: it may be a short trial of a long one."""
    if plan.stage != "fit" or plan.quick_check or plan.find_learning_rate:
        return []
    lines, steps, every = [], plan.max_steps, plan.validate_every_n_steps
    schedule, optimizer = plan.schedule or {}, plan.optimizer or {}
    warmup = schedule.get("warmup_steps")
    ours = str(schedule.get("_target_")).startswith("shardwise.schedules.")
    if ours and isinstance(warmup, int) and steps is not None and warmup > steps:
        peak = f"optimizer.lr={optimizer.get('lr')}"
        if plan.resume is not None:  # the checkpoint's holds, which is not known here
            peak = "the rate that its run began with"
        lines.append(
            f"schedule.warmup_steps={warmup} is more than max_steps={steps}: the learning rate rises to the end, and "
            f"reaches {steps / warmup:.3g} of {peak}"
        )
    unmeasured = ""
    if plan.max_validation_batches == 0:
        unmeasured = "max_validation_batches=0 leaves validation out"
    elif every is not None and steps is not None and every > steps:
        unmeasured = f"validate_every_n_steps={every} is more than max_steps={steps}"
    if plan.checkpoint.monitor is not None and unmeasured:
        lines.append(
            f"checkpoint.monitor={plan.checkpoint.monitor} is not measured in this run, so it chooses no best "
            f"checkpoint: {unmeasured}"
        )
    return lines
