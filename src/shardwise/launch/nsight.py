"""Puts NVIDIA's profilers before a rank's command, and has what nsys recorded read. No torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from shardwise.config.paths import environment_with_source
from shardwise.errors import ConfigError, DataError
from shardwise.plan import Plan
from shardwise.run_dir.files import ncu_report, profile_export, profile_folder, profile_report

# slurm/job.sh has the same words
NSYS = ("nsys", "profile", "--trace=cuda,nvtx,osrt", "--capture-range=cudaProfilerApi", "--capture-range-end=stop",
        "--cuda-graph-trace=node", "--force-overwrite=true")  # fmt: skip
# Each of these kernels runs several times; clocks are left as the run has them
NCU = ("ncu", "--profile-from-start=off", "--nvtx", "--clock-control=none", "--launch-count=500", "--force-overwrite")


def check_profiler(plan: Plan) -> None:
    """Check that the profiler is there which this process has to start.

    Raises:
        ConfigError: it is not.
    """
    tool = plan.profile.tool
    if tool != "torch" and plan.launcher == "local" and shutil.which(tool) is None:
        raise ConfigError(
            f"profile.tool={tool}: there is no {tool} on the PATH; it comes with NVIDIA's CUDA toolkit, or use "
            f"profile.tool=torch, which needs nothing"
        )


def words_before(plan: Plan, rank: int) -> list[str]:
    """The words before the command of `rank`; none if no other profiler than torch's records it."""
    profile = plan.profile
    if profile.tool == "torch" or profile.start is None or not profile.has(rank):
        return []
    folder = profile_folder(plan.run_dir, profile.start)
    output = str(folder).replace("%", "%%")  # both read % as the begin of a variable
    if profile.tool == "ncu":
        return [*NCU, f"--export={output}/rank-{rank}"]
    return [*NSYS, f"--output={output}/rank-%q{{RANK}}"]


def make_folder(plan: Plan) -> None:
    """Make the folder of the reports: the profilers make none, and ncu opens its report at once. Raises OSError."""
    if plan.profile.tool != "torch" and plan.profile.start is not None:
        profile_folder(plan.run_dir, plan.profile.start).mkdir(parents=True, exist_ok=True)


def read_reports(plan: Plan) -> None:
    """Read what nsys has recorded, and print the table; a report that cannot be read is left to nsys-ui.

    Of ncu, say where its report is.
    """
    profile = plan.profile
    if profile.tool == "torch" or profile.start is None:
        return
    folder = profile_folder(plan.run_dir, profile.start)
    if profile.tool == "ncu":
        report = ncu_report(folder, rank=0)
        said = f"ncu-ui opens {report}" if report.exists() else f"ncu has written no report into {folder}"
        print(f"profile: {said}", flush=True)
        return
    ranks = [rank for rank in range(plan.topology.world_size) if profile_report(folder, rank).exists()]
    if not ranks:
        print(f"profile: nsys has written no report into {folder}", flush=True)
        return
    try:
        text = "\n" + export_and_read(folder, ranks)
    except DataError as error:
        text = f"profile: {error}\n"
    print(f"{text}profile: nsys-ui opens the reports in {folder}", flush=True)


def export_and_read(folder: Path, ranks: list[int]) -> str:
    """The table of a profile whose ranks have reports of nsys.

    Raises:
        DataError: nsys cannot export a report, or what it has exported cannot be read.
    """
    for rank in ranks:
        command = ["nsys", "export", "--type=sqlite", "--force-overwrite=true",
                   f"--output={profile_export(folder, rank)}", str(profile_report(folder, rank))]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise DataError(f"nsys export cannot be started: {error.strerror}; put nsys on the PATH") from None
        if done.returncode:
            said = _last(done.stderr or done.stdout)
            raise DataError(f"nsys export of {command[-1]} failed (exit code {done.returncode}): {said}")
    done = subprocess.run(
        [sys.executable, "-m", "shardwise.metrics.profile_summary", str(folder), *map(str, ranks)],
        env=environment_with_source(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise DataError(_last(done.stderr))
    return done.stdout


def _last(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else "it says nothing"
