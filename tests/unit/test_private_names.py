"""Private names of other packages that shardwise uses stand in private_names.py, each with a reason. They exist in the
installed versions, and functions among them take the arguments that we rely on."""

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.private_names import CALLED, NAMES, NO_NAMES, PUT_ON_OTHERS, SEEN_IN, USED, Name

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
PRIVATE = re.compile(r"_[A-Za-z]\w*(?<!__)")


def is_private(name: str) -> bool:
    return PRIVATE.fullmatch(name) is not None and not name.endswith(("_target_", "_partial_"))


def is_self(node: ast.AST) -> bool:
    """`self`, `cls` or `super()`."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def stored_on_self(tree: ast.AST) -> set[str]:
    stores = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return {node.attr for node in stores if is_self(node.value)}


@functools.cache
def classes_of(file: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.ClassDef)}


@functools.cache
def has_of_its_own(kind: type) -> frozenset[str]:
    """Private names of a class: its attributes, and what its methods put on `self`."""
    file = str(getattr(sys.modules.get(kind.__module__), "__file__", ""))
    node = classes_of(file).get(kind.__name__) if file.endswith(".py") else None  # else it is written in C
    stored = set() if node is None else stored_on_self(node)
    return frozenset(filter(is_private, {*vars(kind), *vars(kind).get("__annotations__", ()), *stored}))


def has(kind: Any) -> set[str]:
    """Of a class; of a module nothing."""
    return {name for base in getattr(kind, "__mro__", ()) if base is not object for name in has_of_its_own(base)}


def find(path: str) -> Any:
    """The object at a dotted path."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if not error.name or not ".".join(parts[:end]).startswith(error.name):
                raise
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path)


def is_class(path: str) -> bool:
    return path.rpartition(".")[2].lstrip("_")[0].isupper()


def is_in(path: str, name: str) -> bool:
    """Whether `name` is an attribute of what stands at `path`; in a module's own code it may also be mentioned."""
    try:
        return is_mentioned(path, name) or hasattr(find(path), name) or name in has(find(path))
    except (ImportError, AttributeError):
        return False


def is_mentioned(path: str, name: str) -> bool:
    """In the code of a module, which is not imported for that: it may take seconds."""
    spec = None if is_class(path) else importlib.util.find_spec(path)
    if spec is None or not str(spec.origin).endswith(".py"):
        return False
    nodes = ast.walk(ast.parse(Path(str(spec.origin)).read_text()))
    return any(name in (getattr(node, key, "") for key in ("attr", "value", "name", "id")) for node in nodes)


def arguments_of(function: Any) -> str:
    """As they are written, without types: what a caller or an override must keep to. A decorator is looked through,
    also one that does not say what it wraps."""
    function = inspect.unwrap(function)
    while inner := [c.cell_contents for c in getattr(function, "__closure__", None) or () if _is_wrapped(c)]:
        function = inner[0]
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def _is_wrapped(cell: Any) -> bool:
    return inspect.isfunction(cell.cell_contents)


class Reader:
    """Finds private names of others in the files of a package."""

    def __init__(self, trees: dict[str, ast.Module]) -> None:
        self.trees = trees
        self.classes = {n.name: (f, n) for f, t in trees.items() for n in ast.walk(t) if isinstance(n, ast.ClassDef)}
        self.ours = {name for tree in trees.values() for name in _defined_in(tree)}
        self.theirs = {name for entry in NAMES.values() for kind in _kinds(entry) for name in has(kind)}

    def used_in(self, file: str) -> set[str]:
        found = set(self._imported(file))
        found |= {name for name in self._words(file) if name not in self.ours or name in self.theirs}
        self._walk(self.trees[file], None, found)
        return found - set(PUT_ON_OTHERS) - set(NO_NAMES)

    def _imported(self, file: str) -> Iterator[str]:
        for module, name in _imports(self.trees[file]).values():
            if module.partition(".")[0] not in ("shardwise", "shardwise_tools"):
                yield from filter(is_private, [*module.split("."), name])

    def _words(self, file: str) -> Iterator[str]:
        """Texts that may be names, for getattr() say; what is put between values in a text is none."""
        tree = self.trees[file]
        within = {id(part) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for part in n.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in within:
                yield from (p for p in node.value.split(".") if is_private(p) and " " not in node.value)

    def _walk(self, node: ast.AST, inside: str | None, found: set[str]) -> None:
        """Attributes; and methods that take the place of a private one of a base class."""
        if isinstance(node, ast.ClassDef):
            inside = node.name
            private = {name for name in _defined_in(node) if is_private(name)}
            found |= private & self._of_bases(inside)
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            others = self._of_bases(inside) if is_self(node.value) and inside else self.theirs
            if node.attr in others or node.attr not in self.ours:
                found.add(node.attr)
        for child in ast.iter_child_nodes(node):
            self._walk(child, inside, found)

    @functools.cache  # noqa: B019 - two of these live at most
    def _of_bases(self, name: str) -> set[str]:
        """Private names that a class of ours has from others: its bases', and those that are mixed in by subclasses."""
        family, grows = {name}, True
        while grows:
            more = {n for n, (_, node) in self.classes.items() if family & {_last(base) for base in node.bases}}
            grows = not more <= family
            family |= more
        ancestors, todo = set(family), list(family)
        while todo:
            for base in self.classes[todo.pop()][1].bases:
                if _last(base) in self.classes and _last(base) not in ancestors:
                    ancestors.add(_last(base))
                    todo.append(_last(base))
        found: set[str] = set()
        for one in ancestors:
            file, node = self.classes[one]
            for base in node.bases:
                if _last(base) not in self.classes:
                    found |= _names_of_base(base, _imports(self.trees[file]))
        return found


def _kinds(name: Name) -> Iterator[type]:
    """The classes that it is an attribute of."""
    for path in filter(is_class, name.of):
        with suppress(ImportError, AttributeError):
            yield find(path)


def _last(node: ast.expr) -> str:
    """`a.B[T]` → B"""
    return ast.unparse(node).partition("[")[0].rpartition(".")[2]


def _names_of_base(base: ast.expr, imports: dict[str, tuple[str, str]]) -> set[str]:
    first, _, rest = ast.unparse(base).partition("[")[0].partition(".")
    if first not in imports:
        return set()  # a builtin
    path = ".".join(filter(None, [*imports[first], rest]))
    try:
        return has(find(path))
    except ImportError:
        return set()


@functools.cache
def _imports(tree: ast.AST) -> dict[str, tuple[str, str]]:
    """Name here → module, and name there."""
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name: (node.module or "", a.name) for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.asname or a.name.partition(".")[0]: (a.name if a.asname else a.name.partition(".")[0], "")
                      for a in node.names}  # fmt: skip
            found |= {a.name: (a.name, "") for a in node.names if "." in a.name}
    return found


@functools.cache
def _defined_in(tree: ast.AST) -> set[str]:
    """Names of functions, classes, variables, arguments and attributes of `self`."""
    found = stored_on_self(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def trees() -> dict[str, ast.Module]:
    """By the file's path in src/shardwise, or in src."""
    files = {path.relative_to(SRC).as_posix().removeprefix("shardwise/"): path for path in sorted(SRC.rglob("*.py"))}
    return {file: ast.parse(path.read_text()) for file, path in files.items()}


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(trees())


def is_installed(path: str) -> bool:
    """DeepSpeed and transformers need not be."""
    return importlib.util.find_spec(path.partition(".")[0]) is not None


def used(file: str) -> set[str]:
    return set(USED.get(file, "").split())


def test_no_private_name_is_used_that_the_table_does_not_have(reader: Reader) -> None:
    for file in reader.trees:
        found = reader.used_in(file)
        new, gone = found - used(file), used(file) - found
        assert not new, f"{file} uses private names of others, {sorted(new)}: tests/unit/private_names.py must say why"
        assert not gone, f"{file} uses {sorted(gone)} no more: take them out of USED in tests/unit/private_names.py"
    assert not (moved := USED.keys() - reader.trees.keys()), f"USED has files that are not there: {sorted(moved)}"


# Elsewhere a private method of Lightning's may be overridden, or called by the strategy that it belongs to.
LIGHTNING_OUTSIDE = {
    "metrics/loggers.py": "_wandb_init",
    "step/precision_plugin.py": "_after_closure _clip_gradients _optimizer",
    "strategies/base.py": "_forward_redirection",
    "strategies/ddp.py": "_ddp_kwargs _setup_model",
    "strategies/fsdp.py": "_device_mesh _setup_distributed",
    "strategies/zero/precision.py": "_after_closure _clip_gradients",
    "strategies/zero/strategy.py": "_init_optimizers_and_lr_schedulers",
}


def test_what_lightning_keeps_private_is_touched_in_one_room() -> None:
    lightnings = {name for name, entry in NAMES.items() if any(path.startswith("lightning") for path in entry.of)}
    for file in USED:
        touched = used(file) & lightnings
        allowed = set(LIGHTNING_OUTSIDE.get(file, "").split())
        if not file.startswith("lightning_internals/"):
            assert touched == allowed, f"{file}: {sorted(touched ^ allowed)}: put it behind a function there"


def test_every_name_of_the_table_is_used_and_has_a_reason() -> None:
    in_use = {name for file in USED for name in used(file)}
    assert in_use == NAMES.keys(), f"in USED or in NAMES alone: {sorted(in_use ^ NAMES.keys())}"
    assert all(len(name.why.split()) > 1 for name in NAMES.values())


def test_a_name_exists_in_the_installed_version_and_takes_what_it_took() -> None:
    wrong = []
    for name, entry in NAMES.items():
        if entry.with_cuda and torch.version.cuda is None:
            continue
        for path in filter(is_installed, entry.of):
            package = path.partition(".")[0]
            if not is_in(path, name):
                wrong.append(f"{path}.{name} has vanished since {package} {SEEN_IN[package]}: {entry.why}")
            elif entry.takes and (taken := arguments_of(getattr(find(path), name))) != entry.takes:
                wrong.append(f"{path}.{name} took {entry.takes} and takes {taken} now: {entry.why}")
    for path, (why, takes) in CALLED.items():
        if is_installed(path) and (taken := arguments_of(find(path))) != takes:
            wrong.append(f"{path} took {takes} and takes {taken} now: {why}")
    assert not wrong, "\n".join(wrong)


def test_what_is_put_on_an_object_of_others_hides_nothing_there() -> None:
    assert not [name for name, path in PUT_ON_OTHERS.items() if is_in(path, name)]


def test_the_versions_are_those_that_are_pinned() -> None:
    pinned = "".join(path.read_text() for path in ROOT.glob("requirements*.txt"))
    for package, version in SEEN_IN.items():
        if package != "python":
            assert f"{package}=={version} " in pinned, f"look at the names of {package}, then raise SEEN_IN"


BASE = "from lightning.pytorch.loops.fit_loop import _FitLoop\nclass Loop(_FitLoop):\n"


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from torch._inductor import config", {"_inductor"}),
        ("import torch._inductor.config", {"_inductor"}),
        ("def f(x): return x._new", {"_new"}),
        ("def f(x): return getattr(x, '_new', None)", {"_new"}),
        ("from unittest.mock import patch\npatch('torch.optim._new.f')", {"_new"}),
        ("class A:\n    def f(self): return self._g()\n    def _g(self): return self._new", {"_new"}),
        ("class A:\n    def f(self): self._own = 1\ndef g(a): return a._own, f'{a}_own', a.__dict__", set()),
        (BASE + "    def _advance(self): self._own = self._warn_if_modules_in_eval_mode()",
         {"_FitLoop", "_warn_if_modules_in_eval_mode"}),
        (BASE + "    def _warn_if_modules_in_eval_mode(self): pass", {"_FitLoop", "_warn_if_modules_in_eval_mode"}),
        (BASE + "    def f(self): self._data_source = 1", {"_FitLoop", "_data_source"}),
        ("class Mixin:\n    def f(self): self._data_source = 1\n" + BASE.replace("(_", "(Mixin, _") + "    pass",
         {"_FitLoop", "_data_source"}),
    ],
)  # fmt: skip
def test_the_reader_sees_what_is_others_and_what_is_ours(code: str, names: set[str]) -> None:
    assert Reader({"file.py": ast.parse(code)}).used_in("file.py") == names
