"""Nodes with a `_target_` → objects. A few lines instead of Hydra's instantiate, since ranks never run Hydra."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from shardwise.errors import ConfigError


def locate(path: str, where: str) -> Callable[..., Any]:
    """The class or function named by a dotted path; the current directory is importable.

    Raises:
        ConfigError: no such module or attribute. An error inside the module keeps its own traceback.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise ConfigError(f"{where}._target_={path}: not a dotted path; write package.module.Class")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(
                f"{where}._target_={path}: there is no module {error.name}; it is looked for in {Path.cwd()} and "
                f"the installed packages"
            ) from None
        raise ConfigError(f"{where}._target_={path}: importing it needs the package {error.name}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"{where}._target_={path}: {module_name} has no class or function {attribute}")
    return cast(Callable[..., Any], found)


def check(node: Any, where: str) -> None:
    """Locate every target below `node` and bind its arguments, building nothing.

    Raises:
        ConfigError: an argument that the target does not take, or one that it needs and does not get.
    """
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        check(value, f"{where}.{key}")
    if not (isinstance(node, dict) and "_target_" in node):
        return
    target = locate(node["_target_"], where)
    try:
        signature = inspect.signature(target)
    except ValueError:  # a builtin without a signature
        return
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        takes = [name for name in signature.parameters if name != "self"]
        raise ConfigError(f"{where}: {node['_target_']}: {error}; it takes {', '.join(takes) or 'nothing'}") from None


def build(node: Any, where: str = "") -> Any:
    """Build `node`, innermost first. Mappings without a `_target_`, lists and plain values stay what they are."""
    if isinstance(node, list):
        return [build(value, where) for value in node]
    if not isinstance(node, dict):
        return node
    arguments = {key: build(value, f"{where}.{key}") for key, value in node.items() if key != "_target_"}
    return locate(node["_target_"], where)(**arguments) if "_target_" in node else arguments
