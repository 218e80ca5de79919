"""Writes docs/gpu.md, docs/parity.md and docs/overhead.md from benchmarks/results/*.json, and the tables of
docs/metrics.md, docs/checkpointing.md, docs/reliability.md and docs/lightning.md.

No number in them is typed.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, get_args

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from shardwise.coming_from_lightning import ROWS, Kind  # noqa: E402


def main() -> None:
    results, images = read("parity"), [result for result in read("images") if not result["tiny"]]
    lines = [
        "# On GPUs",
        "",
        "Made by `python benchmarks/report.py` from `benchmarks/results/`; measured by `make gpu-test`"
        + (" and `python benchmarks/images_gpu.py`." if images else "."),
        "",
    ]
    for result in results:
        lines += section(result)
    for result in read("breadth"):
        lines += breadth_section(result)
    for result in images:
        lines += images_section(result)
    (ROOT / "docs" / "gpu.md").write_text("\n".join(lines).rstrip() + "\n")
    if costs := [result for result in read("overhead") if not result["tiny"]]:
        (ROOT / "docs" / "overhead.md").write_text("\n".join(overhead(costs)).rstrip() + "\n")
    if matrices := read("matrix"):
        (ROOT / "docs" / "parity.md").write_text("\n".join(parity_lines(matrices)).rstrip() + "\n")
    for name in ("metrics.md", "checkpointing.md", "reliability.md", "lightning.md"):
        page = ROOT / "docs" / name
        page.write_text(with_tables(page.read_text()))


def with_tables(text: str) -> str:
    """The text with what stands between `<!-- table: NAME -->` and `<!-- end -->` made anew."""
    made_by = (peaks, attention, resumed, exact, saving, faults, stock, exit_codes)
    tables: dict[str, Callable[[], list[str]]] = {made.__name__: made for made in made_by}
    tables |= {f"lightning_{kind.replace(' ', '_')}": partial(lightning, kind) for kind in get_args(Kind)}
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)",
        lambda found: found[1] + "\n".join(tables[found[2]]()) + "\n" + found[3],
        text,
        flags=re.DOTALL,
    )


def lightning(kind: str) -> list[str]:
    """What is here of Lightning's names of one kind; those of which the same is said share a line."""
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for row in ROWS:
        if row.kind == kind:
            grouped.setdefault((row.answer, row.text, row.test), []).append(f"`{row.name}`")
    lines = ["| Lightning | here | held by |", "|---|---|---|"]
    for (answer, text, test), names in grouped.items():
        said = {"same": "the same", "word": "ours", "refused": "refused"}[answer]
        said += f": {text}" if text else ""
        file, _, function = test.partition("::")
        held = f"[{function}](../{file})"
        lines.append(f"| {', '.join(names)} | {said.replace('|', chr(92) + '|')} | {held} |")
    return lines


def faults() -> list[str]:
    """Each fault under each strategy: survived of tried, median steps lost, median seconds to the next step."""
    lines = []
    for result in (result for result in read("chaos") if "rounds" in result):
        settings, environment = result["settings"], result["environment"]
        strategies = list(dict.fromkeys(one["strategy"] for one in result["rounds"]))
        found: dict[tuple[str, str], list[Any]] = {}
        for one in result["rounds"]:
            for row in one["faults"]:
                found.setdefault((row["fault"], row["strategy"]), []).append(row)
        names = [name for name in dict.fromkeys(fault for fault, _ in found) if name != "the end"]
        tried = sum(len(rows) for (fault, _), rows in found.items() if fault != "the end")
        lines += [
            f"{settings['ranks']} ranks, {(environment.get('gpus') or ['CPU'])[0]}, "
            f"torch {environment['packages']['torch']}, commit {str(environment['commit'])[:10]}, "
            f"`{result['command']}`: {len(result['rounds'])} runs of {settings['steps']} steps, "
            f"a save every {settings['save_every_n_steps']}, {tried} faults.",
            "",
            "| fault | " + " | ".join(strategies) + " |",
            "|---|" + "---|" * len(strategies),
            *("| " + " | ".join([name, *(_faults_cell(found.get((name, s), [])) for s in strategies)]) + " |"
              for name in [*names, "the end"]),
            "",
        ]  # fmt: skip
    return lines


def _faults_cell(rows: list[Any]) -> str:
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
        lines += ["| fault | what stock Lightning does |", "|---|---|"]
        lines += [f"| {row['fault']} | {row['outcome']} |" for row in result["stock"]]
        lines += ["", f"Lightning {result['environment']['packages']['lightning']}, `{result['command']}`."]
    return lines


def exit_codes() -> list[str]:
    from shardwise.errors import ExitCode

    said = {
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
        ExitCode.saved: ("told to leave by a signal: saved, run me again", "yes"),
        ExitCode.hang: ("no progress for `strategy.timeout_minutes`", "yes"),
        ExitCode.bad_node: ("preflight found a bad node (preflight.md)", "without it"),
    }
    return ["| exit code | the run ended because | start it again |", "|---|---|---|",
            *(f"| {int(code)} | {why} | {again} |" for code, (why, again) in said.items()),
            "| 128 + n | signal n: before training began, with `checkpoint=none`, a second Ctrl-C, or from outside "
            "(137: SIGKILL) | yes |"]  # fmt: skip


def resumed() -> list[str]:
    """What was saved under one strategy and gone on with under another: the largest deviation of a loss."""
    lines = []
    for result in read("resume"):
        environment = result["environment"]
        found: dict[tuple[str, str], list[Any]] = {}
        for pair in result["pairs"]:
            key = tuple(f"{pair[side]['strategy']} {pair[side]['ranks']}" for side in ("saved", "resumed"))
            found.setdefault(key, []).append(pair)  # type: ignore[arg-type]
        names = [f"{side['strategy']} {side['ranks']}" for side in result["sides"]]
        updates = [pair["update"] for pair in result["pairs"] if "update" in pair]
        lines += [
            f"{environment['gpus'][0] if '--accelerator cuda' in result['command'] else 'CPU, gloo'}, torch "
            f"{environment['packages']['torch']}, commit {str(environment['commit'])[:10]}. `{result['command']}`. "
            f"{', '.join(result['settings']['optimizers'])}; {len(result['pairs'])} cells; update: at most "
            f"{max(updates):.1e}.",
            "",
            "| saved under ↓, gone on with under → | " + " | ".join(names) + " |",
            "|---|" + "---|" * len(names),
        ]
        for name in names:
            cells = [found.get((name, other), []) for other in names]
            said = ["" if not c else "failed" if any("error" in p for p in c) else f"{max(p['loss'] for p in c):.0e}"
                    for c in cells]  # fmt: skip
            lines.append(f"| {name} | {' | '.join(said)} |")
        lines.append("")
    return lines


def exact() -> list[str]:
    """A run that was stopped and resumed, beside the one that was not."""
    lines: list[str] = []
    for result in read("exact"):
        environment, settings = result["environment"], result["settings"]
        device = environment["gpus"][0] if "--accelerator cpu" not in result["command"] else "CPU ranks"
        lines += [
            f"{result['ranks']} × {device}, torch {environment['packages']['torch']}, commit "
            f"{str(environment['commit'])[:10]}. `{result['command']}`: {settings['steps']} steps, stopped after "
            f"{settings['stopped_after']}.",
            "",
            "| | losses, norms, weights, buffers |",
            "|---|---|",
            *(f"| {name} | {'the same bits' if not other else 'other: ' + ', '.join(other)[:200]} |"
              for name, other in result["unlike"].items()),
            "",
        ]  # fmt: skip
    return lines


def saving() -> list[str]:
    """How long a save holds the training, and what it costs the steps behind it."""
    lines: list[str] = []
    for result in read("saving"):
        environment = result["environment"]
        lines += [
            f"{result['ranks']} × {environment['gpus'][0]}, torch {environment['packages']['torch']}, commit "
            f"{str(environment['commit'])[:10]}. `{result['command']}`",
            "",
            "| | step, ms | loop held by the first save, ms | by later ones | steps behind a save | size, GB | "
            "written at, GB/s | loaded at, GB/s |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for cell in result["cells"]:
            if "error" in cell:
                lines.append(f"| {cell['name']} | not measured: {cell['error'][:200]} | | | | | | |")
                continue
            gigabytes, quiet = cell["bytes"] / 1e9, cell["step_seconds"]
            before = cell.get("quiet_seconds", [quiet] * len(cell["behind_seconds"]))
            behind = zip(cell["behind_seconds"], before, strict=True)
            slower = [f"{seconds / quiet - 1:+.1%}" for seconds, quiet in behind if seconds is not None]
            loaded = f"{gigabytes / cell['load_seconds']:,.2f} ({cell['loaded_ranks']} ranks)"
            said = [
                cell["name"],
                f"{1e3 * quiet:,.1f}",
                f"{1e3 * cell['held_seconds'][0]:,.0f}",
                ", ".join(f"{1e3 * seconds:,.0f}" for seconds in cell["held_seconds"][1:]),
                ", ".join(slower) or "none",
                f"{gigabytes:,.1f}",
                f"{gigabytes / median(cell['write_seconds']):,.2f}",
                loaded,
            ]
            lines.append(f"| {' | '.join(said)} |")
        lines.append("")
    return lines


def peaks() -> list[str]:
    """conf/cluster/: the dense peak of one GPU, by kind of arithmetic."""
    from shardwise.compose import read_clusters

    rows = [(c.gpu, f"`cluster={c.name}`", dataclasses.asdict(c.peak_tflops)) for c in read_clusters()]
    return [
        "| GPU | | " + " | ".join(rows[0][2]) + " |",
        "|---|---|" + "---|" * len(rows[0][2]),
        *(f"| {gpu} | {name} | " + " | ".join(f"{p:,g}" for p in peak.values()) + " |" for gpu, name, peak in rows),
    ]


def attention() -> list[str]:
    """conf/model/: operations of one token, and how many more it would be with the whole square of attention."""
    import torch
    import yaml

    from recipes.language_modeling.model import Transformer

    lines = ["| model | tokens | GFLOPs a token | with the whole square of attention | more |", "|---|---|---|---|---|"]
    for name in ("gpt2_124m", "llama3_1b", "llama3_8b", "llama3_70b"):
        arguments = yaml.safe_load((ROOT / "conf" / "model" / f"{name}.yaml").read_text())
        del arguments["_target_"]
        with torch.device("meta"):
            model = Transformer(**arguments)
        length = model.max_seq_len
        flops = model.training_flops(1, length) / length
        whole = flops + 3 * 2 * 2 * model.n_layers * model.dim * (length - (length + 1) / 2)
        lines.append(f"| {name} | {length:,} | {flops / 1e9:,.2f} | {whole / 1e9:,.2f} | {whole / flops - 1:.1%} |")
    return lines


def read(kind: str) -> list[dict[str, Any]]:
    """The results of one benchmark, a file each; none where it has not been run."""
    return [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks" / "results").glob(f"{kind}-*.json"))]


def breadth_section(result: dict[str, Any]) -> list[str]:
    """Every strategy and precision, ours beside stock Lightning's."""
    environment, settings = result["environment"], result["settings"]
    cells = {(c["model"], c["strategy"], c["precision"], c["who"]): c for c in result["cells"]}
    commits = sorted({str(c["commit"])[:10] for c in result["cells"]})
    lines = [
        f"## Every strategy beside stock Lightning, {result['ranks']} × {environment['gpus'][0]}",
        "",
        f"Seconds a step and peak allocated GiB on rank 0, ours / stock Lightning "
        f"{environment['packages']['lightning']}; "
        f"eager, AdamW, accumulation {settings['accumulate_grad_batches']}, clipping, the mean of "
        f"{settings['steps'] - settings['warm_up']} steps after {settings['warm_up']}; one run. Commits "
        f"{', '.join(commits)}. `{result['command']}`",
        "",
        "Stock differs where it must: its FSDPStrategy refuses to clip, its 16-bit DDP refuses to clip before a fused "
        "optimizer and got an unfused one, and its DeepSpeed reduces in 16 bits. Cells shared processes: what "
        "was allocated when a cell began is taken off its peak.",
        "",
    ]
    for model in settings["models"]:
        keys = {(s, p) for m, s, p, _ in cells if m == model}
        order = list(dict.fromkeys(s for m, s, _, _ in cells if m == model))
        precisions = [p for p in ("fp32", "bf16", "fp16") if any(k[1] == p for k in keys)]
        lines += [
            f"**{model}**",
            "",
            "| strategy | " + " | ".join(precisions) + " |",
            "|---|" + "---|" * len(precisions),
        ]
        for strategy in order:
            row = [
                " / ".join(
                    told(cells.get((model, strategy, precision, who))) for who in ("shardwise", "stock Lightning")
                )
                if (strategy, precision) in keys
                else ""
                for precision in precisions
            ]
            lines.append(f"| {strategy} | " + " | ".join(row) + " |")
        lines.append("")
    if rows := result.get("overflow"):
        lines += [
            "**fp16, the gradients of one rank overflow in the third window**",
            "",
            "| strategy | skipped | step counter after each window | loss scale after it | weights finite |",
            "|---|---|---|---|---|",
        ]
        for r in rows:
            steps, scales = ([str(int(w[key])) for w in r["windows"][:5]] for key in ("global_step", "loss_scale"))
            lines.append(f"| {r['strategy']} | {r['skipped_steps']} | {', '.join(steps)}, … | {', '.join(scales)}, … | "
                         f"{'yes' if r['finite'] else 'no'} |")  # fmt: skip
        lines.append("")
    return lines


def told(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "not run"
    if "error" in cell:
        return "fails" if cell["error"] != "did not end" else "did not end"
    return f"{cell['seconds_per_step']:.3f} s, {cell['peak_allocated_gib']:.2f}"


def section(result: dict[str, Any]) -> list[str]:
    environment = result["environment"]
    packages = environment["packages"]
    lines = [
        f"## {result['ranks']} × {environment['gpus'][0]}",
        "",
        f"torch {packages['torch']}, Lightning {packages['lightning']}, NCCL {environment['nccl']}, Python "
        f"{environment['python']}, commit {(environment['commit'] or 'unknown')[:10]}. `{result['command']}`",
        "",
    ]
    if rows := result.get("parity"):
        lines += [
            f"**Parity**: {rows[0]['steps']} steps of SGD with momentum, accumulation 4, clipping that bites, masked "
            "targets, against a plain one-process loop over the global batch. Per tensor: norm of the difference of "
            "the update over the norm of the reference's update; the largest over all tensors.",
            "",
            "| strategy | precision | update | loss | gradient norm | bound |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {r['strategy']} | {r['precision']} | {r['largest_update_deviation']:.1e} "
            f"| {r['largest_loss_deviation']:.1e} | {r['largest_norm_deviation']:.1e} | {r['bound']:.0e} |"
            for r in rows
        ]
        lines.append("")
    if rows := result.get("modules"):
        lines += [
            "**Modules of kinds that people bring** (tests/harness/modules.py): after a few steps, the largest "
            "deviation of an update, and of a buffer, from a plain loop in fp32.",
            "",
            "| module | strategy | precision | update | buffer |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {r['module']} | {r['strategy']} | {r['precision']} | {r['update']:.1e} | {r['buffer']:.1e} |"
            for r in rows
        ]
        lines.append("")
    if rows := result.get("beside_ddp"):
        lines += [
            "**Beside ddp on the same GPUs** (tests/distributed/test_backward.py, test_scalars.py): second "
            "derivatives, views that are written into, objects between layers, parameters without a dimension; the "
            "largest deviation of an update from that under ddp.",
            "",
            "| module | strategy | precision | update | bound |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {r['module']} | {r['strategy']} | {r['precision']} | {r['update']:.1e} | {r['bound']:.0e} |"
            for r in rows
            if r["strategy"] != "ddp"
        ]
        lines.append("")
    if runs := finished(result.get("curves")):
        steps = [100, 200]
        lines += [
            "**fp32 and bf16 side by side**: the default recipe (a model too small to measure speed on).",
            "",
            "| run | validation loss at " + " | at ".join(map(str, steps)) + " |",
            "|---|" + "---|" * len(steps),
        ]
        for name, run in runs.items():
            at = dict(map(tuple, run["validation"]))
            lines.append(f"| {name} | " + " | ".join(f"{at[s]:.4f}" if s in at else "" for s in steps) + " |")
        sample = (runs.get("fsdp-bf16") or {}).get("sample")
        if sample:
            lines += ["", "Generated under `fsdp` in bf16, all ranks taking part:", "", "```", sample.strip(), "```"]
        lines.append("")
    if runs := finished(result.get("speed")):
        lines += [
            "**A first speed**: eager bf16, sequence 8,192, micro-batch 1, AdamW, no activation checkpointing, random "
            "tokens.",
            "",
            "| run | tokens/s/GPU | peak reserved GiB, rank 0 |",
            "|---|---|---|",
        ]
        lines += [
            f"| {name} | {run['tokens_per_second'][-1] / result['ranks']:,.0f} | {run['peak_memory_gib']} |"
            for name, run in runs.items()
        ]
        lines.append("")
    return lines


def parity_lines(results: list[dict[str, Any]]) -> list[str]:
    """docs/parity.md: how far each strategy is from the plain loop, beside stock Lightning, and what that takes."""
    settings = results[0]["settings"]
    lines = [
        "# Parity",
        "",
        "Made by `python benchmarks/report.py`; measured by `make parity` and `make parity-gpu`. "
        f"{settings['steps']} steps of a small model (tests/harness/everything.py) with a tied weight, a frozen "
        "part, sizes that no number of ranks divides, padded sequences with different numbers of valid tokens, and, in "
        "most cells, weights that no rank or one rank alone needs in a step (`ddp` and `zero*` are told so: "
        "`strategy.find_unused_parameters=true`); SGD with momentum and AdamW, accumulation "
        f"1 and 4, without clipping and clipped to {settings['clip']}, which bites in every step. The reference is one "
        "process, the whole global batch, no Lightning (tests/harness/reference.py). *update*: per tensor, norm of the "
        "difference of the update over the norm of the reference's; each number is the largest over tensors, steps and "
        "cells.",
        "",
    ]
    for result in results:
        lines += matrix_section(result)
        alike = [r for r in results if r["ranks"] == result["ranks"]]
        every = dict.fromkeys(cell["strategy"] for r in alike for cell in r["cells"])
        if missing := [name for name in every if name not in {cell["strategy"] for cell in result["cells"]}]:
            lines += [f"Not measured here: {'; '.join(missing)}.", ""]
    return lines


def matrix_section(result: dict[str, Any]) -> list[str]:
    environment = result["environment"]
    packages, cells = environment["packages"], result["cells"]
    # The device that was used stands in the command
    device = environment["gpus"][0] if "--accelerator cuda" in result["command"] else "CPU processes, gloo"
    lines = [
        f"## {result['ranks']} × {device}",
        "",
        f"torch {packages['torch']}, Lightning {packages['lightning']}, Python {environment['python']}, commit "
        f"{(environment['commit'] or 'unknown')[:10]}. `{result['command']}`",
        "",
        "| strategy | precision | cells | update | loss | gradient norm | bound |",
        "|---|---|---|---|---|---|---|",
    ]
    for strategy, precision in dict.fromkeys((c["strategy"], c["precision"]) for c in cells):
        own = [c for c in cells if (c["strategy"], c["precision"]) == (strategy, precision)]
        ran = [c for c in own if "error" not in c]
        said = f"{len(ran)}" + ("" if len(ran) == len(own) else f" of {len(own)} ended")
        worst = " | ".join(
            f"{max(c[key] for c in ran):.1e}" if ran else "" for key in ("update", "loss", "gradient_norm")
        )
        broken = "" if all(c["holds"] for c in ran) else " **exceeded**"
        bound = f"{ran[0]['bound']:.0e}" if ran else ""
        lines.append(f"| {strategy} | {precision} | {said} | {worst} | {bound}{broken} |")
    lines += ["", *stock_lines(result), *traffic_lines(result)]
    return lines


def stock_lines(result: dict[str, Any]) -> list[str]:
    """Stock Lightning's update, beside the largest of ours with the same optimizer, accumulation and clipping."""
    if not (rows := result["stock"]):
        return []

    def kind_of(row: dict[str, Any]) -> tuple[str, int, float | None]:
        return row["optimizer"], row["accumulate"], row["clip"]

    kinds = list(dict.fromkeys(map(kind_of, rows)))
    lines = [
        "**Stock Lightning**: the same network and rows under a plain Trainer, mean loss of each micro-batch, fp32; "
        "update. Its DeepSpeedStrategy refuses CPUs: a subclass leaves the refusal out.",
        "",
        "| strategy | " + " | ".join(f"{o}, accumulation {a}{', clipped' if c else ''}" for o, a, c in kinds) + " |",
        "|---|" + "---|" * len(kinds),
    ]
    for strategy in dict.fromkeys(r["strategy"] for r in rows):
        own = {kind_of(r): r for r in rows if r["strategy"] == strategy}
        told = [f"{own[k]['update']:.1e}" if "update" in own[k] else own[k]["error"] for k in kinds if k in own]
        lines.append(f"| {strategy} | " + " | ".join(told) + " |")
    largest = [
        max(
            (c["update"] for c in result["cells"] if kind_of(c) == k and c["precision"] == "fp32" and "update" in c),
            default=None,
        )
        for k in kinds
    ]
    ours = ["not run" if value is None else f"{value:.1e}" for value in largest]
    return [*lines, "| ours, the largest of any strategy | " + " | ".join(ours) + " |", ""]


def traffic_lines(result: dict[str, Any]) -> list[str]:
    """Collectives of a step, shares held and dtypes, one row a strategy."""
    rows = [c for c in result["cells"] if c.get("collectives") and c["accumulate"] == 4 and c["precision"] == "fp32"
            and c["optimizer"] == "adamw"]  # fmt: skip
    if not rows:
        return []
    memory = {
        c["strategy"]: c["peak_allocated_gib"]
        for run in read("breadth") if run["ranks"] == result["ranks"]
        for c in run["cells"] if (c["who"], c["model"], c["precision"]) == ("shardwise", "gpt2_124m", "bf16")
        and "peak_allocated_gib" in c
    } if "--accelerator cuda" in result["command"] else {}  # fmt: skip
    lines = [
        "**What a step does**, accumulation 4, AdamW: collectives of rank 0 by kind (*scalars*: sums of at "
        "most four elements: losses, weights, norms; the all-reduce beside reduce-scatters is of "
        "the tensors' norms), the share that rank 0 holds between steps (padding included), "
        "dtypes of parameters, computing and reduction in fp32"
        + (", and peak allocated GiB of gpt2_124m in bf16 (docs/gpu.md)." if memory else "."),
        "",
        "| strategy | collectives | parameters | optimizer state | dtypes |" + (" GiB |" if memory else ""),
        "|---|---|---|---|---|" + ("---|" if memory else ""),
    ]
    for row in rows:
        counts = ", ".join(f"{count} {kind.replace('_', '-')}" for kind, count in row["collectives"].items())
        held = " | ".join(f"{row['held'][key]:.2f}" for key in ("parameters", "optimizer_state"))
        gib = f" {memory[row['strategy']]:.2f} |" if row["strategy"] in memory else " |" if memory else ""
        lines.append(f"| {row['strategy']} | {counts} | {held} | {', '.join(row['dtypes'])} |{gib}")
    return [*lines, ""]


def images_section(result: dict[str, Any]) -> list[str]:
    """Speed on images: what each part reached, what failed, and how much of the time the device waited for JPEGs."""
    environment, size = result["environment"], result["size"]
    packages = environment["packages"]
    rows_of_all = [row for rows in result["sections"].values() for row in rows.values() if isinstance(row, dict)]
    commits = sorted({str(row["commit"])[:10] for row in rows_of_all})
    lines = [
        f"## Images on 1 × {(environment['gpus'] or ['CPU'])[0]}",
        "",
        f"torch {packages['torch']}, Lightning {packages['lightning']}, Pillow {packages['pillow'] or 'missing'}, "
        f"Python {environment['python']}, {environment['cpus']} CPU cores, commits {', '.join(commits)}. "
        f"`{result['command']}`",
        "",
        f"**Speed**: {size['batch']} images of {size['image']}×{size['image']} a step, bf16, {size['timed']} steps "
        "after the warm-up. *plain* is a loop written by hand over one normalised batch on the device: autocast, fused "
        "optimizer, nothing distributed. *trainer* is what `python train.py` runs, from uint8 images in memory through "
        "loader workers or from one batch on the device; the ratio is to *plain, compiled*.",
        "",
        "| model | what | images/s | ratio to plain loop | peak reserved GiB |",
        "|---|---|---|---|---|",
    ]
    failed, beside = [], []
    for model, rows in result["sections"].items():
        for what, row in rows.items():
            if what == "skipped":
                continue
            if not row["ok"]:
                failed.append(f"{model}, {what}: {row['error']}")
            elif what.startswith("in turn"):
                beside += beside_lines(model, row)
            elif what.startswith(("plain", "trainer")):
                said = f"{row['ratio_to_plain']:.1%}" if row.get("ratio_to_plain") else ""
                name = "resnet50 from JPEGs" if model == "jpeg" else model
                memory = "" if row["peak_memory_gib"] is None else row["peak_memory_gib"]
                lines.append(f"| {name} | {what} | {row['images_per_second']:,.0f} | {said} | {memory} |")
    lines += ["", *beside]
    jpeg = result["sections"].get("jpeg", {})
    if jpeg.get("skipped"):
        lines += [f"**JPEGs**: not measured, {jpeg['skipped']}.", ""]
    made, alone, trained = (jpeg.get(part, {}) for part in ("shards", "decoding alone", "trainer, compile=model"))
    if made.get("ok") and alone.get("ok") and trained.get("ok"):
        waiting = trained["waiting"]
        lines += [
            f"**JPEGs**: {made['images']:,} of {made['width_height'][0]}×{made['width_height'][1]}, quality "
            f"{made['quality']}, {made['mean_bytes'] / 1e3:,.0f} kB each, in tar shards from the page cache. "
            f"{alone['workers']} workers decode {alone['images_per_second']:,.0f} images/s alone; training takes "
            f"{trained['images_per_second']:,.0f} images/s, and the device waits for data for {waiting['share']:.1%} "
            f"of the time ({waiting['ms_per_step']:.1f} of {waiting['step_ms']:.1f} ms a step).",
            "",
        ]
    if failed:
        lines += ["Not measured:", "", *(f"- {line}" for line in failed), ""]
    return lines


def beside_lines(model: str, row: dict[str, Any]) -> list[str]:
    """What was measured in turn, in one process."""
    said = [
        f"{median(ratios):.2%} of *{who}* ({min(ratios):.2%} to {max(ratios):.2%})"
        for who, ratios in row["ratios"].items()
    ]
    return [
        f"**{model}, in turn**: in one process, round after round, a stretch of the Trainer's steps (compile=model, "
        f"images from workers) between stretches of the plain loops: a GPU's clock moves by more than they differ by. "
        f"The Trainer reaches {', '.join(said)}: median and range of {len(row['rounds']['trainer'])} rounds.",
        "",
    ]


def overhead(results: list[dict[str, Any]]) -> list[str]:
    """docs/overhead.md: what the Trainer costs, on every machine where it was measured."""
    lines = [
        "# What the Trainer costs",
        "",
        "Made by `python benchmarks/report.py` from `benchmarks/results/overhead-*.json`; measured by `make overhead`. "
        "The same module on the same batch in a plain PyTorch loop (its own loader, clipping, DDP where there are "
        "several ranks, nothing logged), under stock Lightning, and here with everything that a run does: guard, "
        "meter, metrics.csv. The contenders take turns, round after round; a step's time is the median of the rounds. "
        "Where rounds lie far apart, others were using the machine: then *quiet* is what can be compared.",
        "",
    ]
    for result in results:
        environment, parts = result["environment"], result["parts"]
        packages = environment["packages"]
        commits = sorted({str(part["commit"])[:10] for part in parts.values()})
        device = environment["gpus"][0] if environment["gpus"] and "cpu" not in result["command"] else "CPU"
        lines += [
            f"## {result['ranks']} × {device}",
            "",
            f"torch {packages['torch']}, Lightning {packages['lightning']}, Python {environment['python']}, "
            f"{environment['cpus']} CPU cores, commits {', '.join(commits)}. `{result['command']}`",
            "",
        ]
        for name, part in parts.items():
            if not name.startswith(("llm", "sync")):
                lines += small_steps(name, part)
        lines += language_models({name: part for name, part in parts.items() if name.startswith("llm")})
        lines += deferred_sync({name: part for name, part in parts.items() if name.startswith("sync")})
    return lines


def small_steps(name: str, part: dict[str, Any]) -> list[str]:
    """Steps that are all overhead, or short ones."""
    size, plain = part["size"], part["contenders"]["plain loop"]
    precision = next(w.split("=")[1] for w in part["overrides"] if w.startswith("precision="))
    said = (
        f"**A step bound by the host**: {size['layers'] + 1} layers of {size['width']}, fp32"
        if name == "host"
        else f"**A step of which the GPU needs 2 ms**, {name.removeprefix('gpu2ms ')}: {size['layers'] + 1} layers of "
        f"{size['width']}, {precision}, {part.get('rows', 0):,} rows, of which the host of the plain loop issues one "
        f"in {part.get('plain_host_ms', float('nan')):.2f} ms"
        + ". Stock Lightning's optimizer is not fused: it refuses to clip before one in bf16"
        * (precision == "bf16")
    )
    quiet = name == "host"
    lines = [
        f"{said}; {size['timed']} steps after {size['warm_up']}, {rounds_of(part)} rounds."
        + " *Quiet*: the fastest tenth of stretches of ten steps, of the best round: what the steps take while nobody "
        "else uses the machine. *CPU*: time of one rank's process." * quiet,
        "",
        "| | µs per step | lowest to highest round | beyond plain |"
        + " quiet, µs | quiet, beyond plain | CPU, µs |" * quiet,
        "|---|---|---|---|" + "---|---|---|" * quiet,
    ]
    for who, row in part["contenders"].items():
        if "seconds_per_step" not in row:
            continue
        mine, lowest, highest = (row[key] * 1e6 for key in ("seconds_per_step", "lowest", "highest"))
        cells = [who, f"{mine:,.0f}", f"{lowest:,.0f} to {highest:,.0f}", beyond(row, plain, "seconds_per_step")]
        if quiet:
            key = "quiet_seconds_per_step"
            cells += [f"{row[key] * 1e6:,.0f}", beyond(row, plain, key), f"{row['cpu_seconds_per_step'] * 1e6:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *unmeasured({name: part})]


def beyond(row: dict[str, Any], plain: dict[str, Any], key: str) -> str:
    if key not in plain or row is plain:
        return ""
    return f"{(row[key] - plain[key]) * 1e6:+,.0f} ({row[key] / plain[key] - 1:+.1%})"


def rounds_of(part: dict[str, Any]) -> int:
    return max(len(row.get("rounds", [])) for row in part["contenders"].values())


def language_models(parts: dict[str, dict[str, Any]]) -> list[str]:
    if not parts:
        return []
    size = next(iter(parts.values()))["size"]
    lines = [
        "**A step of a language model**: eager bf16, sequence 2,048, fused AdamW, accumulation 1, random tokens in "
        f"memory; {size['timed']} steps after {size['warm_up']}, {size['rounds']} rounds. The plain loop has the same "
        "model class, bf16 copies of fp32 masters per layer (`fsdp`: `fully_shard` under the same policies).",
        "",
        "| | plain loop, ms | without clipping, ms | shardwise, ms | over plain | spread of the rounds |",
        "|---|---|---|---|---|---|",
    ]
    for name, part in parts.items():
        plain, bare, mine = (
            part["contenders"][who] for who in ("plain loop", "plain loop, no clipping", "shardwise, logging every 10")
        )
        ms = [f"{r['seconds_per_step'] * 1e3:,.2f}" if "seconds_per_step" in r else "" for r in (plain, bare, mine)]
        over = spread = ""
        if ms[0] and ms[2]:
            over = f"{mine['seconds_per_step'] / plain['seconds_per_step'] - 1:+.2%}"
            spread = ", ".join(f"{(r['highest'] - r['lowest']) / r['lowest']:.2%}" for r in (plain, mine))
        lines.append(f"| {name.removeprefix('llm ')} | {' | '.join(ms)} | {over} | {spread} |")
    return [*lines, "", *unmeasured(parts)]


def deferred_sync(parts: dict[str, dict[str, Any]]) -> list[str]:
    """Both settings of `strategy.defer_gradient_sync`: time and memory."""
    if not parts:
        return []
    size = next(iter(parts.values()))["size"]
    lines = [
        "**`strategy.defer_gradient_sync`**: these models under `fsdp`, accumulation 4, reduced in every micro-batch "
        f"(`false`) or at the window's end (`true`, which keeps unsharded gradients); {size['timed'] // 4} steps after "
        f"{size['warm_up'] // 4}, {size['rounds']} rounds.",
        "",
        "| | every micro-batch, ms a step | deferred, ms | deferred over it | peak allocated GiB | deferred |",
        "|---|---|---|---|---|---|",
    ]
    for name, part in parts.items():
        rows = [part["contenders"][who] for who in ("every micro-batch", "deferred")]
        if any("seconds_per_step" not in row for row in rows):
            continue
        ms = [row["seconds_per_step"] * 4e3 for row in rows]
        peaks = [f"{row['peak_allocated_gib']:.2f}" if "peak_allocated_gib" in row else "" for row in rows]
        cells = [name.split()[1], *(f"{x:,.1f}" for x in ms), f"{ms[1] / ms[0] - 1:+.1%}", *peaks]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *unmeasured(parts)]


def unmeasured(parts: dict[str, dict[str, Any]]) -> list[str]:
    """What went wrong, a line each."""
    lines = [
        f"- {name}, {who}: {' '.join(str(row['error']).split())[:300]}"
        for name, part in parts.items()
        for who, row in [*part["contenders"].items(), ("the whole", part)]
        if "error" in row
    ]
    return ["Not measured, or not in every round:", "", *lines, ""] if lines else []


def finished(runs: dict[str, Any] | None) -> dict[str, Any]:
    return {name: run for name, run in (runs or {}).items() if run["exit_code"] == 0}


if __name__ == "__main__":
    main()
