"""Start a Plan's ranks on this node through torch.distributed's elastic launcher."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from shardwise.compose import ROOT
from shardwise.plan import Plan


def launch(plan: Plan, in_process: bool) -> int:
    """Run `plan` and return its exit code. `in_process`: a single rank needs no process of its own."""
    if plan.launcher == "torchrun" or (plan.topology.world_size == 1 and in_process):
        from shardwise.launch.worker import run_rank

        return run_rank(plan)
    return _launch_processes(plan)


def _launch_processes(plan: Plan) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _prepare_environment(plan)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as directory:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=plan.topology.devices,
            run_id=plan.run_id,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            local_addr="localhost",
        )
        plan_file = Path(directory) / "plan.json"
        plan_file.write_text(plan.to_json())
        try:
            elastic_launch(config, sys.executable)("-u", "-m", "shardwise.launch.worker", str(plan_file))
        except ChildFailedError as error:
            # The rank has said what happened; its exit code is ours.
            rank, failure = error.get_first_failure()
            code = failure.exitcode
            if code < 0:
                sys.stderr.write(f"shardwise: rank {rank} was killed by signal {-code}; the other ranks were stopped\n")
            return code if code > 0 else 128 - code
        except SignalException as error:
            sys.stderr.write(f"shardwise: stopped by {error.sigval.name}; all ranks were stopped\n")
            return 128 + error.sigval.value
        except KeyboardInterrupt:
            return 130
    return 0


def _prepare_environment(plan: Plan) -> None:
    here = [str(ROOT / "src"), str(ROOT), str(Path.cwd())]
    os.environ["PYTHONPATH"] = os.pathsep.join([*here, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ["SHARDWISE_PARENT"] = str(os.getpid())
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // plan.topology.devices)))
