"""Takes the documents out of a part, and says what is wrong with those that are none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from shardwise.data.prepare.parts import Flaw, Part, import_parquet
from shardwise.errors import a_or_an, did_you_mean

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
