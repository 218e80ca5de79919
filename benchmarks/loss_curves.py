"""Loss curves of a 110 M language model on this machine's Python source: number formats and optimizers beside bf16.

    python benchmarks/loss_curves.py                          on one GPU; needs tokenizers, and torchao for some rows
    python benchmarks/loss_curves.py --jobs 4                 four at a time: the losses are the same, times are not
    python benchmarks/loss_curves.py --only 'bf16|muon'       some of the curves; the others stay as recorded

Each curve is `python train.py` as a user would start it. bf16 runs with three seeds: what they differ by is what chance
does. Writes benchmarks/results/loss-curves-<gpu>.json after every curve.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.commands import environment_of_commands, train  # noqa: E402
from shardwise.run_dir.files import METRICS, read_rows  # noqa: E402

COMMON = [
    "data=token_shards", "model=gpt2_124m", "model.vocab_size=32768", "data.sequence_length=1024",
    "micro_batch_size=16", "global_batch_size=16", "strategy=ddp", "compile=model", "module.sample_tokens=0",
    "optimizer.lr=1e-3", "schedule.warmup_steps=50", "log_every_n_steps=10", "checkpoint=none", "devices=1",
    "max_validation_batches=16",
]  # fmt: skip
KERNELS = ["attention=fa4", "loss=fused"]  # flash-attn-4 and quack-kernels: what the fast experiments have
CURVES = {
    "bf16, seed 0": ["precision=bf16"],
    "bf16, seed 1": ["precision=bf16", "seed=1"],
    "bf16, seed 2": ["precision=bf16", "seed=2"],
    "fp32": ["precision=fp32"],
    "tf32": ["precision=tf32"],
    "fp8, tensorwise": ["precision=fp8"],
    "fp8, rowwise": ["precision=fp8", "precision.fp8.recipe=rowwise"],
    "bf16, FlashAttention 4, fused loss": ["precision=bf16", *KERNELS],
    "fp8, FlashAttention 4, fused loss": ["precision=fp8", *KERNELS],
    "8-bit AdamW": ["precision=bf16", "optimizer=adamw_8bit"],
    "AdamW, bf16 moments": ["precision=bf16", "optimizer=adamw_bf16"],
    "Muon": ["precision=bf16", "optimizer=muon"],
}
TINY = ["model.dim=32", "model.n_layers=2", "model.n_heads=2", "model.n_kv_heads=2", "model.ffn_dim=48",
        "data.sequence_length=64", "micro_batch_size=4", "global_batch_size=4", "compile=none"]  # fmt: skip


def write_text(folder: Path, megabytes: int) -> Path:
    """Python source of this machine as JSON lines, every file a document."""
    folders = [Path(sysconfig.get_path(name)) for name in ("purelib", "stdlib")]
    path, size = folder / "source.jsonl", 0
    with path.open("w", encoding="utf-8") as file:
        for source in sorted({p for f in folders for p in f.rglob("*.py")}):
            text = source.read_text(encoding="utf-8", errors="ignore").replace("<|endoftext|>", "")
            if text.strip() and size < megabytes * 1_000_000:
                size += file.write(json.dumps({"text": text}) + "\n")
    return path


def prepare(folder: Path, megabytes: int, vocabulary: int) -> dict[str, Any]:
    words = [f"input={write_text(folder, megabytes)}", "tokenizer=train", f"vocab_size={vocabulary}",
             "validation=0.02", f"output={folder / 'shards'}"]  # fmt: skip
    line = [sys.executable, "-m", "shardwise", "prepare", *words]
    subprocess.run(line, check=True, env=environment_of_commands(), cwd=ROOT)
    report = json.loads((folder / "shards/report.json").read_text())
    return {key: report[key] for key in ("documents", "tokens", "vocab_size")}


def curve(folder: Path, name: str, words: list[str], timeout: float) -> dict[str, Any]:
    run = re.sub(r"[^a-z0-9]+", "-", name.lower())
    given = [f"data.directory={folder / 'shards'}", f"runs_dir={folder / 'runs'}", f"name={run}"]
    started, log = time.perf_counter(), folder / f"{run}.log"
    code = train([*words, *given], log, timeout)
    found: dict[str, Any] = {"words": words, "exit_code": code, "seconds": round(time.perf_counter() - started, 1)}
    if code:
        return found | {"error": log.read_text()[-6000:]}
    rows = read_rows(folder / "runs" / run / METRICS)
    return found | {key: points(rows, column) for key, column in COLUMNS.items()}


COLUMNS = {"train": "train/loss", "validation": "validation/loss"}


def points(rows: list[dict[str, str]], column: str) -> list[tuple[int, float]]:
    return [(int(row["step"]), round(float(row[column]), 5)) for row in rows if row.get(column)]


def main() -> None:
    parser = results.command_line(__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--jobs", type=int, default=1, help="curves that are drawn at the same time, on one GPU")
    parser.add_argument("--megabytes", type=int, default=60, help="of text")
    parser.add_argument("--timeout", type=float, default=420, help="seconds for one curve")
    parser.add_argument("--tiny", action="store_true", help="a small model, for trying it out")
    parser.add_argument("--only", default="", help="a regular expression: curves to draw, the others stay as recorded")
    arguments = parser.parse_args()
    environment, device = results.measured_on(arguments.accelerator, arguments.commit)
    path = arguments.out / f"loss-curves-{device}.json"
    commit = environment.pop("commit")
    common = [*COMMON, f"max_steps={arguments.steps}", f"validate_every_n_steps={max(1, arguments.steps // 6)}",
              f"accelerator={arguments.accelerator}", *(TINY if arguments.tiny else [])]  # fmt: skip
    before = json.loads(path.read_text())["curves"] if path.exists() else {}
    result: dict[str, Any] = {
        "command": f"python benchmarks/loss_curves.py --steps {arguments.steps}",
        "environment": environment,
        "words": common,
        "curves": before,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result["text"] = prepare(folder, arguments.megabytes, 4096 if arguments.tiny else 32768)
        wanted = [title for title in CURVES if re.search(arguments.only, title)]

        def drawn(title: str) -> dict[str, Any]:
            return curve(folder, title, [*common, *CURVES[title]], arguments.timeout) | {"commit": commit}

        with ThreadPoolExecutor(arguments.jobs) as pool:
            tasks = {pool.submit(drawn, title): title for title in wanted}
            for task in as_completed(tasks):
                title, found = tasks[task], task.result()
                curves = result["curves"] | {title: found}
                result["curves"] = {title: curves[title] for title in CURVES if title in curves}
                results.write(path, result)
                last = found["validation"][-1:] if "validation" in found else found["error"][-300:]
                print(f"{title}: {last}, {found['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
