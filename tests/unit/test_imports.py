"""Which module may import which, read from the imports themselves. docs/architecture.md shows it as a picture."""

import ast
import functools
import re
import sys
from collections.abc import Set

from tests.harness.patience import run_patiently
from tests.harness.rooms import (
    DOOR,
    FLOOR_OF,
    MODULES,
    RECIPES,
    ROOT,
    SRC,
    TOOLS,
    imports,
    nodes_of,
    own_imports,
    room_of,
    tree_of,
)


def knows(names: Set[str], package: str) -> bool:
    return any(name == package or name.startswith(package + ".") for name in names)


@functools.cache
def on_import(module: str) -> frozenset[str]:
    """Everything that importing a module of shardwise imports, through the package's own modules and their parents."""
    names: set[str] = set()
    todo, done = {module}, set()
    while todo:
        current = todo.pop()
        done.add(current)
        found = imports(MODULES[current], everywhere=False)
        names |= found
        parents = {".".join(current.split(".")[:i]) for i in range(1, current.count(".") + 1)}
        todo |= ((found | parents) & MODULES.keys()) - done
    return frozenset(names)


def test_the_reader_of_imports_sees_what_it_should() -> None:
    assert len(MODULES) > 15 and RECIPES
    assert knows(imports(SRC / "shardwise/launch/local.py"), "torch")
    assert not knows(imports(SRC / "shardwise/launch/local.py", everywhere=False), "torch")
    assert knows(on_import("shardwise.trainer"), "torch.distributed.fsdp")  # through shardwise.parallel.precision


def test_shardwise_knows_no_recipe() -> None:
    assert not [module for module, path in MODULES.items() if knows(imports(path), "recipes")]


def test_the_picture_of_the_floors_is_that_of_the_imports() -> None:
    from benchmarks.pages.architecture import picture

    said = "docs/floors.svg shows other imports: python benchmarks/report.py draws it anew"
    assert (ROOT / "docs/floors.svg").read_text() == picture(), said


def test_the_map_has_every_room() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    for room in FLOOR_OF.keys() - {"__main__", "mistakes", "devices", "schedules", "errors"}:
        assert f"`{room}/`" in text or f"`{room}.py`" in text, f"docs/architecture.md does not say what {room} is for"


def test_every_room_has_a_floor() -> None:
    assert {room_of(module) for module in MODULES if module != "shardwise"} == FLOOR_OF.keys()


def test_a_module_imports_from_its_own_room_and_from_lower_floors() -> None:
    for module in MODULES.keys() - {"shardwise"}:
        room = room_of(module)
        for other in sorted(own_imports(module)):
            there = room_of(other)
            assert (module, there) == (DOOR, TOOLS) or there == room or FLOOR_OF[there] < FLOOR_OF[room], (
                f"{module} imports {other}: {there}/ is not below {room}/; move what is needed to a lower room"
            )


CORE = sorted(module for module in MODULES if room_of(module) not in (TOOLS, "__main__"))


def test_the_core_knows_the_tools_through_one_door() -> None:
    assert knows(imports(MODULES[DOOR]), TOOLS)
    for module in set(CORE) - {DOOR}:
        text = MODULES[module].read_text()
        assert not knows(imports(MODULES[module]), TOOLS) and f"{TOOLS}." not in text, (
            f"{module} names {TOOLS}: what both need belongs to the core, and what a run's end needs to {DOOR}"
        )


WITHOUT_TOOLS = """
import importlib, runpy, sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "shardwise_tools":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Without())
from shardwise.after_run import draw_memory, has_tools, leave_report
assert not has_tools() and leave_report("runs/none") == "" and not draw_memory(None, "none.png")
for name in sys.argv[1:]:
    importlib.import_module(name)
sys.argv = ["train.py", "dry_run=true", "strategy=fsdp", "devices=8"]
runpy.run_path("train.py", run_name="__main__")
"""


def test_the_core_and_the_recipes_run_without_the_tools() -> None:
    done = run_patiently([sys.executable, "-c", WITHOUT_TOOLS, *CORE, *RECIPES], 60, cwd=ROOT)
    assert done.returncode == 0 and '"shard": 8' in done.stdout, done.stderr


def test_no_modules_import_each_other_in_a_circle() -> None:
    # A package's face imports from its files; a file that imports a neighbour runs the face too, which is no circle.
    left = {module: own_imports(module) - {module.rpartition(".")[0]} for module in MODULES}
    while free := [module for module, needs in left.items() if not needs & left.keys()]:
        for module in free:
            del left[module]
    assert not left, f"these import each other: {sorted(left)}"


# Every rank takes part in these, and names no group: the end of a run, reading and writing its files, preflight.
NEEDS_NO_GROUP = {"shardwise.rank", "shardwise.checkpoint.files", "shardwise.preflight.measure"}
COLLECTIVES = re.compile(r"(all_)?(reduce|gather|to_all|broadcast|scatter|barrier)\w*")


def test_a_collective_names_its_group() -> None:
    for module in MODULES.keys() - NEEDS_NO_GROUP:
        for node in nodes_of(MODULES[module]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name, owner = node.func.attr, node.func.value
                if isinstance(owner, ast.Name) and owner.id == "dist" and COLLECTIVES.fullmatch(name):
                    assert "group" in {keyword.arg for keyword in node.keywords}, (
                        f"{module}, line {node.lineno}: dist.{name} over all ranks; name a group of distributed/mesh.py"
                    )


# Fields of others' objects that have the name of a field of ours
NOT_OURS = {"version", "data", "sync", "shapes", "loggers", "lr_scheduler_configs", "_results", "strategy"}
# Plain records, which are filled by those who find out
RECORDS = {"shardwise.preflight.verdict", "shardwise.config.schema"}


def fields_of(tree: ast.AST) -> set[str]:
    """What the classes of a file declare, or assign to `self`."""
    found = {n.attr for n in ast.walk(tree) if is_store(n) and ast.unparse(n.value) == "self"}  # type: ignore[attr-defined]
    for kind in (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)):
        found |= {n.target.id for n in kind.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    return found


def is_store(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def test_a_field_is_written_in_the_file_of_its_class_alone() -> None:
    fields = {module: fields_of(tree_of(path)) for module, path in MODULES.items() if module not in RECORDS}
    for module, path in MODULES.items():
        for node in nodes_of(path):
            if is_store(node) and ast.unparse(node.value) not in ("self", "cls"):  # type: ignore[attr-defined]
                name = node.attr  # type: ignore[attr-defined]
                owners = [other for other, names in fields.items() if name in names]
                assert not owners or module in owners or name in NOT_OURS, (
                    f"{module}, line {node.lineno}: writes {ast.unparse(node)}, a field of {owners}; give it a method"  # type: ignore[attr-defined]
                )


def test_the_reader_of_fields_sees_a_second_writer() -> None:
    assert "step_skipped" in fields_of(ast.parse(MODULES["shardwise.step.verdict"].read_text()))
    assert any(map(is_store, ast.walk(ast.parse("precision.verdict.step_skipped = True"))))


# What users define: the names of protocols.py
OPTIONAL = ("loss_weight", "loss_weight_unit", "flops", "channels_last", "init_module_weights", "_no_split_modules",
            "hugging_face_names", "is_elementwise", "is_rowwise", "kept_by_rows",
            "make_state", "reads_found_inf", "baselines", "rows_are_steps", "leaves")  # fmt: skip


def test_what_users_may_define_is_asked_for_in_one_file() -> None:
    for module in MODULES.keys() - {"shardwise.protocols"}:
        for node in nodes_of(MODULES[module]):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and len(node.args) > 1:
                name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
                assert name not in OPTIONAL, f"{module}, line {node.lineno}: asks for {name}; protocols.py does"


MOST_LINES = 500
MOST_LINES_OF_A_CLASS = 300


def test_a_long_file_says_why_and_no_class_is_long() -> None:
    for module, path in (MODULES | RECIPES).items():
        lines = path.read_text().splitlines()
        assert len(lines) <= MOST_LINES or f"longer than {MOST_LINES} lines: " in lines[0], (
            f"{module} has {len(lines)} lines: cut it, or say why in its first line (longer than {MOST_LINES} lines: …)"
        )
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                length = int(node.end_lineno or 0) - node.lineno + 1
                assert length <= MOST_LINES_OF_A_CLASS, (
                    f"{module}.{node.name} has {length} lines: give a part of it a class of its own"
                )


WITHOUT_TORCH = [
    "config",
    "plan",
    "run_dir",
    "process",
    "launch",
    "cli",
    "start",
    "errors",
    "mistakes",
    "devices",
    "schedules",
    "protocols",
    "after_run",
]
ALSO_WITHOUT_TORCH = {
    "shardwise.preflight.node_report",
    "shardwise.preflight.pairs",
    "shardwise.preflight.verdict",
    TOOLS,
    "shardwise_tools.doctor",
    "shardwise_tools.machine",
    "shardwise_tools.viewer.report",
    "shardwise_tools.viewer.watch",
}


def test_a_dry_run_needs_no_torch() -> None:
    for module in MODULES.keys() - {"shardwise"}:
        if room_of(module) in WITHOUT_TORCH or module in ALSO_WITHOUT_TORCH:
            for package in ("torch", "lightning", "torchmetrics", "numpy", "wandb", "deepspeed"):
                assert not knows(on_import(module), package), f"importing {module} imports {package}"


ONLY = {
    "torch.distributed.fsdp": {"shardwise.strategies", "shardwise.parallel.precision"},
    "torch.distributed._composable": {"shardwise.strategies"},
    "safetensors": {"shardwise.weights.loading"},
    "deepspeed": {"shardwise.strategies.zero", "shardwise.optim.deepspeed", "shardwise.optim.deepspeed_operators"},
    "lightning.pytorch.strategies": {"shardwise.strategies"},
    "wandb": {"shardwise.metrics.loggers"},
    "lightning.pytorch.loggers.wandb": {"shardwise.metrics.loggers"},
    "lightning.pytorch.loggers.WandbLogger": {"shardwise.metrics.loggers"},
    "rich": {"shardwise_tools.viewer.watch"},
    "hydra": {"shardwise.config"},
    "omegaconf": {"shardwise.config"},
}


def test_each_foreign_package_has_one_owner() -> None:
    for package, owners in ONLY.items():
        for module, path in MODULES.items():
            if not any(module == owner or module.startswith(owner + ".") for owner in owners):
                assert not knows(imports(path), package), f"{module} imports {package}"


NOT_FOR_RECIPES = (
    "torch.distributed", "deepspeed", "hydra", "omegaconf", "wandb",
    "shardwise.strategies", "shardwise.launch", "shardwise.plan", "shardwise.trainer",
)  # fmt: skip


def test_recipes_know_no_rank_no_strategy_and_no_launcher() -> None:
    for recipe, path in RECIPES.items():
        for package in NOT_FOR_RECIPES:
            assert not knows(imports(path), package), f"{recipe} imports {package}"
        assert "dist." not in path.read_text(), recipe


# The rooms of shardwise that a recipe may use
SEEN_BY_RECIPES = {"data", "nn", "weights", "protocols", "errors", "schedules", "accelerator"}


def test_recipes_see_a_few_rooms_of_shardwise() -> None:
    for recipe, path in RECIPES.items():
        for name in sorted(imports(path)):
            if knows({name}, "shardwise"):
                assert name != "shardwise" and room_of(name) in SEEN_BY_RECIPES, (
                    f"{recipe} imports {name}; recipes may use {', '.join(sorted(SEEN_BY_RECIPES))}"
                )
            if knows({name}, TOOLS):
                assert knows({name}, f"{TOOLS}.prepare"), f"{recipe} imports {name}; of the tools it may use prepare"


TORCH_OF_ONE_KIND = re.compile(
    r"torch\.(cuda|xpu|mps|hip)\b|torch\.version\.|backends\.(cuda|cudnn|mps)\b|torch import cuda"
)


def test_one_module_knows_the_device() -> None:
    """In comments too: a sentence about torch.cuda would be about what another file does."""
    for module in (MODULES | RECIPES).keys() - {"shardwise.accelerator"}:
        lines = (MODULES | RECIPES)[module].read_text().splitlines()
        said = [line for line in lines if TORCH_OF_ONE_KIND.search(line)]
        assert not said, f"{module} says {said}; shardwise/accelerator.py does that for every kind of device"


def test_the_reader_of_devices_sees_them() -> None:
    assert TORCH_OF_ONE_KIND.search(MODULES["shardwise.accelerator"].read_text())
    assert TORCH_OF_ONE_KIND.search("torch.cuda.synchronize()") and TORCH_OF_ONE_KIND.search("torch.backends.cudnn.x")


def test_a_dry_run_leaves_torch_alone() -> None:
    code = (
        "import atexit, runpy, sys\n"
        "heavy = ('torch', 'lightning', 'numpy')\n"
        "atexit.register(lambda: print([m for m in heavy if m in sys.modules], file=sys.stderr))\n"
        "sys.argv = ['train.py', 'dry_run=true', 'strategy=fsdp', 'devices=8']\n"
        "runpy.run_path('train.py', run_name='__main__')\n"
    )
    done = run_patiently([sys.executable, "-c", code], 10, cwd=ROOT)
    assert done.returncode == 0 and done.stderr.strip() == "[]"
    assert '"shard": 8' in done.stdout


SHARED = [path for folder in ("benchmarks", "tests/harness") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_benchmarks_share_helpers_with_tests_through_the_harness_alone() -> None:
    """A file of tests may change whenever its tests do; what others use of it moves to tests/harness/."""
    for path in SHARED:
        used = {name for name in imports(path) if knows({name}, "tests")}
        assert all(knows({name}, "tests.harness") for name in used - {"tests"}), f"{path}: {sorted(used)}"


ROOTS_OF_REGISTRIES = (
    "import lightning.pytorch, torch, torchmetrics, {modules}\n"
    "def below(kind):\n"
    "    for found in type.__subclasses__(kind):\n"
    "        yield found\n"
    "        yield from below(found)\n"
    "kinds = [torch.optim.Optimizer, torch.nn.Module, torchmetrics.Metric, torch.utils.data.Dataset, "
    "torch.optim.lr_scheduler.LRScheduler, lightning.pytorch.Callback, lightning.pytorch.strategies.Strategy]\n"
    "print(*(f'{{root.__name__}}:{{found.__module__}}:{{found.__name__}}' for root in kinds for found in below(root)))"
)


def registered(*modules: str) -> list[tuple[str, str, str]]:
    """What others find who collect the classes below torch's and Lightning's when `modules` have been imported."""
    code = ROOTS_OF_REGISTRIES.format(modules=", ".join(modules))
    done = run_patiently([sys.executable, "-c", code], 100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [tuple(found.split(":", 2)) for found in done.stdout.splitlines()[-1].split()]  # type: ignore[misc]


def test_a_plain_run_registers_no_optimizer_layer_metric_or_data_set() -> None:
    found = registered("shardwise.launch.worker", "shardwise.rank", "shardwise.strategies.ddp")
    ours = {(root, name) for root, module, name in found if module.startswith("shardwise.")}
    assert {root for root, _ in ours} == {"Callback", "Strategy"}
    assert not {name for _, name in ours} & {"WeightAverage", "FindLearningRate", "GarbageCollection"}


def test_no_class_of_ours_has_the_name_of_one_beside_it() -> None:
    """Packages collect subclasses by name: of torch's Optimizer, for example."""
    rooms = tuple(f"shardwise.{room}." for room in ("optim", "callbacks", "nn", "strategies", "data", "parallel"))
    found = registered(*(m for m in MODULES if m.startswith(rooms)))
    ours = {(root, name) for root, module, name in found if module.startswith("shardwise.")}
    assert {"MuonAdamW", "FindLearningRate"} <= {name for _, name in ours}
    theirs = {
        (root, name) for root, module, name in found if module.startswith(("torch.", "torchmetrics.", "lightning."))
    }
    assert not ours & theirs
