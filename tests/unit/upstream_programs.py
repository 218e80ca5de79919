"""Runs programs of docs/upstream.md, each in a fork of a process that has imported the packages already.

    python -m tests.unit.upstream_programs PROGRAMS RESULTS

PROGRAMS: a JSON object of title to code. RESULTS: gets one of title to the error, null where there was none.
"""

import importlib
import json
import logging
import os
import signal
import sys
import traceback
import warnings
from contextlib import suppress
from pathlib import Path

PACKAGES = (
    "torch.distributed.fsdp",
    "torch.testing._internal.distributed.fake_pg",
    "lightning.pytorch.demos.boring_classes",
    "deepspeed",
    # What DeepSpeed imports when an engine is made
    "deepspeed.module_inject.auto_ep_layer",
    "functorch.compile",
    "shardwise.optim.deepspeed_operators",
)


def import_all() -> None:
    for package in PACKAGES:
        with suppress(ModuleNotFoundError):  # DeepSpeed need not be there
            importlib.import_module(package)
    for name in ("lightning.pytorch", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if operators := sys.modules.get("shardwise.optim.deepspeed_operators"):
        operators.watch_builds()  # DeepSpeed's operators may be built already


def run(title: str, code: str, folder: Path) -> str | None:
    """The error of a program that is run in a process of its own; None if there was none."""
    told = folder / "error"
    told.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        signal.alarm(100)  # its parent may be gone by then
        try:
            exec(compile(code, title, "exec"), {"__name__": "__main__"})
        except BaseException:
            told.write_text(traceback.format_exc(limit=-2))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if told.exists():
        return told.read_text()
    return f"it was killed (status {status})" if status else None


def main(programs: Path, results: Path) -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "WANDB_SILENT": "false"}
    warnings.simplefilter("ignore")
    os.chdir(results.parent)
    import_all()
    errors = {title: run(title, code, results.parent) for title, code in json.loads(programs.read_text()).items()}
    results.write_text(json.dumps(errors))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
