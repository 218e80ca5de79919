"""docs/floors.svg: the rooms of src/ on their floors, and who imports whom, read from the imports."""

from __future__ import annotations

from html import escape

from tests.harness.rooms import DOOR, FLOORS, MODULES, TOOLS, own_imports, room_of

_WIDTH, _ROW, _BOX = 980, 62, 30  # points
_LETTER = 8.2  # points that a letter of a room's name takes


def picture() -> str:
    """An SVG: the highest floor on top, a line for every room that another one imports."""
    places = _places()
    height = len(FLOORS) * _ROW + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        f'font-size="14">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for above, below in sorted(_imports()):
        (x1, y1, w1), (x2, y2, w2) = places[above], places[below]
        start, end, middle = x1 + w1 / 2, x2 + w2 / 2, (y1 + _BOX + y2) / 2
        lines.append(
            f'<path d="M{start:.0f} {y1 + _BOX} C{start:.0f} {middle:.0f} {end:.0f} {middle:.0f} {end:.0f} {y2}" '
            f'fill="none" stroke="#4878a8" stroke-opacity="0.4"/>'
        )
    for number, _ in enumerate(FLOORS):
        y = 10 + (len(FLOORS) - 1 - number) * _ROW
        lines.append(f'<text x="8" y="{y + 20}" fill="#888">{number}</text>')
    for room, (x, y, width) in sorted(places.items()):
        lines.append(
            f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{_BOX}" rx="5" fill="#eef3f8" stroke="#4878a8"/>'
            f'<text x="{x + width / 2:.0f}" y="{y + 20}" text-anchor="middle">{escape(_name(room))}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def _name(room: str) -> str:
    return f"{room}.py" if f"shardwise.{room}" in MODULES and _is_file(room) else f"{room}/"


def _is_file(room: str) -> bool:
    return MODULES[f"shardwise.{room}"].name != "__init__.py"


def _places() -> dict[str, tuple[float, int, float]]:
    """Room → left edge, upper edge and width of its box."""
    places: dict[str, tuple[float, int, float]] = {}
    for number, rooms in enumerate(FLOORS):
        ordered = sorted(rooms)
        widths = [len(_name(room)) * _LETTER + 20 for room in ordered]
        gap = (_WIDTH - sum(widths)) / (len(widths) + 1)
        left = gap + (60 if number % 2 and len(ordered) == 1 else 0)  # so that lines do not run behind single boxes
        for room, width in zip(ordered, widths, strict=True):
            places[room] = left, 10 + (len(FLOORS) - 1 - number) * _ROW, width
            left += width + gap
    return places


def _imports() -> set[tuple[str, str]]:
    """Which room imports which; without the lowest floor, which everybody uses, and the door up to the tools."""
    modules = [module for module in MODULES if module != "shardwise"]
    pairs = ((room_of(module), room_of(other)) for module in modules for other in own_imports(module))
    drawn = {(above, below) for above, below in pairs if above != below and below not in FLOORS[0]}
    return drawn - {(room_of(DOOR), TOOLS)}
