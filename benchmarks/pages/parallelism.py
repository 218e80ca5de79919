"""docs/parallelism.md: what the simulator and the arithmetic say."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.results import read
from benchmarks.pages.markdown import table
from shardwise.plan import parallel_costs as arithmetic
from shardwise.plan.pipeline import split_units, stage_costs
from shardwise.plan.pipeline_schedule import make_schedule, simulate

HEAD = 2.4  # layers of Llama 3 8 B


def schedules() -> list[str]:
    rows = []
    for micro_batches in (8, 32):
        for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)):
            line = simulate(make_schedule(name, 4, chunks, micro_batches))
            kept = ", ".join(f"{number / chunks:g}" for number in line.kept)
            rows.append([str(micro_batches), name, str(chunks), f"{line.bubble:.1%}", f"{line.idle:.1%}", kept])
    return table(["micro-batches", "schedule", "stages a rank", "bubble", "a rank waits", "kept, first to last"], rows)


def splits() -> list[str]:
    rows = []
    for split in ((8, 8, 8, 8), split_units([1.0] * 32, 4, behind=HEAD)):
        costs = stage_costs(split, [1.0] * 32, behind=HEAD)
        line = simulate(make_schedule("1f1b", 4, 1, 32), costs, [2 * cost for cost in costs])
        rows.append([", ".join(map(str, split)), f"{max(costs):g}", f"{1 + line.bubble:.2f} ×"])
    return table(["layers of the stages", "slowest, in layers", "time of a step over the ideal"], rows)


def costs() -> list[str]:
    """Llama 3 8 B: a layer's matrices and norms; embedding, head and the last norm; 128 samples in a step."""
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    ends = 2 * 128256 * 4096 + 4096
    shape = {"samples": 1, "tokens": 8192, "width": 4096}
    heads = {"heads": 32, "key_heads": 8}
    rows = []
    for tensor, context, pipeline in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 4), (2, 2, 2)):
        shards, layers = 8 // (tensor * pipeline), 32 // pipeline
        shape["micro_batches"] = micro_batches = 128 * context // shards
        # In a pipeline of two, each end has one of the two tables; in a longer one, the middle has neither
        parameters = (layers * layer + {1: ends, 2: ends / 2}.get(pipeline, 0)) / tensor
        sent = [
            arithmetic.pipeline_elements(context=context, tensor=tensor, **shape) if pipeline > 1 else 0,
            arithmetic.tensor_elements(layers=layers, context=context, tensor=tensor, **shape),
            arithmetic.context_elements_by_heads(layers=layers, context=context, tensor=tensor, **shape, **heads),
            # Gathered in 16 bits, reduced in 32
            arithmetic.fsdp_gathered_elements(parameters=parameters, shards=shards, gathers=2 * micro_batches)
            + 2 * arithmetic.fsdp_scattered_elements(parameters=parameters, shards=shards, micro_batches=micro_batches),
        ]
        if pipeline == 2:  # both ranks are at an end, and hand over in one direction each
            sent[0] /= 2
        state = arithmetic.state_bytes(parameters=parameters, shards=shards)
        words = [f"{size}" for size in (pipeline, shards // context, context, tensor, micro_batches)]
        rows.append([*words, *(f"{2 * elements / 1e9:,.1f}" for elements in sent), f"{state / 1e9:.1f}"])
    head = [
        "pipeline",
        "shard",
        "context",
        "tensor",
        "micro-batches",
        "GB sent: pipeline",
        "tensor",
        "context, by heads",
        "FSDP",
    ]
    return table([*head, "GB of weights, gradients and optimizer state"], rows)


def measured() -> list[str]:
    """Each layout beside FSDP2 on the same GPUs; and how far its losses in fp32 are from FSDP2's."""
    rows, worst, parity = [], 0.0, []
    for result in read("parallelism"):
        if not result["environment"]["gpus"]:
            continue
        gpus = f"{result['ranks']} × {result['environment']['gpus'][0].removeprefix('NVIDIA ')}"
        for name, row in result["rows"].items():
            if "deviation" in row:
                worst = max(worst, row["deviation"])
                parity += [gpus] if gpus not in parity else []
            if "profile" in row:
                model, _, layout = name.partition(" ")
                said, step, mesh = row["summary"], row["profile"], row["topology"]
                speed = said["tokens_per_second"] / mesh["nodes"] / mesh["devices"]
                parts = [f"{step[key]:.0f}" for key in ("span_ms", "exposed_communication_ms", "idle_ms")]
                peak = f"{said['peak_memory_gib']:.1f}"
                rows.append([gpus, model, layout, f"{speed:,.0f}", peak, _state(row), *parts, row["commit"]])
    if not rows:
        return ["Not run yet."]
    heads = ["GPUs", "model", "axis over all GPUs", "tokens/s/GPU", "peak reserved GiB", "state, and as stated, GB",
             "profiled step, ms", "exposed communication, ms", "idle, ms", "commit"]  # fmt: skip
    where = f"The largest deviation of a loss in fp32 from FSDP2's, on {' and '.join(parity)}: {worst:.1e}."
    return [where, "", *table(heads, rows)]


def _state(row: dict[str, Any]) -> str:
    """Weights, gradients and optimizer state of the rank that is furthest from what a dry run states."""
    state = row.get("state")
    if not state:
        return "–"
    pairs = zip(state["allocated"], state["stated"], strict=True)
    allocated, stated = max(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1))
    return f"{allocated / 1e9:.2f}, {stated / 1e9:.2f}"


TABLES = {"pipeline_schedules": schedules, "pipeline_splits": splits, "parallel_costs": costs,
          "parallel_measured": measured}  # fmt: skip
