"""What only GPUs can show, in one command: foreign modules over NCCL, bf16 beside fp32, samples, a first speed.

    make gpu-test                              all GPUs of this machine, and 2 of them
    python benchmarks/parity_gpu.py --ranks 2  two

Writes benchmarks/results/parity-<gpu>-x<ranks>.json. Runs on CPU too (--accelerator cpu), for trying it out.
Parity: parity_matrix.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])

import torch  # noqa: E402

from shardwise.metrics.csv_logger import read_metrics  # noqa: E402
from shardwise.run_dir.environment import describe_environment  # noqa: E402
from tests.harness import backward, scalars  # noqa: E402
from tests.harness.anybodys_module import BOUNDS as MODULE_BOUNDS  # noqa: E402
from tests.harness.anybodys_module import KINDS, RANKS, deviations, run_all  # noqa: E402
from tests.harness.processes import spawn  # noqa: E402


def modules(ranks: int, accelerator: str, folder: Path) -> list[dict[str, Any]]:
    """Modules of kinds that people bring (BatchNorm, Hugging Face, a GAN, unused weights), on two ranks."""
    if ranks != RANKS:
        return []
    cells = spawn(ranks, run_all, folder / "modules", ranks, accelerator, timeout_seconds=400)[0]
    rows = []
    for module in KINDS:
        own = {key: cell for key, cell in cells.items() if key[0] == module}
        for (strategy, precision), (update, buffer) in deviations(module, own, folder / "reference").items():
            bounds = MODULE_BOUNDS[precision]
            rows.append({"module": module, "strategy": strategy, "precision": precision, "update": update,
                         "buffer": buffer, "holds": update <= bounds[0] and buffer <= bounds[1]})  # fmt: skip
    return rows


def _bound(on_cpus: dict[str, float], precision: str) -> float:
    """In 16 bits GPUs choose other kernels for other strategies: the bound of any module's there."""
    return MODULE_BOUNDS["bf16"][0] if precision in ("bf16", "fp16") else on_cpus[precision]


def beside_ddp(ranks: int, accelerator: str, folder: Path) -> list[dict[str, Any]]:
    """Second derivatives, views, objects between layers, and scalar parameters: the largest deviation of an update
    from that under ddp on the same devices."""
    if ranks != RANKS:
        return []
    of_backward = spawn(ranks, backward.run, folder / "backward", accelerator, timeout_seconds=400)[0]
    of_scalars = spawn(ranks, scalars.run, folder / "scalars", accelerator, timeout_seconds=400)[0]
    rows = []
    for key in backward.CELLS:
        module, strategy, precision, *words = key
        bound, update = _bound(backward.BOUNDS, precision), backward.off(of_backward, key)
        rows.append({"module": " ".join([module, *words]), "strategy": strategy, "precision": precision,
                     "update": update, "bound": bound, "holds": update <= bound})  # fmt: skip
    for strategy, precision in scalars.CELLS:
        bound = _bound(scalars.BOUNDS, precision)
        update = scalars.off(of_scalars, (strategy, precision), ("ddp", precision))
        rows.append({"module": "Scalars", "strategy": strategy, "precision": precision, "update": update,
                     "bound": bound, "holds": update <= bound})  # fmt: skip
    return rows


def train(folder: Path, name: str, *words: str, timeout: int = 240) -> dict[str, Any]:
    """`python train.py …` as a user types it; its metrics, summary, Plan and samples."""
    command = ["python", "train.py", f"name={name}", f"runs_dir={folder}", *words]
    done = subprocess.run(
        [sys.executable, *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )
    run = folder / name
    if done.returncode:
        return {"command": " ".join(command), "exit_code": done.returncode, "stderr": done.stderr[-4000:]}
    rows = read_metrics(run / "metrics.csv")
    samples = run / "samples.txt"
    return {
        "command": " ".join(w for w in command if not w.startswith(("runs_dir", "data.directory"))),
        "exit_code": 0,
        "curve": [[int(r["step"]), float(r["train/loss"])] for r in rows if r.get("train/loss")],
        "validation": [[int(r["step"]), float(r["validation/loss"])] for r in rows if r.get("validation/loss")],
        "tokens_per_second": [float(r["train/tokens_per_second"]) for r in rows if r.get("train/tokens_per_second")],
        "peak_memory_gib": json.loads((run / "summary.json").read_text()).get("peak_memory_gib"),
        "sample": samples.read_text().split("=== ")[-1] if samples.exists() else None,
        "plan": json.loads((run / "plan.json").read_text()),
    }


def curves(ranks: int, accelerator: str, folder: Path) -> dict[str, Any]:
    """The default recipe, fp32 and bf16 under each strategy; the sample is generated by all ranks together."""
    hybrid = ["strategy=fsdp_hybrid", f"strategy.shard_size={max(1, ranks // 2)}"]
    common = [f"devices={ranks}", f"accelerator={accelerator}", "log_every_n_steps=10", "max_steps=200"]
    return {
        f"{words[0].removeprefix('strategy=')}-{precision}": train(
            folder, f"{words[0].removeprefix('strategy=')}-{precision}", *words, f"precision={precision}", *common
        )
        for words in (["strategy=ddp"], ["strategy=fsdp"], hybrid)
        for precision in ("fp32", "bf16")
    }


def speed(ranks: int, folder: Path) -> dict[str, Any]:
    """Eager Llama-3 sizes on random tokens, sequence 8192, micro-batch 1, no activation checkpointing."""
    import numpy as np

    from shardwise.data.tokens import write_token_shards

    rng = np.random.default_rng(0)
    shards = {s: [rng.integers(0, 128256, n)] for s, n in (("train", 8192 * 400 + 1), ("validation", 8192 * 8 + 1))}
    write_token_shards(folder / "random", shards, vocab_size=128256, description="uniform random tokens")
    common = ["data=token_shards", f"data.directory={folder / 'random'}", f"devices={ranks}", "precision=bf16",
              "micro_batch_size=1", f"global_batch_size={ranks}", "max_steps=16", "log_every_n_steps=4",
              "module.sample_tokens=0", "max_validation_batches=1", "validate_every_n_steps=16", "schedule=none",
              "checkpoint.save_every_n_steps=null", "checkpoint.monitor=null", "optimizer.lr=1e-4"]  # fmt: skip
    runs = {
        "llama3_1b-ddp": ["model=llama3_1b", "strategy=ddp"],
        "llama3_1b-fsdp": ["model=llama3_1b", "strategy=fsdp"],
    }
    if ranks >= 4:
        runs["llama3_8b-fsdp"] = ["model=llama3_8b", "strategy=fsdp"]
    return {name: train(folder, name, *words, *common, "checkpoint=none") for name, words in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", help="comma-separated; default: 2 and all")
    parser.add_argument("--accelerator", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--sections", default="modules,beside_ddp,curves,speed")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--commit", help="of this code, where it was copied without its history")
    arguments = parser.parse_args()
    there = torch.cuda.device_count()
    ranks = [int(r) for r in arguments.ranks.split(",")] if arguments.ranks else sorted({min(2, there), there})
    environment = describe_environment()
    gpu = environment["gpus"][0] if environment["gpus"] else "cpu"
    del environment["hostname"]
    environment["commit"] = arguments.commit or environment["commit"]
    for number in ranks:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            result: dict[str, Any] = {
                "command": f"python benchmarks/parity_gpu.py --ranks {number}",
                "ranks": number,
                "environment": environment,
            }
            path = arguments.out / f"parity-{re.sub(r'[^a-z0-9]+', '-', gpu.lower())}-x{number}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            for section in arguments.sections.split(","):
                match section:
                    case "modules":
                        result["modules"] = modules(number, arguments.accelerator, folder)
                        for row in result["modules"]:
                            told = f"{row['update']:.1e}  {row['buffer']:.1e}  holds: {row['holds']}"
                            print(f"{number} ranks  {row['module']:<9}{row['precision']}  {row['strategy']:<12}{told}")
                    case "beside_ddp":
                        result["beside_ddp"] = beside_ddp(number, arguments.accelerator, folder)
                        for row in result["beside_ddp"]:
                            print(f"{number} ranks  {row}", flush=True)
                    case "curves":
                        result["curves"] = curves(number, arguments.accelerator, folder)
                    case "speed":
                        result["speed"] = speed(number, folder)
                runs = {} if section in ("modules", "beside_ddp") else result[section]
                for run, values in runs.items():
                    if values["exit_code"]:
                        print(f"{number} ranks  {run}: exit code {values['exit_code']}\n{values['stderr']}", flush=True)
                    else:
                        losses = f"loss {values['curve'][0][1]:.3f} → {values['curve'][-1][1]:.3f}"
                        rate = f"{values['tokens_per_second'][-1]:,.0f} tokens/s, {values['peak_memory_gib']} GiB"
                        print(f"{number} ranks  {run}: {losses}, {rate}", flush=True)
                path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
