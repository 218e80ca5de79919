"""Writes a page about a run, or about several side by side: `shardwise report runs/a [runs/b …]`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.run_dir.files import REPORT
from shardwise.tools import read_words
from shardwise.viewer.compare import write_comparison
from shardwise.viewer.record import find_run, read_run
from shardwise.viewer.report import write_report

HELP = """\
usage: shardwise report RUN [RUN …] [output=FILE]

RUN: a run's folder, runs/<id>, also of a run that goes on or has died.

Writes one HTML file that asks nothing of a network: how the run ended and its verdicts, loss, speed, memory, telemetry
of every rank over time, restarts and saves, profiles, environment, Plan, and the command. Of several runs: what differs
in their configurations, their final numbers and verdicts, and their curves in one picture.

  output=FILE     where it is written (RUN/report.html; of several runs, report.html beside the first one's folder)
"""


@dataclass
class ReportConfig:
    output: str | None = None


def run(words: list[str]) -> None:
    """Write what `words` ask for, and print its path.

    Raises:
        ConfigError: a folder is no run's, or the file cannot be written.
    """
    words = _with_output(words)
    folders, config = read_words(words, ReportConfig)
    if not folders:
        raise ConfigError("report takes one run or several: shardwise report runs/<id>; --help shows how")
    paths = [find_run(folder) for folder in folders]
    if len(set(paths)) < len(paths):
        raise ConfigError(f"{' '.join(folders)}: a run is given twice; name each once")
    standard = paths[0] / REPORT if len(paths) == 1 else paths[0].parent / REPORT
    output = standard if config.output is None else Path(config.output).expanduser().absolute()
    if output.is_dir():
        raise ConfigError(f"output={output} is a folder: give the name of a file in it, such as {output / REPORT}")
    try:
        if len(paths) == 1:
            write_report(paths[0], output)
        else:
            write_comparison([read_run(path) for path in paths], output)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}; give another output=") from None
    print(output)


def _with_output(words: list[str]) -> list[str]:
    """The words, with `--output FILE` and `--output=FILE` as `output=FILE`."""
    found: list[str] = []
    for word in words:
        if found and found[-1] == "--output":
            found[-1] = f"output={word}"
        else:
            found.append(word.removeprefix("--") if word.startswith("--output=") else word)
    if found and found[-1] == "--output":
        raise ConfigError("--output: no file follows; write output=FILE")
    return found
