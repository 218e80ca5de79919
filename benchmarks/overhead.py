"""What the Trainer itself costs: the same steps in a plain loop, under stock Lightning and here.

    python benchmarks/overhead.py                             1 GPU, and all of this machine
    python benchmarks/overhead.py --accelerator cpu           1 and 2 processes
    python benchmarks/overhead.py --ranks 2 --sections llm    the other sections stay in the file

`host`: a step with hardly any arithmetic. `gpu2ms`: steps of which the GPU needs 2 ms, of few kernels (three wide
layers) and of many (five, bf16 under autocast). `llm`: language models, compared with a plain loop alone. `sync`: fsdp
that reduces gradients in every micro-batch, and at the end of the accumulation window. `watching`: both kinds of steps
here with telemetry, verdicts and Prometheus, and without. Writes
benchmarks/results/overhead-<device>-x<ranks>.json after every part. Each part has processes of its own and a time
limit, and one that fails is recorded with its error. `--tiny` is for trying it out on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.harness import contenders, results  # noqa: E402
from benchmarks.harness.clock import DataClock, summary  # noqa: E402
from benchmarks.harness.data import NO_CORPUS, Held, batch_of_tokens, pinned  # noqa: E402
from benchmarks.harness.device import device_of, free_memory, peaks_gib  # noqa: E402
from benchmarks.harness.limits import note, noted, on_ranks  # noqa: E402
from benchmarks.harness.plain_loops import CLIP, host_ms  # noqa: E402
from benchmarks.harness.trainers import TINY_LANGUAGE_MODEL, on_all, resolve  # noqa: E402
from shardwise.distributed.mesh import init_process_group  # noqa: E402
from shardwise.parallel.precision import set_matmul_mode  # noqa: E402
from shardwise.plan import Plan  # noqa: E402
from shardwise.rank import quiet_lightning  # noqa: E402

FEW, MANY = "gpu2ms few kernels", "gpu2ms many kernels"
WATCHING, WATCHING_LLM = contenders.WATCHING, contenders.WATCHING_LLM
SECTIONS = {"host": ["host"], "gpu2ms": [FEW, MANY], "llm": ["llm"], "sync": ["sync"],
            "watching": [WATCHING, WATCHING_LLM]}  # fmt: skip
OF_MODELS = ("llm", "sync", WATCHING_LLM)
ACCUMULATE = 4  # sync
PRECISION = {"host": "fp32", WATCHING: "fp32", FEW: "tf32", MANY: "bf16"}
WANTED_MS = 2.0  # gpu2ms
NOTHING_ELSE = ["checkpoint=none", f"validate_every_n_steps={contenders.NEVER}", f"gradient_clip_val={CLIP}"]

LLM = [
    "schedule=none", "optimizer.lr=1e-4", "module.sample_tokens=0", "data._target_=benchmarks.harness.data.Held",
    *NO_CORPUS, "precision=bf16",
]  # fmt: skip
MODELS = {
    "gpt2_124m": ["model=gpt2_124m", "model.max_seq_len=2048", "data.sequence_length=2048", "micro_batch_size=8"],
    "llama3_1b": ["model=llama3_1b", "data.sequence_length=2048", "micro_batch_size=4"],
}


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    warm_up: int
    timed: int
    rounds: int
    layers: int = 4
    width: int = 64
    rows: int = 8
    limit_seconds: float = 100


SIZES = {
    "host": Size(warm_up=50, timed=500, rounds=5, layers=3, limit_seconds=180),
    # `rows` is where calibrating starts
    FEW: Size(warm_up=50, timed=500, rounds=4, layers=2, width=8192, rows=1024),
    MANY: Size(warm_up=50, timed=500, rounds=4, width=2048, rows=4096),
    "llm": Size(warm_up=10, timed=30, rounds=4, limit_seconds=180),
    WATCHING: Size(warm_up=50, timed=1000, rounds=8, layers=3, limit_seconds=180),
    WATCHING_LLM: Size(warm_up=10, timed=40, rounds=6, limit_seconds=180),
    "sync": Size(warm_up=2 * ACCUMULATE, timed=10 * ACCUMULATE, rounds=2, limit_seconds=180),  # micro-batches
}
TINY_SIZES = {
    "host": Size(warm_up=5, timed=20, rounds=2, layers=3),
    FEW: Size(warm_up=3, timed=10, rounds=2, layers=2, width=64, rows=256),
    MANY: Size(warm_up=3, timed=10, rounds=2, width=64, rows=256),
    "llm": Size(warm_up=2, timed=4, rounds=2),
    WATCHING: Size(warm_up=5, timed=20, rounds=2, layers=3),
    WATCHING_LLM: Size(warm_up=2, timed=4, rounds=2),
    "sync": Size(warm_up=ACCUMULATE, timed=2 * ACCUMULATE, rounds=2),
}


# One part, in each of its ranks


@dataclass(frozen=True)
class Part:
    """What is measured in one group of processes."""

    section: str
    ranks: int
    accelerator: str
    size: Size
    model: str = ""
    strategy: str = "ddp"
    tiny: bool = False

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.section, self.model, self.model and self.strategy)))

    @property
    def device(self) -> torch.device:
        return device_of(self.accelerator)

    def clock(self) -> DataClock:
        return DataClock(self.device, self.size.warm_up, self.size.timed)

    @property
    def who(self) -> tuple[str, ...]:
        return contenders.OF_SECTION.get(self.section, contenders.OF_SMALL_STEPS)

    @property
    def accumulate(self) -> int:
        return ACCUMULATE if self.section == "sync" else 1

    def overrides(self) -> list[str]:
        if self.section in OF_MODELS:
            return [*LLM, *MODELS[self.model], *(TINY_LANGUAGE_MODEL if self.tiny else []), f"strategy={self.strategy}"]
        fused = str(self.accelerator == "cuda").lower()
        return ["recipe=custom", "module._target_=benchmarks.harness.contenders.Mlp",
                "data._target_=benchmarks.harness.data.Held", f"+module.layers={self.size.layers}",
                f"+module.width={self.size.width}", f"+module.fused={fused}",
                "micro_batch_size=8", "strategy=ddp",
                f"precision={PRECISION[self.section] if self.accelerator == 'cuda' else 'fp32'}"]  # fmt: skip

    def plan(self, folder: Path) -> Plan:
        words = [*self.overrides(), *NOTHING_ELSE, f"max_steps={self.clock().steps}"]
        return resolve(on_all(words, self.ranks, self.accumulate), self.accelerator, folder, "base")

    def batch(self, plan: Plan, rows: int) -> Any:
        if self.section in OF_MODELS:
            return pinned(batch_of_tokens(plan), self.device)
        return pinned(torch.randn(rows, contenders.FEATURES, generator=torch.Generator().manual_seed(0)), self.device)


def run_contender(part: Part, plan: Plan, contender: str, rows: int) -> dict[str, float]:
    """Seconds per step: see `DataClock`."""
    every = 10 if contender in contenders.LOGGING else contenders.NEVER
    plan = replace(plan, run_dir=f"{plan.run_dir}-{time.monotonic_ns()}", log_every_n_steps=every)
    Path(plan.run_dir).mkdir(parents=True, exist_ok=True)
    clock = part.clock()
    data = Held(part.batch(plan, rows), plan.micro_batch_size, clock.tick)
    contenders.train(contender, plan, data, clock, language_model=part.section == "llm")
    return clock.result()


def calibrated(part: Part, plan: Plan) -> int:
    """Rows of a batch with which a step of the plain loop takes `WANTED_MS`, the same on every rank."""
    rows, size = part.size.rows, part.size
    short = replace(part, size=replace(size, warm_up=size.warm_up // 2, timed=size.timed // 10))
    for _ in range(3):
        found = run_contender(short, plan, contenders.PLAIN, rows)
        seconds = torch.tensor(found["seconds_per_step"], device=part.device)
        if part.ranks > 1:
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
        rows = min(max(256, round(rows * WANTED_MS / 1e3 / float(seconds) / 256) * 256), 16 * part.size.rows)
    return rows


def measure(part: Part, folder: Path) -> None:
    """The contenders take turns, round after round, since the speed of a shared machine varies. Rank 0 writes rows."""
    quiet_lightning()
    plan = part.plan(folder)
    init_process_group(plan)
    set_matmul_mode(plan.precision)
    rows = part.size.rows
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        if part.section in (FEW, MANY):
            rows = calibrated(part, plan)
            note(folder, {"rows": rows, "plain_host_ms": host_ms(plan, part.batch(plan, rows), part.device)})
        began = time.perf_counter()
        for number in range(part.size.rounds):
            # No rank begins a round that would not end in time.
            spent = torch.tensor(time.perf_counter() - began, device=part.device)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            if float(spent) * (number + 1) > 0.8 * part.size.limit_seconds * max(number, 1):
                break
            for contender in part.who:
                note(folder, measured(part, plan, contender, rows) | {"round": number})


def measured(part: Part, plan: Plan, contender: str, rows: int) -> dict[str, Any]:
    free_memory(part.device)
    dist.barrier()
    row: dict[str, Any] = {"contender": contender}
    environment = dict(os.environ)
    try:
        row |= run_contender(part, plan, contender, rows) | peaks_gib(part.device)
    except Exception as error:  # the others are measured all the same
        traceback.print_exc()
        row["error"] = f"{type(error).__name__}: {error}"[:500]
        error.__traceback__ = None  # its frames hold tensors
    finally:
        os.environ |= environment  # stock Lightning takes WORLD_SIZE and its like away when it is done
    return row


# All parts


def parts_of(arguments: argparse.Namespace, ranks: int) -> list[Part]:
    """The parts that the command line asks for, as far as this machine can measure them."""
    found = []
    for section in [part for name in arguments.sections.split(",") for part in SECTIONS[name]]:
        if section in ("host", WATCHING) or arguments.accelerator == "cuda" or arguments.tiny:
            found += parts_of_section(section, ranks, arguments.accelerator, arguments.tiny)
        else:
            print(f"{ranks} ranks  {section}: needs a GPU", flush=True)
    return [part for part in found if re.search(arguments.only, part.name)]


def parts_of_section(section: str, ranks: int, accelerator: str, tiny: bool) -> list[Part]:
    size = (TINY_SIZES if tiny else SIZES)[section]
    if section not in OF_MODELS:
        return [Part(section, ranks, accelerator, size, tiny=tiny)]
    strategies = ("fsdp",) if section == "sync" else ("ddp", "fsdp") if ranks > 1 else ("ddp",)
    return [Part(section, ranks, accelerator, size, m, s, tiny) for m in MODELS for s in strategies]


def result_of(part: Part, commit: str | None) -> dict[str, Any]:
    """Measures a part in processes of its own. If they fail, the result has the error and what was measured before."""
    began = time.perf_counter()
    result: dict[str, Any] = {"overrides": part.overrides(), "size": asdict(part.size), "commit": commit}
    with tempfile.TemporaryDirectory() as name:
        try:
            on_ranks(part.ranks, measure, part, Path(name), timeout_seconds=part.size.limit_seconds)
        except Exception as error:
            result["error"] = str(error)[-1500:].replace(f"{ROOT}/", "")
        rows = noted(Path(name))
    for row in (row for row in rows if "contender" not in row):
        result |= row
    result["contenders"] = {who: summary([r for r in rows if r.get("contender") == who]) for who in part.who}
    result["seconds"] = round(time.perf_counter() - began, 1)
    return result


def show(part: Part, result: dict[str, Any]) -> None:
    for who, row in result["contenders"].items():
        words = f"{row['seconds_per_step'] * 1e6:,.0f} µs" if "seconds_per_step" in row else row["error"]
        print(f"{part.ranks} ranks  {part.name}  {who}: {words}", flush=True)
    for words in [*([result["error"]] if "error" in result else []), f"{result['seconds']} s"]:
        print(f"{part.ranks} ranks  {part.name}: {words}", flush=True)


def main() -> None:
    parser = results.command_line(__doc__)
    parser.add_argument("--ranks", type=results.numbers, help="comma-separated; default: 1 and all GPUs; CPU: 1 and 2")
    parser.add_argument("--sections", default="host,gpu2ms,llm")
    parser.add_argument("--only", default="", help="a regular expression: parts to measure; the others stay")
    parser.add_argument("--tiny", action="store_true", help="sizes for trying it out, on a CPU too")
    arguments = parser.parse_args()
    cuda = arguments.accelerator == "cuda"
    environment, device = results.measured_on(arguments.accelerator, arguments.commit)
    environment["cpus"] = os.cpu_count()
    for ranks in arguments.ranks or sorted({1, torch.cuda.device_count() if cuda else 2}):
        path = arguments.out / f"overhead-{device}-x{ranks}.json"
        earlier = json.loads(path.read_text()) if path.exists() else {"parts": {}}
        command = "python benchmarks/overhead.py" + " --accelerator cpu" * (not cuda) + f" --ranks {ranks}"
        content = {
            "command": command + " --tiny" * arguments.tiny,
            "ranks": ranks,
            "tiny": arguments.tiny,
            "environment": environment,
            "settings": {"gradient_clip_val": CLIP, "learning": "AdamW"},
            "parts": earlier["parts"],
        }
        for part in parts_of(arguments, ranks):
            content["parts"][part.name] = result_of(part, environment["commit"])
            results.write(path, content)
            show(part, content["parts"][part.name])


if __name__ == "__main__":
    main()
