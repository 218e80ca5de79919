"""docs/reliability.md: exit codes, and what faults do to a run here and under stock Lightning."""

from __future__ import annotations

import json
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


TABLES = {"exit_codes": exit_codes, "faults": faults, "stock": stock, "crash_points": crash_points}
