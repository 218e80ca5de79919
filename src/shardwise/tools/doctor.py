"""Says what this machine is, what of our optional packages is installed, and what keeps a run from training."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.tools import read_words

HELP = """\
usage: shardwise doctor [--measure] [--json] [cluster=NAME] [runs_dir=DIR]

What this machine is, in about a second: NVIDIA's GPUs with driver, memory and links, the names of other accelerators,
CPUs, memory, disk, versions, and which optional packages are installed, with what each missing one would bring.
Problems come first.

  --measure        also how fast each device's memory and products of matrices are, beside the cluster file's figures
  --json           the same for a program to read
  cluster=NAME     whose figures (conf/cluster/); left out: the one that has this GPU
  runs_dir=DIR     the folder of all runs (runs)

Exit code: 0 this machine can train; 1 something is broken, and named first; 2 a mistake in the words.
"""


@dataclass
class DoctorConfig:
    cluster: str | None = None
    runs_dir: str = "runs"


def run(words: list[str]) -> int:
    flags = {"--measure", "--json"} & set(words)
    alone, config = read_words([word for word in words if word not in flags], DoctorConfig)
    if alone:
        raise ConfigError(f"{alone[0]}: doctor takes --measure, --json, cluster=NAME and runs_dir=DIR")
    if config.cluster is not None and "--measure" not in flags:
        raise ConfigError(f"cluster={config.cluster}: its figures are for --measure; give that too, or leave it out")
    from shardwise.preflight import doctor

    report = doctor.examine(config.runs_dir)
    if "--measure" in flags:
        doctor.measure(report, [] if config.cluster is None else [f"cluster={config.cluster}"])
    text = doctor.as_json(report) if "--json" in flags else doctor.show(report)
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, "replace").decode(encoding))
    return 1 if report.problems else 0
