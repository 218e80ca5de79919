"""The parts of a report that say where its numbers come from, and how well a classifier tells each class apart."""

from __future__ import annotations

import base64
import json
import shlex
from html import escape
from pathlib import Path
from typing import Any

from shardwise.run_dir.events import redact, redact_words
from shardwise.run_dir.files import CLASSES, CONFIG, PLAN, read_whole
from shardwise_tools.viewer.chart import words
from shardwise_tools.viewer.page import fold, paragraph, table
from shardwise_tools.viewer.record import RunRecord, read_json, read_text

_MOST_BYTES = 150_000  # of a picture, and of a folded text


def profile(folder: Path, summary: dict[str, Any]) -> str:
    """A profile's table and its picture. A picture is an image here, so that no program in it runs."""
    html = f"<h3>{escape(folder.name)}</h3>\n"
    html += "".join(map(picture, sorted([*folder.glob("*.svg"), *folder.glob("*.png")])[:4]))
    texts = [read_text(path) for path in sorted(folder.glob("*.txt"))[:2]]
    html += "".join(f"<pre>{escape(text[:_MOST_BYTES])}</pre>\n" for text in texts)
    if not texts:
        scalars = {key: value for key, value in summary.items() if isinstance(value, (int, float, str))}
        html += table((words(key), value) for key, value in scalars.items())
    return html + fold("everything that was read from the trace", _json(summary))


def picture(path: Path) -> str:
    """An image of a file; a word where it is too large, and nothing where it cannot be read."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return paragraph(f"{path.name} is too large for this page")
        content = read_whole(path)
    except OSError:
        return ""
    kind = "svg+xml" if path.suffix == ".svg" else "png"
    source = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    return f'<img class="picture" alt="{escape(path.stem)}" src="{source}">\n'


def _json(value: Any) -> str:
    text = json.dumps(redact(value), indent=2, ensure_ascii=False)
    return text if len(text) <= _MOST_BYTES else text[:_MOST_BYTES] + "\n…"


def environment(run: RunRecord) -> str:
    """Versions, machine and commit."""
    found = redact(run.environment)
    packages = found.pop("packages", None)
    gpus = found.pop("gpus", None)
    if isinstance(gpus, list) and gpus:
        found["gpus"] = ", ".join(f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus))
    if isinstance(packages, dict):
        found["packages"] = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    return table((key.replace("_", " "), value) for key, value in found.items())


def plan(run: RunRecord) -> str:
    """What was decided, and what was asked for."""
    decided = _json(run.plan) if run.plan else ""
    html = fold(f"{PLAN}: what was decided", decided) + fold(f"{CONFIG}: what was asked for", safe_config(run))
    return html or paragraph("neither can be read", "soft")


def safe_config(run: RunRecord) -> str:
    """The config as YAML, without secrets; empty where it cannot be read."""
    import yaml  # type: ignore[import-untyped]

    values = config_of(run)
    return str(yaml.safe_dump(redact(values), sort_keys=False, allow_unicode=True)) if values else ""


def config_of(run: RunRecord) -> dict[str, Any]:
    """The values of config.yaml; none where it is missing or cut short."""
    import yaml

    try:
        values = yaml.safe_load(run.config)
    except yaml.YAMLError:
        return {}
    return values if isinstance(values, dict) else {}


def command(run: RunRecord) -> str:
    """The command, so that it can be given again."""
    start = run.last_event("command")
    given = None if start is None else start.data.get("command")
    if start is None or not isinstance(given, list) or not given:
        return paragraph(f"The command was not recorded; {CONFIG} has every value that was asked for.", "soft")
    lines = shlex.join(redact_words([str(word) for word in given]))
    if isinstance(folder := start.data.get("folder"), str):
        lines = f"cd {shlex.quote(folder)}\n{lines}"
    launcher = start.data.get("launcher")
    note = f"{launcher} started it with these words on each rank." if launcher in ("torchrun", "slurm") else ""
    return f"<pre>{escape(lines)}</pre>\n{paragraph(note, 'soft')}"


_MOST_CLASSES = 200  # in a table
_COLUMNS = ("classes", "images", "right", "predicted")


def classes(run: RunRecord) -> str:
    """For each stage that was evaluated: accuracy of every class, and the picture of what was taken for what."""
    return "".join(_stage(path) for path in sorted(run.path.glob(CLASSES))[:4] if path.is_file())


def _stage(path: Path) -> str:
    rows = _rows(read_json(path))
    images = sum(row[1] for row in rows)
    if not images:
        return ""
    stage = path.stem.partition("_")[2]
    shares = [right / count for _, count, right, _ in rows if count]
    line = (
        f"accuracy {sum(row[2] for row in rows) / images:.2%}, balanced accuracy {sum(shares) / len(shares):.2%} (the "
        f"mean over the {len(shares):,} classes that have images), of {images:,} images"
    )
    per_class = [
        [str(name), count, "" if not count else f"{right / count:.1%}", "" if not said else f"{right / said:.1%}"]
        for name, count, right, said in rows[:_MOST_CLASSES]
    ]
    head = ["class", "images", "accuracy: its images that were recognised", "precision: of what was taken for it"]
    more = f"the first {_MOST_CLASSES} of {len(rows):,} classes" if len(rows) > _MOST_CLASSES else ""
    drawn = path.with_name(f"confusion_matrix_{stage}.png")
    return (
        f"<h3>{escape(stage)}</h3>\n"
        + paragraph(line)
        + table(per_class, head)
        + paragraph(more, "soft")
        + (picture(drawn) if drawn.is_file() else "")
    )


def _rows(found: Any) -> list[tuple[str, int, int, int]]:
    """The rows of a file, without those that are damaged."""
    columns = [found.get(key) for key in _COLUMNS] if isinstance(found, dict) else [None]
    if not all(isinstance(column, list) for column in columns):
        return []
    rows = zip(*columns, strict=False)
    return [row for row in rows if all(isinstance(value, int) and value >= 0 for value in row[1:])]
