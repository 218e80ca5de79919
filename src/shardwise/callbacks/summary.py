"""Sums up a run when it ends: a table, `summary.json` and the loss curve as a picture."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from shardwise.accelerator import memory_counts
from shardwise.callbacks.saving import Saving
from shardwise.callbacks.steps import LOSS, OTHER_LOSS, StepLog, digits, final_metrics, last_of
from shardwise.callbacks.verdicts import Verdicts, as_json
from shardwise.errors import count
from shardwise.lightning_internals.patches import early_stop
from shardwise.metrics.telemetry import Energy
from shardwise.nn.attention import kernels_that_ran
from shardwise.plan import Plan
from shardwise.protocols import loss_weight_unit_of, optional
from shardwise.run_dir.checkpoints import stopped_before
from shardwise.run_dir.files import LOSSES, METRICS, SUMMARY, read_rows, write_whole
from shardwise.strategies.base import strategy_of


class Summary(Callback):
    """Writes `summary.json` and the loss curve when training ends, and prints the table."""

    def __init__(self, plan: Plan, steps: StepLog, saving: Saving, energy: Energy, verdicts: Verdicts) -> None:
        self.plan, self.steps, self.saving, self.energy, self.verdicts = plan, steps, saving, energy, verdicts
        self.parameters: dict[str, int] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._count_parameters(trainer, pl_module)
        if trainer.is_global_zero:
            whole, trained = self.parameters.values()
            print(f"parameters: {whole:,}, of which {trained:,} are trained", flush=True)

    def _count_parameters(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state = strategy_of(trainer).sharded
        shapes = state.whole_shapes()
        own = {name: (prod(shapes.get(name, p.shape)), p.requires_grad) for name, p in pl_module.named_parameters()}
        found = {name: size for part in state.of_all_stages(own) for name, size in part.items()}
        trained = sum(size for size, is_trained in found.values() if is_trained)
        self.parameters = {"parameters": sum(size for size, _ in found.values()), "trained_parameters": trained}

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._count_parameters(trainer, pl_module)  # some may be trained by now that were frozen
        if not trainer.is_global_zero:
            return
        run_dir = Path(self.plan.run_dir)
        rows = read_rows(run_dir / METRICS)
        monitor = self.plan.checkpoint.monitor
        find = optional(trainer.datamodule, "baselines")  # type: ignore[attr-defined]
        baselines = {} if find is None else find()
        unit = loss_weight_unit_of(pl_module)
        meter = self.steps.meter
        steady, measured_steps = meter.steady, meter.first.steps + meter.rest.steps
        all_profiled = self.steps.steps > 0 and not measured_steps
        seconds = max(steady.seconds, 1e-9)
        memory = memory_counts(strategy_of(trainer).root_device)
        measured = final_metrics(trainer, rows)
        summary: dict[str, Any] = {
            **self.parameters,
            "steps": trainer.global_step,
            "stopped_early": self._stop(trainer),
            "samples": trainer.strategy.train_loader.consumed,  # type: ignore[attr-defined]
            "steps_this_process": self.steps.steps,
            f"{unit}_this_process": round(meter.weight) or None,
            "measured_steps_this_process": measured_steps,  # the others were profiled, and no speed has them in it
            "training_seconds": round(meter.first.seconds + meter.rest.seconds, 2),
            "first_step_seconds": round(meter.first.seconds, 3),
            # these leave out the first step, where there are others
            "step_seconds": None if all_profiled else steady.seconds / max(steady.steps, 1),
            "samples_per_second": None if all_profiled else steady.steps * self.plan.global_batch_size / seconds,
            f"{unit}_per_second": steady.weight / seconds or None,
            "mfu": meter.mfu(steady),
            "data_wait": None if all_profiled else steady.waiting_seconds / seconds,
            "goodput": meter.goodput if measured_steps else None,
            # under DeepSpeed the inner optimizer, which may be another class than the config names
            "optimizers": [type(getattr(o, "optimizer", o)).__name__ for o in trainer.optimizers],
            "attention": kernels_that_ran() or None,
            # what `null` came to, where it was left to the set-up
            "symmetric_memory": trainer.strategy.plan.strategy.symmetric_memory,  # type: ignore[attr-defined]
            "graphs_compiled": self.steps.recompilations.graphs or None,
            "graphs_compiled_after_the_first_step": self.steps.recompilations.count or None,
            "skipped_steps_this_process": trainer.strategy.step.verdict.skipped_steps,  # type: ignore[attr-defined]
            # these two are the peaks of rank 0
            "memory_allocated_gib": round(memory.allocated_peak / 2**30, 2) or None,
            "peak_memory_gib": round(memory.reserved_peak / 2**30, 2) or None,
            # these two are of all GPUs since the run's first start
            "energy_kwh": self.energy.kwh,
            f"joules_per_{one_of(unit)}": self.energy.joules_per_weight,
            **{key: last_of(rows, key) for key in (LOSS, loss_key(rows))},
            **trainer.strategy.train_loader.progress(trainer.strategy.train_loader.consumed),  # type: ignore[attr-defined]
            **measured,
            "verdicts": [as_json(verdict, self.verdicts.judge) for verdict in self.verdicts.told],
            "baselines": baselines,
            "best": {"checkpoint": self.saving.best_path, monitor: self.saving.best_score} if monitor else None,
        }
        try:
            write_whole(run_dir / SUMMARY, json.dumps(summary, indent=2) + "\n")
        except OSError as error:  # what was trained is saved by now
            print(f"{run_dir / SUMMARY} could not be written: {error.strerror}", flush=True)
        try:
            picture = plot_losses(rows, baselines, run_dir / LOSSES)
            curve = _short(picture) if picture else "no losses were logged"
        except OSError as error:
            curve = f"{run_dir / LOSSES} could not be written: {error.strerror}"
        print_table(self._lines(summary, measured, unit, curve))

    def _stop(self, trainer: Trainer) -> dict[str, Any] | None:
        """What stopped the run early, with the run's callbacks: `resume=auto` trains on only if these have changed."""
        stop = early_stop(trainer)
        if stop is None:
            return stopped_before(self.plan.run_dir, trainer.global_step)
        return stop | {"callbacks": self.plan.callbacks}

    def _lines(self, summary: dict[str, Any], measured: dict[str, float], unit: str, curve: str) -> dict[str, str]:
        """The lines of the table: names in words, numbers with their units."""
        speeds = [(unit, summary[f"{unit}_per_second"]), ("samples", summary["samples_per_second"])]
        if speeds[0][1] == speeds[1][1]:  # a unit such as images, of which each is a sample
            del speeds[1]
        seconds, first = summary["training_seconds"], summary["first_step_seconds"]
        made, measured_steps = summary["steps_this_process"], summary["measured_steps_this_process"]
        which = f"the {count(made, 'step')}"
        if measured_steps < made:
            which = f"{measured_steps:,} of {which}"
        rest = f"; a profile disturbed the other {made - measured_steps:,}" if measured_steps < made else ""
        lines = {
            "parameters": f"{summary['parameters']:,}, of which {summary['trained_parameters']:,} are trained",
            "trained": f"{count(summary['steps'], 'step')}, {count(summary['samples'], 'sample')}",
            "time": f"{seconds:,.1f} s in {which} of this process, the first {first:,.1f} s{rest}",
            "speed": ", ".join(f"{speed:,.0f} {word}/s" for word, speed in speeds if speed)
            or ("a profile disturbed every step" if made else "no step was due"),
        }
        if (stop := summary["stopped_early"]) is not None:
            why = f": {stop['reason']}" if stop["reason"] else ""
            lines["stopped early"] = f"at step {stop['step']:,} by {stop['by']}{why}"
        if summary["mfu"] is not None:
            lines["MFU"] = f"{summary['mfu']:.1%} of {self.plan.peak_tflops:,.0f} TFLOP/s a GPU"
        if summary["data_wait"] is not None:
            lines["waiting for data"] = f"{summary['data_wait']:.1%} of the time"
        if summary["goodput"] is not None:
            lines["goodput"] = f"{summary['goodput']:.1%} of the time since the run first started went into its steps"
        if (ran := summary["attention"]) is not None:
            lines["attention"] = "; ".join(f"{' and '.join(kernels)} ({where})" for where, kernels in ran.items())
        if summary["graphs_compiled"] is not None:
            again = self.steps.recompilations.count
            later = f", {again} of them after the first step" * (again > 0)
            lines["compiled"] = count(summary["graphs_compiled"], "graph") + later
        if summary["skipped_steps_this_process"]:
            lines["skipped"] = f"{count(summary['skipped_steps_this_process'], 'step')} whose gradients were not finite"
        if summary["peak_memory_gib"] is not None:
            lines["peak memory"] = (
                f"{summary['memory_allocated_gib']:.1f} GiB allocated, {summary['peak_memory_gib']:.1f} reserved, "
                f"on rank 0"
            )
        if (kwh := summary["energy_kwh"]) is not None:
            joules = self.energy.joules_per_weight
            each = f", {digits(joules)} J a {one_of(unit)}" if joules is not None else ""
            lines["energy"] = f"{digits(kwh)} kWh of all GPUs{each}"
        lines |= self.verdicts.lines
        if (loss := summary.get(OTHER_LOSS, summary[LOSS])) is not None:
            lines["training loss"] = digits(loss)
        of_data = {key: value for key, value in summary.items() if key.startswith("data/")}
        validated = self.saving.validated_step
        at = f" (step {validated:,})" if 0 < validated < summary["steps"] else ""
        lines |= {words(key): digits(value) + at * key.startswith("validation/")
                  for key, value in (of_data | measured).items()}  # fmt: skip
        lines |= {f"baseline: {name}": digits(value) for name, value in summary["baselines"].items()}
        if self.plan.quick_check:  # keeps no file
            return lines
        if self.saving.best_path is not None:
            lines["best checkpoint"] = (
                f"{_short(self.saving.best_path)} ({words(str(self.plan.checkpoint.monitor))} "
                f"{digits(self.saving.best_score or 0.0)})"
            )
        if self.plan.profiler != "none":
            # Lightning's profilers name their files so
            name = "fit-profile-0.txt" if self.plan.topology.world_size > 1 else "fit-profile.txt"
            lines["profile"] = _short(Path(self.plan.run_dir) / name)
        lines["loss curve"] = curve
        return lines | {"run folder": _short(self.plan.run_dir)}


def one_of(unit: str) -> str:
    """The unit of the loss weight in the singular: tokens → token."""
    return unit.removesuffix("s")


def words(key: str) -> str:
    """A metric's name in words: `validation/bits_per_token` → validation bits per token."""
    return key.replace("/", " ").replace("_", " ")


def print_table(lines: dict[str, str]) -> None:
    width = max(map(len, lines))
    rule = "─" * max(width + 2 + len(value) for value in lines.values())
    print("\n".join(["", rule, *(f"{key:<{width}}  {value}" for key, value in lines.items()), rule]), flush=True)


def plot_losses(rows: list[dict[str, str]], baselines: dict[str, float], path: Path) -> Path | None:
    """Plot training and validation loss over steps, with the baselines as lines; None: no losses were logged."""
    keys = {"training": loss_key(rows), "validation": "validation/loss"}
    if not any(row.get(keys["training"]) for row in rows):  # then plot every column that the module calls a loss
        logged = dict.fromkeys(key for row in rows for key in row if "loss" in key and row[key])
        keys |= {key: key for key in logged if key not in ("validation/loss", "train/loss_scale")}
    # Validation sets that have names
    logged = dict.fromkeys(key for row in rows for key in row if re.fullmatch("validation/.+/loss", key) and row[key])
    keys |= {words(key.removesuffix("/loss")): key for key in logged}
    curves = {name: [(int(row["step"]), float(row[key])) for row in rows if row.get(key)] for name, key in keys.items()}
    if not any(curves.values()):
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for name, points in curves.items():
        if points:
            axes.plot(*zip(*points, strict=True), label=name, marker="o" if name.startswith("validation") else None)
    for (name, value), style in zip(baselines.items(), (":", "--", "-."), strict=False):
        axes.axhline(value, linestyle=style, color="grey", label=f"{name} ({value:.2f})")
    axes.set(xlabel="step", ylabel="loss (nats)", title=path.parent.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def loss_key(rows: list[dict[str, str]]) -> str:
    """The column of the loss over the global batch."""
    return OTHER_LOSS if any(row.get(OTHER_LOSS) for row in rows) else LOSS


def _short(path: str | Path) -> str:
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
