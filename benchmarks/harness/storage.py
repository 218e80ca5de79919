"""What a program has done to a folder, and what a crash at any moment leaves of it.

A program that is started with the environment of `recording` runs under storage_recorder.c, which logs every operation
that changes a folder, with its bytes. `tree` makes the folder again from some of these operations. Two models say
which ones a crash leaves: of a process that is killed, all that came before; of a machine that loses power, what an
fsync has promised, and of the rest anything. The second is that of ALICE (Pillai et al., OSDI 2014) and CrashMonkey
(Mohan et al., OSDI 2018), with one operation at a time kept or lost.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("storage_recorder.c")
NEVER, BEFORE = 2**62, -1
_ROOT = 0  # the number of the recorded folder itself
_CONTENT = ("write", "truncate", "ftruncate")  # operations on a file's bytes; the others are on names

Tree = dict[str, bytes | None]  # path → content; None: a folder
Keeps = Callable[[int, "Operation"], bool]  # whether a crash leaves the operation of this number


@dataclass
class Operation:
    """One operation on the folder, and the files and folders (by numbers of ours) that it is about."""

    kind: str
    path: str
    to: str  # of a rename or a link; "-" elsewhere
    offset: int
    length: int
    begins: int  # where its bytes begin in the file of all bytes
    node: int = -1
    folder: int = -1
    name: str = ""
    to_folder: int = -1
    to_name: str = ""
    durable: int = NEVER  # the number of the operation by which it is on the disk

    def __str__(self) -> str:
        return f"{self.kind} {self.path}" + (f" -> {self.to}" if self.to != "-" else "")


def build(folder: Path) -> Path:
    """Compile the recorder. Raises CalledProcessError, or FileNotFoundError where there is no C compiler."""
    library = folder / "storage_recorder.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl", "-lpthread"], check=True)
    return library


def recording(library: Path, root: Path, log: Path, **fault: str) -> dict[str, str]:
    """The environment in which a program and all that it starts is recorded. `fault`: FAULT_* of storage_recorder.c."""
    log.mkdir(parents=True)
    (log / "shared").write_bytes(bytes(4096))
    own = {"ROOT": root, "SHARED": log / "shared", "LOG": log / "log", "BYTES": log / "bytes"}
    return {"LD_PRELOAD": str(library)} | {f"STORAGE_{key}": str(value) for key, value in own.items()} | fault


def read(log: Path, there: Tree | None = None) -> tuple[list[Operation], bytes]:
    """The operations, in their order, and all bytes that were written. `there`: what the folder held before: it comes
    first, as operations that are on the disk."""
    written = (log / "bytes").read_bytes() if (log / "bytes").exists() else b""
    operations = []
    for path, content in sorted((there or {}).items()):
        operations.append(Operation("create" if content is not None else "mkdir", f"/{path}", "-", 0, 0, -1))
        if content:
            operations.append(Operation("write", f"/{path}", "-", 0, len(content), len(written)))
            written += content
    for one in operations:
        one.durable = BEFORE
    for line in (log / "log").read_text().splitlines():
        kind, path, to, *numbers = line.split("\t")
        operations.append(Operation(kind, path, to, *map(int, numbers)))
    return _resolved(operations), written


def _resolved(operations: list[Operation]) -> list[Operation]:
    """Find the nodes of each operation, and when it is durable."""
    folders: dict[int, dict[str, int]] = {_ROOT: {}}
    number = _ROOT

    def walk(path: str) -> tuple[int, str]:
        *parents, name = path.strip("/").split("/")
        node = _ROOT
        for parent in parents:
            node = folders[node][parent]
        return node, name

    for one in operations:
        if one.path.strip("/") == "":
            one.node = _ROOT
            continue
        one.folder, one.name = walk(one.path)
        here = folders[one.folder]
        if one.kind in ("create", "mkdir"):
            number += 1
            one.node = here[one.name] = number
            if one.kind == "mkdir":
                folders[number] = {}
        elif one.kind in ("unlink", "rmdir"):
            one.node = here.pop(one.name)
        elif one.kind in ("rename", "link"):
            one.to_folder, one.to_name = walk(one.to)
            one.node = here[one.name] if one.kind == "link" else here.pop(one.name)
            folders[one.to_folder][one.to_name] = one.node
        else:
            one.node = here[one.name]
    for number, sync in enumerate(operations):
        for one in operations[:number] if sync.kind == "fsync" else ():
            names = one.kind not in _CONTENT and sync.node in (one.folder, one.to_folder)
            if names or (one.kind in _CONTENT and one.node == sync.node):
                one.durable = min(one.durable, number)
    return operations


def tree(operations: list[Operation], written: bytes, keeps: Keeps) -> Tree:
    """The folder after the operations that `keeps(number, operation)` names."""
    folders: dict[int, dict[str, int]] = {_ROOT: {}}
    contents: dict[int, bytearray] = {}
    for one in (one for number, one in enumerate(operations) if keeps(number, one)):
        here, content = folders.setdefault(one.folder, {}), contents.setdefault(one.node, bytearray())
        if one.kind in ("mkdir", "create"):
            here[one.name] = one.node
        elif one.kind == "truncate":
            content.clear()
        elif one.kind == "ftruncate":
            del content[one.offset :]
            content.extend(bytes(one.offset - len(content)))
        elif one.kind == "write":
            content.extend(bytes(max(0, one.offset - len(content))))
            content[one.offset : one.offset + one.length] = written[one.begins : one.begins + one.length]
        elif one.kind in ("unlink", "rmdir", "rename", "link"):
            if one.kind != "link" and here.get(one.name) == one.node:
                del here[one.name]
            if one.kind in ("rename", "link"):
                folders.setdefault(one.to_folder, {})[one.to_name] = one.node
    are_folders = {one.node for one in operations if one.kind == "mkdir"}
    found: Tree = {}

    def walk(node: int, prefix: str) -> None:
        for name, child in folders.get(node, {}).items():
            found[prefix + name] = None if child in are_folders else bytes(contents.get(child, b""))
            if child in are_folders:
                walk(child, f"{prefix}{name}/")

    walk(_ROOT, "")
    return found


def killed(before: int) -> Keeps:
    """All operations but those from number `before` on."""
    return lambda number, one: number < before


def without_power(operations: list[Operation], before: int) -> Iterator[tuple[str, Keeps]]:
    """What a loss of power before operation `before` may leave: a name for it, and which operations.

    What is not durable may be lost, alone or together; a name may be there without its bytes, and bytes without a name.
    """

    def is_durable(number: int, one: Operation) -> bool:
        return number < before and one.durable < before

    def is_content(one: Operation) -> bool:
        return one.kind in _CONTENT

    yield "what is durable", is_durable
    yield "names without bytes", lambda n, one: n < before and (not is_content(one) or is_durable(n, one))
    yield "bytes without names", lambda n, one: n < before and (is_content(one) or is_durable(n, one))
    pending = [
        number
        for number in range(before)
        if operations[number].kind != "fsync" and operations[number].durable >= before
    ]
    for place in (number for number in pending if not is_content(operations[number])):
        what = str(operations[place])
        yield f"all but {what}", lambda n, one, place=place: n < before and n != place
        yield f"what is durable, and {what}", lambda n, one, place=place: is_durable(n, one) or n == place
        yield (
            f"what is durable, bytes, and {what}",
            lambda n, one, place=place: n < before and (is_content(one) or is_durable(n, one) or n == place),
        )
    for node in sorted({operations[number].node for number in pending if is_content(operations[number])}):
        lost = {number for number in pending if is_content(operations[number]) and operations[number].node == node}
        what = operations[max(lost)].path
        yield f"all but the bytes of {what}", lambda n, one, lost=lost: n < before and n not in lost


def write(found: Tree, folder: Path) -> None:
    """Make the folder anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in sorted(found):
        content = found[path]
        if content is None:
            (folder / path).mkdir(parents=True, exist_ok=True)
        else:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)  # bytes may have a name whose folder is lost
            (folder / path).write_bytes(content)


STRACE = ["strace", "-f", "-y", "-s", "0", "--seccomp-bpf", "-e", "trace=openat,creat,mkdir,mkdirat,rename,renameat,"
          "renameat2,link,linkat,unlink,unlinkat,rmdir,write,pwrite64,writev,pwritev,sendfile,copy_file_range,ftruncate,"
          "truncate,fsync,fdatasync,symlink,symlinkat"]  # fmt: skip
_KINDS = {
    "mkdirat": "mkdir", "renameat": "rename", "renameat2": "rename", "linkat": "link", "pwrite64": "write",
    "writev": "write", "pwritev": "write", "sendfile": "write", "copy_file_range": "write", "fdatasync": "fsync",
    "symlinkat": "symlink",
}  # fmt: skip


def counted(trace: Path, root: Path, there: Tree | None = None) -> Counter[str]:
    """How often each kind of operation below `root` stands in what `strace -o` has written, started as STRACE says.

    Writes to logs of ranks are left out: C++ libraries, and the processes that they start, write there past libc.
    """
    found: Counter[str] = Counter()
    files = {f"{root}/{path}" for path in there or {}}
    begun: dict[str, str] = {}
    for line in trace.read_text(errors="replace").splitlines():
        pid, _, call = line.partition(" ")
        if call.endswith("<unfinished ...>"):
            begun[pid] = call.removesuffix("<unfinished ...>")
            continue
        if resumed := re.match(r"\s*<\.\.\. \w+ resumed>", call):
            call = begun.pop(pid, "") + call[resumed.end() :]
        call = call.strip()
        if not (match := re.match(r"(\w+)\((.*)\)\s+= (\d+)", call)):
            continue  # it failed, or is no call
        name, words = match[1], match[2]
        kind = _KINDS.get(name, name)
        # Each path: a name in a folder (a descriptor's, or the working one), or a descriptor's own
        named = [
            os.path.normpath(os.path.join(folder or "/", path))
            for folder, path in re.findall(r'(?:\w+<([^>]*)>, )?"((?:[^"\\]|\\.)*)"', words)
        ] if kind not in ("write", "fsync", "ftruncate") else re.findall(r"^\d+<([^>]*)>", words)  # fmt: skip
        paths = [path for path in named if path == str(root) or path.startswith(f"{root}/")]
        if not paths or (kind == "write" and (match[3] == "0" or paths[0].startswith(f"{root}/logs/"))):
            continue
        if kind in ("openat", "creat"):
            if "O_CREAT" in words and paths[0] not in files:
                kind = "create"
            elif "O_TRUNC" in words and paths[0] in files:
                kind = "truncate"
            else:
                continue
        if kind == "unlinkat":
            kind = "rmdir" if "AT_REMOVEDIR" in words else "unlink"
        if kind == "rename":
            old, new = paths
            moved = {path for path in files if path == old or path.startswith(f"{old}/")}
            files = (files - moved) | {new + path.removeprefix(old) for path in moved}
        elif kind in ("create", "mkdir", "link", "symlink"):
            files.add(paths[-1])
        elif kind in ("unlink", "rmdir"):
            files.discard(paths[0])
        found[kind] += 1
    return found


def of_disk(folder: Path) -> Tree:
    """The folder as it is."""
    return {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


def digest(found: Tree) -> str:
    """Equal for equal trees."""
    whole = hashlib.sha256()
    for path, content in sorted(found.items()):
        whole.update(path.encode() + b"\0" + (b"folder" if content is None else hashlib.sha256(content).digest()))
    return whole.hexdigest()
