"""Puts NVIDIA's profilers before a rank's command, and says where their reports are. No torch."""

from __future__ import annotations

import shutil

from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.run_dir.files import profile_folder

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


def show_reports(plan: Plan) -> None:
    """Say where the reports of nsys and ncu are, and what reads them."""
    profile = plan.profile
    if profile.tool == "torch" or profile.start is None:
        return
    folder = profile_folder(plan.run_dir, profile.start)
    if not any(folder.glob(f"*.{profile.tool}-rep")):
        said = f"{profile.tool} has written no report into {folder}"
    elif profile.tool == "nsys":
        said = f"nsys stats and nsys-ui read the reports in {folder}"
    else:
        said = f"ncu-ui opens the report in {folder}"
    print(f"profile: {said}", flush=True)
