"""Sorts the columns of a metrics.csv into the charts of a report, and names them in words."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.viewer.chart import Curve
from shardwise.viewer.follow import Series

LOSSES = ("train/global_batch_loss", "train/loss")  # the first of them that is there is that of the global batch
_SPREAD = ("_min", "_max", "_min_rank", "_max_rank")
# Positions and sums, which only grow
_HIDDEN = {"epoch", "train/samples", "train/training_seconds"}
_SHARES = ("train/mfu", "train/data_wait", "train/goodput")


@dataclass(frozen=True)
class Chart:
    """What one picture shows."""

    section: str
    title: str
    curves: tuple[Curve, ...]


def words(name: str) -> str:
    """A column's name in words: `train/step_seconds` → step seconds."""
    text = re.sub(r"^(train|shardwise)/", "", name).replace("data_wait", "waiting for data")
    text = text.replace("/", " ").replace("_per_second", "/s").replace("_", " ")
    return re.sub(r"\b(mfu|gpu|sm|ecc|gib)\b", lambda found: found[0].upper().replace("GIB", "GiB"), text)


def charts_of(series: Mapping[str, Series]) -> list[Chart]:
    """The charts of a run, in the order of the page's sections."""
    left = {name: found for name, found in series.items() if name not in _HIDDEN and not is_spread(name, series)}

    def take(*names: str) -> dict[str, Series]:
        return {name: left.pop(name) for name in names if name in left}

    def each(section: str, names: Iterable[str]) -> list[Chart]:
        return [Chart(section, words(name), (_curve(name, left.pop(name), series),)) for name in list(names)]

    def together(section: str, title: str, names: Sequence[str]) -> list[Chart]:
        found = take(*names)
        return [Chart(section, title, tuple(_curve(name, one, series) for name, one in found.items()))] * bool(found)

    losses = [loss_name(series), *(name for name in left if re.fullmatch(r"(validation|val)[/_](.+/)?loss", name))]
    charts = together("Loss", "loss", losses)
    charts += each("Loss", [name for name in left if "loss" in name and name != "train/loss_scale"])
    charts += each("Loss", [name for name in left if name.startswith(("validation/", "val_"))])
    charts += each("Loss", [name for name in ("train/gradient_norm", "train/learning_rate") if name in left])
    rates = [name for name in left if is_speed(name)]
    charts += each("Speed", rates[-1:])
    take(*rates)  # the others are multiples of it
    charts += each("Speed", [name for name in ("train/step_seconds",) if name in left])
    charts += together("Speed", ", ".join(words(name) for name in _SHARES if name in left), _SHARES)
    telemetry = [name for name in left if is_telemetry(name, series)]
    of_training = [name for name in left if name not in telemetry]
    charts += together("Memory", "memory, GiB", [n for n in of_training if re.search(r"memory_\w+_gib$", n)])
    charts += each("Memory", [name for name in of_training if name in left and re.search("memory|alloc", name)])
    charts += each("Telemetry", telemetry)
    return charts + each("Other values", left)


def is_speed(name: str) -> bool:
    """Whether a column says how fast the run trains, such as `train/tokens_per_second`."""
    return name.endswith("_per_second") and name.startswith(("train/", "shardwise/"))


def is_telemetry(name: str, series: Collection[str]) -> bool:
    """Whether a column is what GPUs or hosts report."""
    return name.startswith(("gpu/", "host/")) or f"{name}_max" in series


def loss_name(series: Mapping[str, Series]) -> str:
    """The column of the loss over the global batch."""
    return next((name for name in LOSSES if name in series), LOSSES[-1])


def is_spread(name: str, series: Collection[str]) -> bool:
    """Whether a column is the smallest or largest of all ranks, or its rank, beside the column of the mean."""
    return any(name.endswith(end) and name.removesuffix(end) in series for end in _SPREAD)


def _curve(name: str, found: Series, series: Mapping[str, Series]) -> Curve:
    is_few = name.startswith(("validation", "val_")) and len(found.steps) <= 200
    return Curve(words(name), found, series.get(f"{name}_min"), series.get(f"{name}_max"), is_few)
