"""Shows a run that is followed: a view that is drawn anew in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shardwise.errors import ConfigError
from shardwise.viewer.watch import Line, Watch

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_STYLES = {"good": "green", "bad": "bold red", "warn": "yellow", "": ""}


def make_console() -> Console:
    """What is written to. Raises `ConfigError` where rich is not installed."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        raise ConfigError("shardwise watch needs a package: pip install rich") from None
    return Console(highlight=False)


def show_once(watch: Watch, console: Console) -> None:
    """Show the run as it is now."""
    if console.is_terminal:
        console.print(panel(watch, console.width))
    else:
        print(_plain(watch.lines()), flush=True)


def show_until_it_ends(watch: Watch, console: Console, seconds: float) -> None:
    """Show the run every so many seconds, until it is over."""
    if not console.is_terminal:
        _print_until_it_ends(watch, seconds)
        return
    from rich.live import Live

    # The terminal's other screen is not used, so that what was shown last stays when the view ends
    with Live(panel(watch, console.width), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while not watch.state.is_over:
            time.sleep(seconds)
            watch.poll()
            live.update(panel(watch, console.width), refresh=True)


def panel(watch: Watch, width: int) -> RenderableType:
    """The view as a frame with a line for each number, `width` letters wide.

    What is too long for the terminal goes on in the next line. In a narrow one labels are cut, so that half is left.
    """
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="cyan", no_wrap=True, max_width=max(4, width // 2 - 4))
    table.add_column(overflow="fold", ratio=1)
    for line in watch.lines():
        table.add_row(Text(line.label), Text(line.text, style=_STYLES[line.style]))
    return Panel(table, title=Text(watch.run.name), title_align="left", border_style="dim")


def _plain(lines: list[Line]) -> str:
    width = max(len(line.label) for line in lines)
    return "\n".join(f"{line.label:<{width}}  {line.text}" for line in lines)


def _print_until_it_ends(watch: Watch, seconds: float) -> None:
    """Without a terminal: everything once, then a line for each change."""
    print(_plain(watch.lines()), flush=True)
    shown = _key(watch)
    while not watch.state.is_over:
        time.sleep(seconds)
        watch.poll()
        if (key := _key(watch)) != shown:
            shown = key
            print("  ".join(f"{line.label} {line.text}" for line in watch.lines()[:4]), flush=True)


def _key(watch: Watch) -> tuple[str, int | None]:
    return watch.state.name, watch.run.table.step
