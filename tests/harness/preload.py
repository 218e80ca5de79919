"""What a rank imports sooner or later. The fork server imports it once, so that no rank that it forks has to.

Some of it libraries leave until it is used: several seconds in the first run of every rank under ZeRO.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = [
    "torch._inductor.compile_fx", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch.distributed.algorithms.ddp_comm_hooks", "torch.profiler", "torch.utils.cpp_extension",
    "deepspeed.ops.op_builder.all_ops", "deepspeed.runtime.zero.muon.muon_optimizer",
    "recipes.image_classification.data", "recipes.language_modeling.module", "recipes.language_modeling.data",
    "shardwise.cli", "shardwise.launch.worker", "shardwise.rank", "tests.harness.cells", "tests.harness.forked",
]  # fmt: skip

# Python 3.11 does not give its fork server the path of the process that starts it: an installed shardwise, which may
# be that of another checkout, would be found first.
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
for module in MODULES:
    if find_spec(module.partition(".")[0]) is not None:
        import_module(module)
import_module("hydra.core.plugins").Plugins.instance()  # imports all that Hydra itself consists of
