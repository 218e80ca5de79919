"""docs/reliability.md: exit codes, and what faults do to a run here and under stock Lightning."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from statistics import median
from typing import Any

from benchmarks.harness.results import read
from benchmarks.pages.markdown import commits_of, device_of, table
from shardwise.errors import ExitCode

REASONS = {
    ExitCode.done: ("done", "no"),
    ExitCode.crash: (
        "a bug, a lost process, a disk that stayed full; an exception in your module once a step was made",
        "yes",
    ),
    ExitCode.user_error: (
        "a mistake in the command, the module or the data, said in one line; an exception in your module before "
        "the first step",
        "no",
    ),
    ExitCode.non_finite: ("the loss or a gradient is not finite (guard.md)", "no"),
    ExitCode.out_of_memory: ("a rank is out of memory; says what needs less", "no"),
    ExitCode.saved: ("a signal told it to end: it has saved, and can be started again", "yes"),
    ExitCode.hang: ("no progress for `strategy.timeout_minutes`", "yes"),
    ExitCode.bad_node: ("preflight found a bad node (preflight.md)", "without it"),
}
BY_SIGNAL = (
    "signal n: before training began, with `checkpoint=none`, a second Ctrl-C, or from outside (137: SIGKILL)",
    "yes",
)


def exit_codes() -> list[str]:
    rows = [[int(code), *said] for code, said in REASONS.items()]
    return table(["exit code", "the run ended because", "start it again"], [*rows, ["128 + n", *BY_SIGNAL]])


def faults() -> list[str]:
    """Each fault under each strategy: survived of tried, median steps lost, median seconds to the next step."""
    return [line for result in read("chaos") if "rounds" in result for line in faults_of(result)]


def faults_of(result: dict[str, Any]) -> list[str]:
    rounds, settings, environment = result["rounds"], result["settings"], result["environment"]
    commits = commits_of({"commit": environment["commit"]} | one for one in rounds)
    strategies = list(dict.fromkeys(one["strategy"] for one in rounds))
    found: dict[tuple[str, str], list[Any]] = {}
    for row in (row for one in rounds for row in one["faults"]):
        found.setdefault((row["fault"], row["strategy"]), []).append(row)
    names = [name for name in dict.fromkeys(fault for fault, _ in found) if name != "the end"]
    tried = sum(len(rows) for (fault, _), rows in found.items() if fault != "the end")
    return [
        f"{settings['ranks']} ranks, {device_of(result, 'CPU', default='cpu')}, "
        f"torch {environment['packages']['torch']}, commit {commits}, `{result['command']}`: {len(rounds)} runs of "
        f"{settings['steps']} steps, a save every {settings['save_every_n_steps']}, {tried} faults.",
        "",
        *table(
            ["fault", *strategies],
            ([name, *(survived(found.get((name, s), [])) for s in strategies)] for name in [*names, "the end"]),
        ),
        "",
    ]


def survived(rows: list[Any]) -> str:
    if not rows:
        return ""
    words = [f"{sum(row['survived'] for row in rows)}/{len(rows)}"]
    for key, unit in (("steps_lost", " steps"), ("seconds", " s")):
        if values := [row[key] for row in rows if row[key] is not None]:
            words.append(f"{median(values):.3g}{unit}")
    return ", ".join(words)


def stock() -> list[str]:
    lines = []
    for result in (result for result in read("chaos") if "stock" in result):
        rows = [[row["fault"], row["outcome"]] for row in result["stock"]]
        lines += table(["fault", "what stock Lightning does"], rows)
        lines += ["", f"Lightning {result['environment']['packages']['lightning']}, `{result['command']}`."]
    return lines


def crash_points() -> list[str]:
    """Under each layout: operations, the states that kills and losses of power leave, and what is wrong in them."""
    return [line for result in read("crash-points") for line in crash_points_of(result)]


def crash_points_of(result: dict[str, Any]) -> list[str]:
    environment, rows, wrongs = result["environment"], [], []
    for layout, found in result["layouts"].items():
        counts: list[Any] = [sum(found["operations"].values())]
        for model in ("kills", "real", "power"):
            of_model = found.get(model, {"states": 0, "wrong": []})
            states, wrong = of_model["states"], of_model["wrong"]
            counts.append(f"{states:,}, {len(wrong)} wrong" if states else "")
            wrongs += [f"- {layout}, {model}: {json.dumps(one)}" for one in wrong]
        rows.append([layout, *counts])
    return [
        f"torch {environment['packages']['torch']}, commit {environment['commit'][:10]}, `{result['command']}`:",
        "",
        *table(["", "operations", "states after a kill", "killed for real", "states after a loss of power"], rows),
        "",
        *wrongs,
    ]


def restarts() -> list[str]:
    """Of each model: seconds from a killed rank to the next step, and the goodput at a kill every 30 minutes."""
    rows = []
    for result in read("goodput"):
        for name, found in result["cells"].items():
            alone, with_them = (
                ", ".join(f"{one['seconds']:.1f}" for one in found["restarts"] if one["standby"] is stood_by)
                for stood_by in (False, True)
            )
            gpus = result["environment"]["gpus"]
            where = f"{len(gpus)} × {gpus[0]}" if gpus else "2 CPU cores"
            share = f"{100 * found['goodput']:.1f} %" if "goodput" in found else "not measured"
            rows.append([name, where, alone, with_them, share])
    return table(["", "on", "seconds without ranks that stand by", "with them", "goodput"], rows)


def slurm_faults() -> list[str]:
    """Of each job under Slurm: how often it met each fault, and what became of it."""
    rows = []
    for result in read("slurm-chaos"):
        for name, job in result["jobs"].items():
            met = Counter(one["fault"].replace("_", " ") for one in job["faults"])
            told = ", ".join(f"{number} × {fault}" for fault, number in met.most_common())
            rows.append([name, len(job["faults"]), told, job["end"], job["differs"] or "the same bits"])
    return table(["job", "faults", "", "end", "beside the run that met none"], rows)


def soak() -> list[str]:
    """What a run held in its second tenth and in its last."""
    lines = []
    for result in read("soak"):
        rows = [
            [key.replace("_", " ").replace("mib", "MiB"), f"{one['second_tenth']:,.0f}", f"{one['last_tenth']:,.0f}"]
            for key, one in sorted(result["held"].items())
        ]
        lines += [f"{result['saves']:,} saves, {result['restarts']} restarts, exit code {result['exit_code']}:", ""]
        lines += table(["", "in the second tenth", "in the last"], rows)
    return lines or ["Not measured so far."]


# What an operation is about, by the path in `kind path`
ABOUT = {
    "removal of an older checkpoint": r"\.removed\.partial",
    "the best checkpoint, `best.json`": r"/best",
    "a file of a step's checkpoint": r"/step-.*\.partial",
    "names of checkpoints": r"/checkpoints|^(fsync|mkdir) /$",
    "`metrics.csv`, `ranks.csv`, `events.jsonl`": r"/(metrics|ranks|events)",
    "`logs/`": r"/logs",
    "what is written at the end": r"/(summary|loss|report)",
    "what is written at the start": "",
}


def storage_faults() -> list[str]:
    """What an operation is about and how it fails: exit codes, what is said, and what is left."""
    return [line for result in read("storage-faults") for line in storage_faults_of(result)]


def storage_faults_of(result: dict[str, Any]) -> list[str]:
    cases, groups = result["cases"], {}  # type: ignore[var-annotated]
    for case in cases:
        what = next(name for name, path in ABOUT.items() if re.search(path, f"{case['kind']} {case['path']}"))
        groups.setdefault((list(ABOUT).index(what), list(WAYS).index(case["way"])), []).append(case)
    rows = [
        [list(ABOUT)[what], list(WAYS.values())[way], len(of), commonest(map(code_of, of), every=True),
         commonest(map(said_in, of)), commonest(map(left_by, of))]
        for (what, way), of in sorted(groups.items())
    ]  # fmt: skip
    operations = len({(case["kind"], case["path"]) for case in cases})
    errors = ", ".join(dict.fromkeys(case["error"] for case in cases))
    wrong = [case for case in cases if "wrong" in case]
    return [
        f"torch {result['environment']['packages']['torch']}, commit {commits_of(cases)}, `{result['command']}`: "
        f"{operations} operations, {len(cases)} cases of {errors}, {len(wrong)} wrong.",
        "",
        *table(["operations on", "fail", "cases", "exit code", "most often said", "most often left"], rows),
        "",
        *(f"- {one['kind']} {one['path']}, {one['error']} {one['way']}: {'; '.join(one['wrong'])}" for one in wrong),
    ]


WAYS = {"once": "once", "always": "always", "from then on": "with all that follows"}


def code_of(case: dict[str, Any]) -> str:
    return str(case["exit_code"])


def said_in(case: dict[str, Any]) -> str:
    """The error, or else the first warning, without what is this case's alone."""
    lines = sorted(case["said"], key=lambda line: not line.startswith("error: "))
    first = re.sub(r"\d+", "N", lines[0].replace("runs/subject/", "")) if lines else "nothing"
    return re.sub(r"(: rank N)?: ?(OSError: )?(\[Errno N\] )?[A-Z][^:;']*?(?=;|:|$).*", "", first)


def left_by(case: dict[str, Any]) -> str:
    names = [re.sub(r"(-0+)|\.ckpt$", lambda found: "-" if found[1] else "", name) for name in case["left"]]
    return ", ".join(name for name in names if not name.endswith(".json")) or "none"


def commonest(found: Iterable[str], *, every: bool = False) -> str:
    counts = Counter(found).most_common(None if every else 1)
    return ", ".join(f"{one} ({count})" if every and len(counts) > 1 else one for one, count in counts)


TABLES = {
    "exit_codes": exit_codes,
    "faults": faults,
    "stock": stock,
    "crash_points": crash_points,
    "storage_faults": storage_faults,
    "restarts": restarts,
    "slurm_faults": slurm_faults,
    "soak": soak,
}
