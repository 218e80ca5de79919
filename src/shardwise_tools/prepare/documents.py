"""Cuts the inputs into parts, pieces of work that depend on the inputs alone, and takes the documents out of a part.

A part holds whole lines, a whole text file, or a row group of a Parquet file. One process reads, others tokenize. While
a file is read, its SHA-256 is made.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shardwise.errors import ConfigError, a_or_an, did_you_mean
from shardwise_tools.prepare.inputs import InputFile

_CHUNK = 1 << 20
_EMPTY_LINE = re.compile(rb"\n\r?\n")  # lines end with \n or \r\n
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # it says that a file is UTF-8, and is no part of its text


@dataclass(frozen=True)
class Flaw:
    """What is wrong with an input. `line`: of a Parquet file the row; 0: the file as a whole."""

    path: str
    line: int
    rule: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}" if self.line else f"{self.path}: {self.rule}"


@dataclass(frozen=True)
class Position:
    """Where the next part begins: of the file with this number, after so many of its parts.

    `sha256`: of the file's bytes that were read for these parts; empty: it is not known.
    """

    file: int = 0
    part: int = 0
    sha256: str = ""


class InputChanged(Exception):
    """A file does not begin with the bytes that were read of it before. Its text is the path."""


@dataclass(frozen=True)
class Part:
    """One piece of work, or a message about a file that has been read whole."""

    path: str
    kind: str  # as InputFile's, or nothing if there is nothing to tokenize
    after: Position  # where to go on when this part is done
    content: bytes | int | tuple[bytes, ...] = b""  # lines; texts; of "rows" the number of the row group
    first: int = 1  # the number of its first line or row
    read: int = 0  # bytes of the input file that were read for it
    flaws: tuple[Flaw, ...] = ()
    record: dict[str, Any] | None = None  # path, size and sha256 of a file that is done


def read_parts(
    files: list[InputFile], size: int, begin: Position = Position(), cut: int | None = None
) -> Iterator[Part]:
    """The parts of `files` from `begin` on.

    `size`: bytes of text after which a part ends. `cut`: bytes after which a document of a text file ends;
    None: the file is one document.

    Raises:
        InputChanged: the file in which `begin` lies has other bytes before it than those that were read.
    """
    for number in range(begin.file, len(files)):
        file = files[number]
        skip = begin.part if number == begin.file else 0
        reader = _Reader(file, number, size, cut)
        known = begin.sha256 if skip else ""
        for part in reader.parts():
            if known and (part.after.part == skip or part.record is not None):
                if part.after.sha256 != known:
                    raise InputChanged(file.path)
                known = ""
            if part.after.part > skip or part.record is not None:
                yield part


@dataclass
class _Reader:
    """Reads one file."""

    file: InputFile
    number: int
    size: int  # bytes of text after which a part ends
    cut: int | None  # bytes after which a document of a text ends
    made: int = 0  # parts
    position: int = 0  # bytes that were read
    told: int = 0  # bytes that parts have accounted for
    sha256: Any = field(default_factory=hashlib.sha256)

    def parts(self) -> Iterator[Part]:
        flaws: tuple[Flaw, ...] = ()
        try:
            match self.file.kind:
                case "lines":
                    yield from self._lines()
                case "text" if self.cut is not None:
                    yield from self._pieces(self.cut)
                case "text":
                    yield self._part((b"".join(self._unpacked()).removeprefix(BYTE_ORDER_MARK),), 1)
                case _:
                    yield from self._row_groups()
        except _Damaged as error:
            flaws = (Flaw(self.file.path, error.line, str(error)),)
        if self.position != self.file.size and not flaws:
            rule = f"had {self.file.size:,} bytes at the start and now has {self.position:,}: it is being changed"
            flaws = (Flaw(self.file.path, 0, rule),)
        record = {"path": self.file.path, "size": self.position, "sha256": self.sha256.hexdigest()}
        rest = self.file.size - self.told
        yield Part(self.file.path, "", Position(self.number + 1), read=rest, flaws=flaws, record=record)

    def _part(self, content: bytes | int | tuple[bytes, ...], first: int, read: int | None = None) -> Part:
        self.made += 1
        read = self.position - self.told if read is None else read
        self.told += read
        after = Position(self.number, self.made, self.sha256.hexdigest())
        return Part(self.file.path, self.file.kind, after, content, first, read)

    def _lines(self) -> Iterator[Part]:
        held: list[bytes] = []
        length, first, is_start = 0, 1, True
        try:
            for piece in self._unpacked():
                piece = piece.removeprefix(BYTE_ORDER_MARK) if is_start else piece
                is_start = False
                held.append(piece)
                length += len(piece)
                if length >= self.size and (end := piece.rfind(b"\n") + 1):
                    content = b"".join([*held[:-1], piece[:end]])
                    yield self._part(content, first)
                    first += content.count(b"\n")
                    held, length = [piece[end:]], len(piece) - end
        except _Damaged as error:  # the whole lines before it are documents like others
            content = b"".join(held)
            content = content[: content.rfind(b"\n") + 1]
            if content:
                yield self._part(content, first)
            raise _Damaged(str(error), first + content.count(b"\n")) from error
        if content := b"".join(held):
            yield self._part(content, first)

    def _pieces(self, cut: int) -> Iterator[Part]:
        """A text as documents that end at the first empty line after `cut` bytes, or at a line after twice as many."""
        pieces: list[bytes] = []
        held, first = b"", 1
        for read in self._unpacked():
            held = held + read if self.made or held or pieces else read.removeprefix(BYTE_ORDER_MARK)
            while end := _end_of_piece(held, cut):
                pieces.append(held[:end])
                held = held[end:]
                if sum(map(len, pieces)) >= self.size:
                    yield self._part(tuple(pieces), first)
                    first += sum(piece.count(b"\n") for piece in pieces)
                    pieces = []
        pieces += [held] if held.strip() else []
        if pieces or not self.made:
            yield self._part(tuple(pieces) or (held,), first)

    def _row_groups(self) -> Iterator[Part]:
        groups, first = _row_groups_of(self.file.path), 1
        raw = self._raw()
        for number, (rows, end) in enumerate(groups):
            while self.position < end and next(raw, b""):
                pass  # the SHA-256 has the bytes of the row group then
            yield self._part(number, first, self.file.size // len(groups))
            first += rows
        for _ in raw:
            pass

    def _raw(self) -> Iterator[bytes]:
        try:
            with open(self.file.path, "rb") as file:
                while piece := file.read(min(_CHUNK, self.size)):
                    self.sha256.update(piece)
                    self.position += len(piece)
                    yield piece
        except OSError as error:
            raise _Damaged(f"cannot be read ({error.strerror})") from error

    def _unpacked(self) -> Iterator[bytes]:
        """The content, unpacked, in pieces."""
        if not self.file.packed:
            yield from self._raw()
            return
        name, make, failure = _unpacker(self.file.packed)
        unpacker = make()
        begun = False
        for piece in self._raw():
            while piece:
                if unpacker.eof:  # several packed files may stand one after the other
                    if self.file.packed == ".gz" and not (piece := piece.lstrip(b"\0")):
                        break
                    unpacker = make()
                begun = True
                try:
                    if found := unpacker.decompress(piece):
                        yield found
                except failure as error:
                    raise _Damaged(f"is damaged, or no {name} file ({error}); copy it again") from error
                piece = unpacker.unused_data if unpacker.eof else b""
        if not begun:
            raise _Damaged(f"has no byte of {name} data; copy it again")
        if not unpacker.eof:
            raise _Damaged(f"ends in the middle of its {name} data; copy it again")


def _end_of_piece(text: bytes, cut: int) -> int:
    """Where the document at the beginning of `text` ends; 0: that is not read yet."""
    if found := _EMPTY_LINE.search(text, cut, 2 * cut):
        return found.end()
    return text.find(b"\n", 2 * cut) + 1 if len(text) >= 2 * cut else 0


class _Damaged(Exception):
    """The file cannot be read, or not to its end. `line`: the first line that is not whole."""

    def __init__(self, rule: str, line: int = 0) -> None:
        super().__init__(rule)
        self.line = line


def _unpacker(packed: str) -> tuple[str, Any, Any]:
    if packed == ".gz":
        return "gzip", lambda: zlib.decompressobj(31), zlib.error
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            "an input ends with .zst, which needs the package zstandard: pip install zstandard"
        ) from error
    return "zstd", zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError


def import_parquet() -> Any:
    """pyarrow.parquet, or a `ConfigError` that says how to install it."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            "an input ends with .parquet, which needs the package pyarrow: pip install pyarrow"
        ) from error
    return pyarrow.parquet


def _row_groups_of(path: str) -> list[tuple[int, int]]:
    """(rows, position in the file at which it ends) of each row group."""
    parquet = import_parquet()
    try:
        with parquet.ParquetFile(path) as file:
            groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
            return [(group.num_rows, max(map(_end_of_column, _columns(group)), default=0)) for group in groups]
    except Exception as error:  # pyarrow has several kinds, some of them plain OSError and ValueError
        raise _Damaged(f"is damaged, or no Parquet file ({_first_line(error)}); copy it again") from error


def _columns(group: Any) -> list[Any]:
    return [group.column(number) for number in range(group.num_columns)]


def _end_of_column(column: Any) -> int:
    begin = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
    return int(begin) + int(column.total_compressed_size)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


_MOST_NAMES = 10  # of fields in a message
_OF_A_LIST = "if the file is one list, `jq -c '.[]'` makes lines of it"
_JSON_NAMES = {dict: "object", list: "list", str: "text", bool: "truth value", int: "number", float: "number"}


def documents(part: Part, field: str) -> Iterator[tuple[str, bytes, int] | Flaw]:
    """(text, its UTF-8, line) of each document, in their order, and a flaw in the place of what is none.

    `field`: the name of one, or several with commas between, whose texts an empty line separates.
    """
    read = {"lines": _of_lines, "text": _of_text, "rows": _of_rows}[part.kind]
    for line, found in read(part, field):
        if isinstance(found, _Wrong):
            yield Flaw(part.path, line, str(found))
            continue
        text, raw = found
        if text.isspace() or not text:
            yield Flaw(part.path, line, "the document is empty: remove it")
        else:
            yield text, raw, line


class _Wrong(str):
    """A rule that is broken, and the remedy."""


_Found = Iterator[tuple[int, tuple[str, bytes] | _Wrong]]


def _of_text(part: Part, field: str) -> _Found:
    assert isinstance(part.content, tuple)
    line, is_whole = part.first, part.after.part == 1 and len(part.content) == 1
    for raw in part.content:
        try:
            yield 0 if is_whole else line, (raw.decode(), raw)
        except UnicodeDecodeError as error:
            yield line + raw.count(b"\n", 0, error.start), _not_utf8(error)
        line += raw.count(b"\n")


def _of_lines(part: Part, field: str) -> _Found:
    assert isinstance(part.content, bytes)
    for line, raw in enumerate(part.content.split(b"\n"), part.first):
        if raw and not raw.isspace():  # an empty line holds nothing, not even an empty document
            yield line, _of_line(raw, field)


def _of_line(raw: bytes, field: str) -> tuple[str, bytes] | _Wrong:
    try:
        row = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        return _not_utf8(error)
    except ValueError as error:
        if raw.lstrip().startswith(b"["):
            return _Wrong(f"begins a list of several lines, and each line must hold a whole object: {_OF_A_LIST}")
        if raw.strip() == b"{":
            return _Wrong(
                "begins a JSON value of several lines, and each line must hold a whole object: convert the file to "
                "JSON lines, with `jq -c '.'` for example"
            )
        told = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
        return _Wrong(f"is not one JSON object ({told}): correct the line; each line must hold a whole object")
    except RecursionError:
        return _Wrong("is not one JSON object that can be read: its brackets are nested too deep")
    if not isinstance(row, dict):
        remedy = _OF_A_LIST if isinstance(row, list) else "JSON lines have one on each line"
        return _Wrong(f"is {_json_name(row)}, and must be an object with the field {field}: {remedy}")
    return _joined(row, field)


def _of_rows(part: Part, field: str) -> _Found:
    parquet = import_parquet()
    try:
        with parquet.ParquetFile(part.path) as file:
            names = file.schema_arrow.names
            wanted = field.split(",")
            if lacking := [name for name in wanted if name not in names]:
                yield 0, _missing(lacking[0], names)
                return
            assert isinstance(part.content, int)
            rows = file.read_row_group(part.content, columns=wanted).to_pylist()
    except UnicodeDecodeError as error:
        yield part.first, _not_utf8(error)
        return
    except Exception as error:  # pyarrow has several kinds, some of them plain OSError and ValueError
        said = (str(error).splitlines() or [type(error).__name__])[0]
        yield part.first, _Wrong(f"the row group that begins here is damaged ({said}); copy the file again")
        return
    for number, row in enumerate(rows, part.first):
        yield number, _joined(row, field)


def _joined(row: dict[str, Any], field: str) -> tuple[str, bytes] | _Wrong:
    """The texts of the fields as one document."""
    texts = []
    for name in field.split(","):
        found = _checked(row[name], name) if name in row else _missing(name, list(row))
        if isinstance(found, _Wrong):
            return found
        texts.append(found[0])
    text = "\n\n".join(texts)
    return text, text.encode()


def _checked(value: Any, field: str) -> tuple[str, bytes] | _Wrong:
    if not isinstance(value, str):
        return _Wrong(f"the field {field} is {_json_name(value)}, and must be text; name another by field=…")
    try:
        return value, value.encode()
    except UnicodeEncodeError as error:
        return _Wrong(
            f"the text holds half a surrogate pair at character {error.start}, which is no Unicode: correct it"
        )


def _missing(field: str, names: list[str]) -> _Wrong:
    shown = [name if len(name) <= 40 else f"{name[:40]}…" for name in names[:_MOST_NAMES]]
    shown += [f"… ({len(names):,} in all)"] if len(names) > _MOST_NAMES else []
    near = did_you_mean(field, names[:1000])
    told = f"has no field {field}{near}; it has {', '.join(shown) or 'none'}: name one by field=…"
    return _Wrong(told.encode(errors="backslashreplace").decode())  # a name may be no Unicode


def _not_utf8(error: UnicodeDecodeError) -> _Wrong:
    return _Wrong(
        f"is not UTF-8 (byte {error.object[error.start]:#04x} at position {error.start} of its line or file): convert "
        f"it, with iconv for example"
    )


def _json_name(value: Any) -> str:
    return "null" if value is None else a_or_an(_JSON_NAMES.get(type(value), type(value).__name__))
