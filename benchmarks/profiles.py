"""Profiles of Llama 3 on GPUs, as cards for docs/profiling.md, and what the GPUs feel meanwhile.

    python benchmarks/profiles.py --ranks 1            Llama 3 1 B on one GPU under ddp, fsdp and zero3, 8 B under fsdp
    python benchmarks/profiles.py --ranks 2            that, and Llama 3 8 B under fsdp and zero3
    python benchmarks/profiles.py --accelerator cpu --tiny          tries it out anywhere

Each card is `python train.py` as a user would start it, on random tokens in memory, sequences of 8,192, bf16. One step
is profiled; telemetry looks at the GPUs during all. Writes benchmarks/results/profiles-<gpu>-x<ranks>.json after every
card, and the pictures into docs/.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.harness import results  # noqa: E402
from benchmarks.harness.commands import train  # noqa: E402
from benchmarks.harness.data import RANDOM_TOKENS  # noqa: E402
from benchmarks.harness.pictures import shrink  # noqa: E402
from benchmarks.harness.trainers import TINY_LANGUAGE_MODEL, on_all  # noqa: E402
from shardwise.run_dir.files import METRICS, PROFILE_PICTURE, PROFILE_TABLE, SUMMARY, profile_folder, read_rows  # noqa: E402

STEP, STEPS, SHORT_STEP = 30, 60, 12
ALWAYS = [
    *RANDOM_TOKENS, "precision=bf16", "log_every_n_steps=5", f"max_steps={STEPS}", f"profile.start={STEP}",
    "profile.ranks=all",
]  # fmt: skip
SHORT = ["max_steps=24", f"profile.start={SHORT_STEP}"]  # of models whose steps take seconds
CARDS = {
    1: {
        "llama3_1b-ddp": ["model=llama3_1b", "micro_batch_size=2", "strategy=ddp", "compile=model"],
        "llama3_1b-fsdp": ["model=llama3_1b", "micro_batch_size=2", "strategy=fsdp", "compile=model"],
        "llama3_1b-zero3": ["model=llama3_1b", "micro_batch_size=2", "strategy=zero3", "compile=none"],
        "llama3_8b-fsdp-adamw_8bit": ["model=llama3_8b", "micro_batch_size=2", "strategy=fsdp", "compile=model",
                                      "optimizer=adamw_8bit", "activation_checkpointing=full", *SHORT],
    },
    2: {
        "llama3_8b-fsdp": ["model=llama3_8b", "micro_batch_size=1", "strategy=fsdp", "compile=model", *SHORT],
        "llama3_8b-zero3": ["model=llama3_8b", "micro_batch_size=1", "strategy=zero3", "compile=none",
                            "activation_checkpointing=full", *SHORT],
    },
}  # fmt: skip
FELT = re.compile("gpu/|train/loss$|speed/|energy|tokens|mfu|step$")


def cards_for(ranks: int) -> dict[str, list[str]]:
    return {name: words for needed, cards in CARDS.items() if needed <= ranks for name, words in cards.items()}


def card(name: str, words: list[str], folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The run's table, summary and rows; an error where it failed."""
    given = on_all([*ALWAYS, *words, *(TINY_LANGUAGE_MODEL if options["tiny"] else [])], options["ranks"])
    line = [*given, f"accelerator={options['accelerator']}", f"runs_dir={folder}", f"name={name}"]
    began, log = time.perf_counter(), folder / f"{name}.log"
    code = train(line, log, options["timeout"])
    found: dict[str, Any] = {"words": words, "seconds": round(time.perf_counter() - began, 1)}
    profile = profile_folder(folder / name, SHORT_STEP if set(SHORT) <= set(words) else STEP)
    if code or not (profile / SUMMARY).exists():
        return found | {"error": f"exit code {code}\n{log.read_text()[-1500:]}"}
    shrink(profile / PROFILE_PICTURE, options["pictures"] / picture_of(name, options["ranks"]))
    rows = [{key: value for key, value in row.items() if value and FELT.search(key)}
            for row in read_rows(folder / name / METRICS)]  # fmt: skip
    said = json.loads((folder / name / SUMMARY).read_text())
    return found | {"table": (profile / PROFILE_TABLE).read_text(), "rows": rows, "run": said,
                    "summary": json.loads((profile / SUMMARY).read_text())}  # fmt: skip


def picture_of(name: str, ranks: int) -> str:
    return f"profile-{name}-x{ranks}.png"


def main() -> None:
    parser = results.command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="a small model, for trying it out")
    parser.add_argument("--timeout", type=float, default=150, help="seconds for one card")
    parser.add_argument("--only", default="", help="a regular expression: cards to make, the others stay as recorded")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs", help="the folder of the pictures")
    arguments = parser.parse_args()
    environment, device = results.measured_on(arguments.accelerator, arguments.commit)
    arguments.pictures.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"profiles-{device}-x{arguments.ranks}.json"
    cards = json.loads(path.read_text())["cards"] if path.exists() else {}
    commit = environment.pop("commit")
    with tempfile.TemporaryDirectory() as folder:
        for name, words in cards_for(arguments.ranks).items():
            if not re.search(arguments.only, name):
                continue
            cards[name] = card(name, words, Path(folder), vars(arguments)) | {"commit": commit}
            result = {"command": f"python benchmarks/profiles.py --ranks {arguments.ranks}", "ranks": arguments.ranks,
                      "environment": environment, "words": ALWAYS, "cards": cards}  # fmt: skip
            results.write(path, result)
            print(f"{name}: {cards[name].get('error') or cards[name]['table']}", flush=True)


if __name__ == "__main__":
    main()
