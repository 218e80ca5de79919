"""The override that a verdict names: one that this run can take as it is, since its Plan decides what is possible."""

from __future__ import annotations

from shardwise.plan import Plan


def more_workers(plan: Plan) -> str:
    """What makes data come sooner."""
    workers = (plan.data or {}).get("num_workers")
    if isinstance(workers, int):
        return f"data.num_workers={max(4, 2 * workers)} reads ahead with more processes"
    return "give the loader more workers (num_workers=), or data that need less work"


def compiled(plan: Plan, has_layers: bool) -> str | None:
    """How to compile a module that is not: by its layers, if some repeat. None: it is, or cannot be."""
    if plan.compile.name != "none" or (plan.capabilities.compiled_step and not has_layers):
        return None
    return "compile=layer" if has_layers else "compile=model"


def fewer_launches(plan: Plan, has_layers: bool) -> str:
    """What gives the host less to do for each step, or the device more."""
    if (word := compiled(plan, has_layers)) is not None:
        return f"{word} launches fewer kernels"
    if plan.accelerator == "cuda" and not plan.capabilities.cuda_graphs and not plan.compile.cudagraphs:
        return "compile.cudagraphs=true launches all kernels of a graph at once"
    return f"{larger_micro_batch(plan)} gives each kernel more to do"


def larger_micro_batch(plan: Plan) -> str:
    """The next larger micro-batch with which the global batch stays, or both of them doubled."""
    of_rank = plan.global_batch_size // plan.topology.data_parallel_size
    fits = (size for size in range(plan.micro_batch_size + 1, of_rank + 1) if of_rank % size == 0)
    if (size := next(fits, None)) is not None:
        return f"micro_batch_size={size} (global_batch_size={plan.global_batch_size} stays)"
    return f"micro_batch_size={2 * plan.micro_batch_size} global_batch_size={2 * plan.global_batch_size}"


def faster_products(plan: Plan) -> str:
    """What makes products of matrices faster that keep the tensor cores busy."""
    if plan.precision.fp8 is None and plan.accelerator == "cuda" and not plan.capabilities.fp8:
        return "precision=fp8 computes faster"
    return "only more GPUs are faster"


def measures_gpus(plan: Plan, what: str) -> str:
    """`what` preflight says of a GPU, as the end of a sentence; nothing where it does not know the GPUs."""
    return f"; preflight=true {what}" if plan.accelerator == "cuda" else ""
