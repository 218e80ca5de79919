"""Reads files of a run's folder: whatever lies there, no reader waits for ever, fills the memory or leaves it."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

MOST_BYTES = 2**28  # of a file that is read whole: the largest are the events of a long run
MOST_IN_LINE = 2**24  # bytes of one line: a sparse file is a line of zeros without an end


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read its bytes.

    Raises:
        OSError: it cannot be opened, or is a device or a named pipe, which could be read for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a named pipe would wait for its writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_whole(path: Path, last: int | None = None) -> bytes:
    """The content of a file, or its last bytes.

    Raises:
        OSError: it cannot be opened, is no regular file, or is too large to be what it should be.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if last is not None:
            file.seek(max(0, size - last))
        elif size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {MOST_BYTES:,} are read", str(path))
        return file.read(MOST_BYTES if last is None else last)


def read_text(path: Path) -> str:
    """The text of a file; bytes that are no UTF-8 are replaced. Raises OSError, as `read_whole` does."""
    return read_whole(path).decode(errors="replace")


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a file, which may be long; those before one that is longer than a line can be. Raises OSError."""
    with open_regular(path) as file:
        while 0 < len(line := file.readline(MOST_IN_LINE)) < MOST_IN_LINE:
            yield line.decode(errors="replace")


def parse_json(text: str | bytes) -> Any:
    """What a text in JSON says. Raises ValueError, also where it is nested deeper than Python can read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Any:
    """What a JSON file says. Raises OSError, as `read_whole` does, and ValueError, as `parse_json` does."""
    return parse_json(read_whole(path))


def inside(folder: Path, name: object) -> Path:
    """The path of a file in `folder` whose name was read from a file.

    Raises:
        ValueError: the name leads out of the folder, or is none.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise ValueError(f"{name!r} is no name of a file")
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        raise ValueError(f"{name!r} leads out of its folder")
    return folder / name
