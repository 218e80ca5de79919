"""Builds objects from nodes with a `_target_`, without Hydra's instantiate, since ranks never run Hydra."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType, NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from shardwise.config.schema import as_number, as_yaml, remedy_for_text
from shardwise.config.secrets import read_secrets
from shardwise.errors import ConfigError, a_or_an, did_you_mean
from shardwise.mistakes import describe_mistake

# Modules of the standard library whose classes only have values, and do nothing when they are made.
_PLAIN = ("collections", "datetime", "decimal", "fractions", "functools", "pathlib", "uuid", "zoneinfo")
# Modules that stream data → the packages that bring them
_PACKAGES = {
    "datasets": "datasets",
    "streaming": "mosaicml-streaming",
    "litdata": "litdata",
    "webdataset": "webdataset",
}
_PIP = re.compile(r"pip3? install (?:-\S+ )*['\"]?([\w-]+(?:\[[\w,-]+\])?)")
_WORDS = ("_target_", "_partial_")
_PLAIN_TYPES = (bool, bytes, complex, dict, float, frozenset, int, list, range, set, slice, str, tuple)


def locate(path: str, where: str) -> Callable[..., Any]:
    """Find the class, function or class method of a dotted path. The current directory is importable.

    Raises:
        ConfigError: no such module or attribute, or something of the standard library that may run commands. An error
            inside the module keeps its own traceback.
    """
    read_as_one()
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    names = path.split(".")
    if len(names) < 2 or not all(name.isidentifier() for name in names):
        raise ConfigError(f"{where}._target_={path}: not a dotted path; write package.module.Class")
    found: Any = _import(names[0], path, where)
    if found is None:
        package = _PACKAGES.get(names[0])
        raise ConfigError(
            f"{where}._target_={path}: there is no module {names[0]}; it is looked for in {Path.cwd()} and the "
            f"installed packages" + (f": pip install {package}" if package else "")
        )
    for i, name in enumerate(names[1:], start=1):
        parent = ".".join(names[:i])
        is_module = isinstance(found, ModuleType)
        if not hasattr(found, name) and not (is_module and _import(f"{parent}.{name}", path, where)):
            near = did_you_mean(name, vars(found) if hasattr(found, "__dict__") else ())
            raise ConfigError(f"{where}._target_={path}: {parent} has no {name}{near}{_elsewhere(names[0])}")
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(f"{where}._target_={path}: {a_or_an(type(found).__name__)}, neither a class nor a function")
    home = _home(found)
    is_plain = found in _PLAIN_TYPES or (home in _PLAIN and isinstance(found, type))
    if home in sys.stdlib_module_names and not is_plain:
        raise ConfigError(
            f"{where}._target_={path} is of Python's standard library ({home}), and is not called: a _target_ names a "
            f"class or function of yours or of an installed package; of the standard library only classes of "
            f"{', '.join(_PLAIN)} and the plain types (SECURITY.md)"
        )
    return cast(Callable[..., Any], found)


def _elsewhere(name: str) -> str:
    """What to say where the current directory has a module of that name, and another one was imported."""
    here = [path for path in (Path.cwd() / f"{name}.py", Path.cwd() / name) if path.exists()]
    file = getattr(sys.modules.get(name), "__file__", None)
    if not here or file is None or Path(file).is_relative_to(here[0]):
        return ""
    return f"; {name} is {file}, and {here[0]} has the same name: give it another one"


def _home(target: Any) -> str:
    """The first part of the name of the module that defines `target`, even if it has other names."""
    if isinstance(target, ModuleType):
        return target.__name__.partition(".")[0]
    owner = getattr(target, "__self__", None)
    module = getattr(target, "__module__", None) or getattr(owner, "__module__", None) or type(owner).__module__
    return str(module).partition(".")[0]


def _import(name: str, path: str, where: str) -> ModuleType | None:
    """Import the module; None if there is none of this name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return None
        raise ConfigError(
            f"{where}._target_={path}: importing it needs {error.name}, which is not there; install it, or mend the "
            f"import in {name}"
        ) from error


def check(
    node: Any, where: str, base: type | None = None, *, positional: int = 0, supplied: tuple[str, ...] = ()
) -> None:
    """Locate every target below `node` and bind its arguments, but build nothing.

    `base`: the class of the object that the outermost target makes. The target is a subclass of it, or a Python
    function, whose result is checked after the call. `positional`: the number of arguments that it will get by
    position. `supplied`: the names of those that it will get by name.

    Raises:
        ConfigError: a target of another kind, an argument that the target does not take, one that it needs and does
            not get, or one of another type than the target's annotation.
    """
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        check(value, f"{where}.{key}")
    if not (isinstance(node, dict) and "_target_" in node):
        return
    target, is_partial = locate(node["_target_"], where), _is_partial(node, where)
    if is_partial and (base is not None or positional):
        raise ConfigError(f"{where}._partial_=true: the run itself calls {node['_target_']}; leave _partial_ out")
    if base is not None:
        _check_kind(target, node["_target_"], where, base)
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    arguments = {key: value for key, value in node.items() if key not in _WORDS}
    takes = [name for name in signature.parameters if name != "self" and name not in supplied][positional:]
    if twice := [name for name in supplied if name in arguments]:
        raise ConfigError(f"{where}.{twice[0]}: {node['_target_']} is given it when it is called; leave it out")
    bind = signature.bind_partial if is_partial else signature.bind
    try:
        bind(*[None] * positional, **dict.fromkeys(supplied), **arguments)
    except TypeError as error:
        raise ConfigError(f"{where}: {node['_target_']}: {error}; it takes {', '.join(takes) or 'nothing'}") from None
    annotations = _annotations(target)
    for name, value in arguments.items():
        expected = annotations.get(name, Any)
        if not _fits(value, expected) and not (value is None and signature.parameters[name].default is None):
            remedy = remedy_for_text(value) if _fits(as_number(value), expected) else ""
            raise ConfigError(f"{where}.{name}={as_yaml(value)}: {node['_target_']} takes {_spelled(expected)}{remedy}")


def _is_partial(node: dict[str, Any], where: str) -> bool:
    """Whether the target is given some of its arguments and not called, as in Hydra."""
    value = node.get("_partial_", False)
    if not isinstance(value, bool):
        raise ConfigError(f"{where}._partial_={as_yaml(value)}: must be true or false")
    return value


def _check_kind(target: Callable[..., Any], path: str, where: str, base: type) -> None:
    made = f"{base.__module__}.{base.__name__}".replace("lightning.pytorch.core.module", "lightning.pytorch")
    rule = f"{where}._target_ names a subclass of {made}, or a Python function that returns one{second_copy()}"
    if isinstance(target, type):
        if not issubclass(target, base):
            raise ConfigError(f"{where}._target_={path} is no {base.__name__}, and is not called: {rule}")
    elif not isinstance(inspect.unwrap(getattr(target, "__func__", target)), FunctionType):
        raise ConfigError(f"{where}._target_={path} is {a_or_an(type(target).__name__)}, and is not called: {rule}")


def _annotations(target: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(target.__init__ if isinstance(target, type) else target)
    except Exception:  # only a type checker can read some annotations
        return {}


def _fits(value: Any, annotation: Any) -> bool:
    """Whether `value` may be right. It is not if it is text for a number, a fraction for a count, or a wrong null."""
    is_union = isinstance(annotation, UnionType) or get_origin(annotation) is Union
    options = get_args(annotation) if is_union else (annotation,)
    if value is None:
        return not all(isinstance(option, type) and option not in (NoneType, object, Any) for option in options)
    if isinstance(value, (dict, list)) or not all(option in (int, float, bool, str, NoneType) for option in options):
        return True
    return type(value) in options or (type(value) is int and float in options)


def _spelled(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def build(node: Any, where: str = "") -> Any:
    """Build `node`, innermost first. Mappings without a `_target_`, lists and plain values are not changed, but for
    references to keys of the environment. With `_partial_: true` the result is a functools.partial of the target."""
    if isinstance(node, str):
        return read_secrets(node, where)
    if isinstance(node, list):
        return [build(value, where) for value in node]
    if not isinstance(node, dict):
        return node
    arguments = {key: build(value, f"{where}.{key}") for key, value in node.items() if key != "_target_"}
    if "_target_" not in node:
        return arguments
    arguments.pop("_partial_", None)
    target = locate(node["_target_"], where)
    if _is_partial(node, where):
        return partial(target, **arguments)
    try:
        return target(**arguments)
    except ImportError as error:
        package = _missing_package(error)
        if package is None:
            raise
        raise ConfigError(
            f"{where}._target_={node['_target_']} needs a package that is not there: pip install {package}"
        ) from error
    except Exception as error:
        if not where.startswith(("callbacks.", "loggers.")) or describe_mistake(error, None) is not None:
            raise
        text = " ".join(str(error).split())[:1000]
        raise ConfigError(f"{where}._target_={node['_target_']}: {type(error).__name__}: {text}") from error


def _missing_package(error: ImportError) -> str | None:
    """The package that a constructor needs, if its message names one; None if an import of the user's code fails."""
    if describe_mistake(error, None) is not None:
        return None
    named = _PIP.search(str(error))
    return named[1] if named else error.name if isinstance(error, ModuleNotFoundError) else None


# Imports `pytorch_lightning` as `lightning.pytorch`, and `lightning_fabric` as `lightning.fabric`.
#
# The distribution `pytorch-lightning` has the same classes a second time. A module of one copy is no LightningModule of
# the other, and Lightning's Trainer refuses it. With this file both names give the same module objects, even if that
# distribution is not installed. Nothing is imported before somebody imports one of the names.

SAME = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def read_as_one() -> None:
    """Let both names in `SAME` give the same modules, in this process from now on."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


_reported: set[str] = set()


def newly_used() -> list[str]:
    """Lines for the user about names that were replaced, each only once."""
    used = [n for n, real in SAME.items() if (m := sys.modules.get(n)) is not None and m is sys.modules.get(real)]
    new = [name for name in used if name not in _reported]
    _reported.update(new)
    version = getattr(sys.modules.get("lightning"), "__version__", "?")
    return [f"{n} is read as {SAME[n]} (version {version}): they are the same classes" for n in new]


def second_copy() -> str:
    """The end of a message about a class that is not Lightning's, if a second copy may be the cause; else empty."""
    for name, real in SAME.items():
        module = sys.modules.get(name)
        if module is not None and module is not sys.modules.get(real):
            return (
                f"; {name} was imported as a second copy of Lightning's classes before this program could read it as "
                f"{real}: import it later (not in sitecustomize or a .pth file), or import {real}"
            )
    return ""


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, dot, rest = name.partition(".")
        if root not in SAME or (dot and sys.modules.get(root) is not sys.modules.get(SAME[root])):
            return None  # the submodules of a second copy are its own
        real = SAME[root] + dot + rest
        # find_spec("lightning") imports nothing, while find_spec("lightning.pytorch") would import `lightning`.
        if importlib.util.find_spec(real if dot else "lightning") is None:
            return None
        return ModuleSpec(name, _Loader(real))


class _Loader(Loader):
    """Gives the module of the real name, without a change to it."""

    def __init__(self, real: str) -> None:
        self.real = real
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.real)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import system has set that of the other name
