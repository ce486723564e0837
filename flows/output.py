"""Output of the commands: a JSON result goes to stdout, everything else goes to stderr.

Everything that a command prints leaves through this module, which prints text as text: names and messages come from
jobs, files and servers. There is no markup; a style is given beside a text, by `style=` or by `styled`.
"""

import io
import json
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from ringmaster.text import MOST_CHARACTERS, printable, printable_lines

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
AllRows = Annotated[
    bool,
    typer.Option("--all-rows", help="Score all rows of --data, which no model is trained on, not a held-out part."),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="List the techniques that were left out, for which jobs, and why.")
]


_activity_views: list[Callable[[str], None]] = []  # what shows announcements, the innermost last
# The width where output goes to a file, which cannot be resized: names and metrics stay on one line.
FILE_WIDTH = 140


class TextConsole(Console):
    """A console that prints each string as one line of text, whatever characters it has.

    Neither markup nor names of emoji have a meaning. Control characters are shown as escapes in whatever else is
    printed, such as a rich `Text`; lines stay lines there.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Returns the text on one line with its style and layout; rich calls it for every string that it prints."""
        kept = {key: options[key] for key in ("style", "justify", "overflow") if key in options}
        return Text(printable(text), **kept)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields the pieces of anything printed; the codes of the terminal are in styles and in control pieces."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                text = "\n".join(printable(part, limit=sys.maxsize) for part in segment.text.split("\n"))
                yield Segment(text, segment.style)


def error_console() -> TextConsole:
    """Returns the console on stderr for text that people read. Its width is the terminal's, or FILE_WIDTH in a file."""
    return TextConsole(stderr=True, width=None if sys.stderr.isatty() else FILE_WIDTH)


def output_console() -> TextConsole:
    """Returns the console on stdout for results that people read, with the width of `error_console`."""
    return TextConsole(width=None if sys.stdout.isatty() else FILE_WIDTH)


def styled(text: str, style: str = "", **layout: Any) -> Text:
    """Returns one line of text in a style, for parts of rich that would read markup in a string.

    layout: further arguments of rich's `Text`.
    """
    return Text(printable(text), style=style, **layout)


def fitting_columns(
    rows: Sequence[Mapping[str, str]], *, width: int, least: Mapping[str, int], left_out_first: Sequence[str]
) -> list[str]:
    """Returns the columns of a table that fit a terminal, two blanks apart.

    rows: the cells by column; at least one row.
    width: of the terminal, in cells.
    least: the columns that may be cut, with the width that they need.
    left_out_first: the columns that may be left out, in this order.
    """
    shown = [*rows[0]]
    texts = {name: [name, *(row[name] for row in rows)] for name in shown}
    widths = {name: max(map(cell_len, column)) for name, column in texts.items()} | dict(least)
    for name in left_out_first:
        if sum(widths[each] + 2 for each in shown) - 2 <= width:
            break
        if name in shown:
            shown.remove(name)
    return shown


def print_rows(console: Console, rows: Sequence[Mapping[str, Any]], *, title: str | None = None) -> None:
    """Prints rows with the same keys as a table."""
    table = Table(*(rows[0] if rows else ()), title=title, title_justify="left", header_style="bold")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def message(text: str) -> Text:
    """Returns an error message of one or more lines; those after the first are indented, so as to pass for no other."""
    return Text("\n    ".join(printable_lines(text, limit=MOST_CHARACTERS).split("\n")))


def announce(text: str) -> None:
    """Says what is about to happen, before an operation that takes seconds without any output. From any thread.

    It is shown by what shows the present activity, if there is such a thing, and else printed.
    """
    if views := _activity_views[-1:]:  # a copy, as another thread may remove the last one
        views[0](text)
    else:
        error_console().print(text, style="dim", soft_wrap=True)


@contextmanager
def announced_by(show: Callable[[str], None]) -> Iterator[None]:
    """Lets `show` show what is announced while the context is open: lines beside it would destroy a live display."""
    _activity_views.append(show)
    try:
        yield
    finally:
        _activity_views.remove(show)


@contextmanager
def working(text: str, *, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Shows what the enclosed work does: on a terminal with a spinner and its seconds, else as one line.

    clock: monotonic seconds.
    """
    console = error_console()
    if not console.is_terminal:
        announce(text)
        yield
        return
    activity, spinner = [(text, clock())], Spinner("dots")

    def picture() -> Spinner:
        text, began_s = activity[-1]
        spinner.update(text=styled(f"{text}, {clock() - began_s:.0f} s"))
        return spinner

    live = Live(get_renderable=picture, console=console, refresh_per_second=4, transient=True)
    with announced_by(lambda text: activity.append((text, clock()))), live:
        yield


def write_document(text: str) -> None:
    """Writes a text of many lines, such as a log or a page, to stdout."""
    sys.stdout.write(printable_lines(text, limit=sys.maxsize))


def prepare_streams() -> None:
    """Makes this process write every character, and tracebacks without codes of a terminal.

    A terminal or a file may have an encoding that lacks a character, as in an old locale.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as Python sets up stderr
    sys.excepthook = write_uncaught
    threading.excepthook = lambda args: write_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def write_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """Writes the traceback of an error that ends the process or a thread to stderr."""
    if kind is SystemExit:  # of a thread, which may end itself so
        return
    sys.stderr.write(printable_lines("".join(traceback.format_exception(kind, error, trace))))


def print_json(value: Any) -> None:
    """Writes one JSON object, as one line, to stdout."""
    # `json.dump` would encode in Python, ten times slower.
    sys.stdout.write(json.dumps(_finite(value), allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """Replaces infinite floats and NaN by None, as JSON has neither: a metric of no rows is NaN."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
