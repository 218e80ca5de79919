"""Puts HTML together: one page with its style sheet, which asks nothing of a network and runs no program."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; --back: #fff; --front: #1c2330; --soft: #5c6675; --line: #dfe3ea; --box: #f6f7f9;
  --bad: #b3261e; --good: #1a7f37; --warn: #9a6700; --k0: #2563c9; --k1: #d9650b; --k2: #2b8a3e; --k3: #c2255c;
  --k4: #7048c8; --k5: #0b7d8a; --k6: #8a5a00; --k7: #5f6b7a; }
@media (prefers-color-scheme: dark) { :root { --back: #12161c; --front: #e3e7ee; --soft: #98a3b3; --line: #2c3440;
  --box: #1a2029; --bad: #ff8a80; --good: #5fcf80; --warn: #e3b341; --k0: #6ea8fe; --k1: #ffa657; --k2: #6fdd8b;
  --k3: #ff8fb3; --k4: #b79cff; --k5: #56d4dd; --k6: #e0b95c; --k7: #a0aab8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1280px; padding: 16px 20px 60px; background: var(--back); color: var(--front);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5em; margin: .2em 0; }
h2 { font-size: 1.2em; margin: 1.8em 0 .5em; border-bottom: 1px solid var(--line); }
h3 { font-size: 1em; margin: 0; font-weight: 600; } p { margin: .4em 0; }
.soft, .note { color: var(--soft); }
.bad { color: var(--bad); } .good { color: var(--good); } .warn { color: var(--warn); }
.state { font-size: 1.1em; font-weight: 600; }
ul.verdicts { padding: 0; list-style: none; }
ul.verdicts li { background: var(--box); border-left: 4px solid var(--warn); padding: 8px 12px; margin: 8px 0; }
ul.verdicts li.bad { border-color: var(--bad); color: inherit; }
ul.verdicts li.good { border-color: var(--good); color: inherit; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 430px), 1fr)); gap: 18px; }
figure { margin: 0; min-width: 0; } figcaption { min-height: 2.6em; }
.keys { margin: 0; font-size: .87em; } .keys > * { margin-right: 1em; }
.key::before { content: ""; display: inline-block; width: 14px; height: 3px; margin-right: 5px; vertical-align: middle;
  background: var(--c, transparent); }
.key b { font-weight: 600; }
svg { display: block; width: 100%; height: auto; background: var(--box); border-radius: 4px; }
svg text { fill: var(--soft); font-size: 17px; font-family: inherit; }
.grid { stroke: var(--line); fill: none; }
.line { stroke: var(--c); stroke-width: 20; fill: none; stroke-linejoin: round; }
.noise { stroke-opacity: .35; stroke-width: 10; }
.band { fill: var(--c); fill-opacity: .18; } circle { fill: var(--c); }
.save { stroke: var(--good); stroke-width: 2; }
.restart { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 5 4; }
.verdict { fill: var(--warn); } .broken { stroke: var(--bad); stroke-width: 2; }
image, img.scale { image-rendering: pixelated; } img.scale { width: 90px; height: 10px; vertical-align: middle; }
img.picture { max-width: 100%; background: #fff; }
.c0 { --c: var(--k0) } .c1 { --c: var(--k1) } .c2 { --c: var(--k2) } .c3 { --c: var(--k3) } .c4 { --c: var(--k4) }
.c5 { --c: var(--k5) } .c6 { --c: var(--k6) } .c7 { --c: var(--k7) }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: .93em; }
th, td { text-align: left; vertical-align: top; padding: 3px 16px 3px 0; border-bottom: 1px solid var(--line);
  min-width: 4em; }
th, td { overflow-wrap: normal; } td:last-child { overflow-wrap: anywhere; }
th { font-weight: 600; } td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
pre { background: var(--box); padding: 10px 12px; overflow-x: auto; font-size: .85em; border-radius: 4px;
  white-space: pre-wrap; margin: .5em 0; }
details { margin: .5em 0; } summary { cursor: pointer; }
@media (max-width: 640px) { body { padding: 10px 12px 40px; font-size: 14px; } svg text { font-size: 21px; }
  figcaption { min-height: 0; } }
@media print { body { max-width: none; } }
"""
_POLICY = "default-src 'none'; style-src 'sha256-{}'; img-src data:; base-uri 'none'; form-action 'none'"


def make_page(title: str, body: str) -> str:
    """The whole page. `body` is HTML. The policy in its head has a browser refuse every request and every script."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY.format(digest)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n<body>\n{body}</body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A part of the page under its heading; empty if there is nothing in it."""
    body = "".join(parts)
    return f"<h2>{escape(title)}</h2>\n{body}\n" if body else ""


def table(rows: Iterable[Sequence[Any]], head: Sequence[str] = ()) -> str:
    """A table of texts; empty if it has no rows. Numbers do not break over lines."""
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in rows)
    if not body:
        return ""
    top = f"<tr>{''.join(f'<th>{escape(word)}</th>' for word in head)}</tr>\n" if head else ""
    return f'<div class="table"><table>{top}{body}</table></div>\n'


def _cell(value: Any) -> str:
    kind = ' class="number"' if isinstance(value, (int, float)) else ""
    return f"<td{kind}>{escape(as_text(value))}</td>"


def as_text(value: Any) -> str:
    """A value for a reader."""
    if value is None:
        return "none"
    if isinstance(value, float):
        is_short = abs(value) < 1e15 and (value.is_integer() or abs(value) >= 1000)
        return f"{value:,.0f}" if is_short else f"{value:.6g}"
    if isinstance(value, bool) or not isinstance(value, int):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{value:,}"


def fold(title: str, text: str) -> str:
    """A text that is shown when its title is clicked; empty if there is none."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>\n" if text.strip() else ""


def paragraph(text: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f"<p{attribute}>{escape(text)}</p>\n" if text else ""


def flatten(value: Any, key: str = "") -> dict[str, Any]:
    """The values of a nested mapping under dotted names; lists stay whole."""
    if not isinstance(value, Mapping) or not value:
        return {key: value}
    found: dict[str, Any] = {}
    for name, item in value.items():
        found |= flatten(item, f"{key}.{name}" if key else str(name))
    return found
