"""The rooms of shardwise, their floors, and who imports whom: read by a test and by docs/architecture.md's picture."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TOOLS = "shardwise_tools"  # a package beside shardwise, and one room here
DOOR = "shardwise.after_run"  # the file of the core that may import the tools, besides `python -m shardwise`
MODULES = {
    module_name(path, SRC): path for package in ("shardwise", TOOLS) for path in sorted((SRC / package).rglob("*.py"))
}
RECIPES = {module_name(path, ROOT): path for path in sorted((ROOT / "recipes").rglob("*.py"))}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


@functools.cache
def imports(path: Path, everywhere: bool = True) -> frozenset[str]:
    """Dotted names that a file imports: `from a import b` is both a and a.b. Not `everywhere`: those run on import."""

    def walk(node: ast.AST) -> set[str]:
        found: set[str] = set()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found |= {alias.name for alias in child.names}
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                found |= {str(child.module), *(f"{child.module}.{alias.name}" for alias in child.names)}
            elif everywhere or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                found |= walk(child)
        return found

    return frozenset(walk(tree_of(path)))


# Rooms (a folder of shardwise, a file in its root, or the tools) on floors, the lowest first
FLOORS = [
    {"errors", "mistakes", "devices", "accelerator", "schedules", "protocols"},
    {"nn"},
    {"config"},
    {"plan"},
    {"run_dir"},
    {"distributed"},
    {"process", "optim", "parallel", "lightning_internals", "after_run"},
    {"checkpoint"},
    {"data", "weights"},
    {"step"},
    {"strategies", "metrics"},
    {"callbacks"},
    {"trainer"},
    {"rank"},
    {"launch"},
    {"preflight"},
    {TOOLS, "start"},
    {"cli"},
    {"__main__"},
]
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def room_of(module: str) -> str:
    package, _, rest = module.partition(".")
    return TOOLS if package == TOOLS else rest.split(".")[0]


def own_imports(module: str) -> set[str]:
    """Modules of ours that a module imports, within functions too, and without itself."""
    return set(imports(MODULES[module]) & MODULES.keys()) - {module, "shardwise"}
