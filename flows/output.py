"""Output of the commands and logs of the long-lived processes: a result goes to stdout, everything else to stderr.

Everything that a command prints leaves through this module, which prints text as text: names and messages come from
jobs, files and servers. There is no markup; a style is given in addition to a text, by `style=` or by `styled`.

Logs are text or, with RINGMASTER_LOG_FORMAT=json, one JSON object a line. In the text format, only the loggers of
`ringmaster` write to stderr as configured here; other libraries configure their own. In the JSON format, one handler
writes the records of all loggers.
"""

import io
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
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

from ringmaster.codec import finite
from ringmaster.errors import InputError, RingmasterError, input_errors
from ringmaster.extras import missing_extra
from ringmaster.text import MAX_CHARACTERS, first_of, join_limited, printable, printable_lines

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
AllRows = Annotated[
    bool,
    typer.Option("--all-rows", help="Score all rows of --data, which no model is trained on, not a held-out part."),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="List the techniques that were left out, for which jobs, and why.")
]


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
    """Returns the console on stderr for text that users read. Its width is the terminal's, or FILE_WIDTH in a file."""
    return TextConsole(stderr=True, width=None if sys.stderr.isatty() else FILE_WIDTH)


def output_console() -> TextConsole:
    """Returns the console on stdout for results that users read, with the width of `error_console`."""
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


def print_lines(console: Console, lines: Iterable[str | Text], *, style: str | None = None) -> None:
    """Prints each text as a line, which a terminal may wrap and a file keeps whole."""
    for line in lines:
        console.print(line, style=style, soft_wrap=True)


def print_result(value: Any, lines: Iterable[str | Text], *, as_json: bool) -> None:
    """Prints the result of a command on stdout: one JSON object, or lines for a person."""
    if as_json:
        print_json(value)
    else:
        print_lines(output_console(), lines)


def print_outcome(value: Any, lines: Iterable[str | Text] = (), *, as_json: bool) -> None:
    """Prints what a command has done: as lines on stderr and, where it is wanted, as one JSON object on stdout."""
    print_lines(error_console(), lines)
    if as_json:
        print_json(value)


def plain_table(*columns: str, rows: Iterable[Sequence[RenderableType]]) -> Table:
    """Returns a table without lines between its cells."""
    table = Table(*columns, box=None, header_style="bold", padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    return table


def print_rows(console: Console, rows: Sequence[Mapping[str, Any]], *, title: str | None = None) -> None:
    """Prints rows as a table, with a column for each key of any row, such as `optimizer.lr` under `lr`."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        # A name that is cut can neither be copied nor found.
        table.add_column(_heading(column, columns), overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    console.print(table)


def _heading(column: str, columns: Sequence[str]) -> str:
    """Returns the last names of a dotted key, as many as no other column ends with."""
    names = column.split(".")
    ends = (".".join(names[first:]) for first in range(len(names) - 1, 0, -1))
    others = [other for other in columns if other != column]
    return next((end for end in ends if not any(f".{other}".endswith(f".{end}") for other in others)), column)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def message(text: str) -> Text:
    """Returns an error message of one or more lines; those after the first are indented, so as to pass for no other."""
    return Text("\n    ".join(printable_lines(text, limit=MAX_CHARACTERS).split("\n")))


def announce(text: str) -> None:
    """Announces a slow operation that prints nothing itself, where no live display is open. From any thread."""
    error_console().print(text, style="dim", soft_wrap=True)


@contextmanager
def working(text: str, *, clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[str], None]]:
    """Shows what the enclosed work does: on a terminal with a spinner and its seconds, else as one line.

    clock: monotonic seconds.

    Yields a function that shows what it does now. It can be called from any thread.
    """
    console = error_console()
    if not console.is_terminal:
        announce(text)
        yield announce
        return
    activity, spinner = [(text, clock())], Spinner("dots")

    def picture() -> Spinner:
        text, began_s = activity[-1]
        spinner.update(text=styled(f"{text}, {clock() - began_s:.0f} s"))
        return spinner

    live = Live(get_renderable=picture, console=console, refresh_per_second=4, transient=True)
    with live:
        yield lambda text: activity.append((text, clock()))


def write_document(text: str) -> None:
    """Writes a text of many lines, such as a log or a page, to stdout."""
    sys.stdout.write(printable_lines(text, limit=sys.maxsize))


def write_file(file: Path, text: str) -> None:
    """Writes a file that an option names, and makes its folder. Raises InputError where that is impossible."""
    with input_errors(OSError, about=f"{file} cannot be written: "):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def prepare_streams() -> None:
    """Makes this process write every character, tracebacks without codes of a terminal, and no faults of log handlers.

    A terminal or a file may have an encoding that lacks a character, as in an old locale.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as Python sets up stderr
    logging.raiseExceptions = False  # a handler whose server or disk is away writes nothing to the terminal about it
    sys.excepthook = write_uncaught
    threading.excepthook = lambda args: write_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def write_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """Writes the traceback of an error that ends the process or a thread to stderr."""
    if kind is SystemExit:  # of a thread, which may end itself so
        return
    sys.stderr.write(printable_lines("".join(traceback.format_exception(kind, error, trace))))


def print_json(value: Any) -> None:
    """Writes one JSON object, as one line, to stdout. Raises RingmasterError where its disk is full."""
    try:
        # `json.dump` would encode in Python, ten times slower.
        sys.stdout.write(json.dumps(finite(value), allow_nan=False) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has what it wants
        raise
    except OSError as error:
        raise RingmasterError(f"stdout cannot be written: {error}. To fix: let it lead elsewhere") from error


LOG_FORMAT = "RINGMASTER_LOG_FORMAT"
"""Environment variable for the format of the logs, `text` or `json`."""

OURS = "ringmaster"


class LogFormat(StrEnum):
    """The formats of the logs."""

    TEXT = "text"
    JSON = "json"


class ProcessRole(StrEnum):
    """The processes of a pool, as the key `role` of JSON logs names them."""

    CONTROLLER = "controller"
    NODE = "node"
    FLOW_WORKER = "flow-worker"
    SUPERVISOR = "supervisor"
    METRICS = "metrics"
    PREFECT = "prefect"
    MLFLOW = "mlflow"


class JsonHandler(logging.StreamHandler[Any]):
    """Writes records to stderr as JSON."""

    def __init__(self, role: ProcessRole) -> None:
        from pythonjsonlogger.json import JsonFormatter

        super().__init__(sys.stderr)
        self.setFormatter(JsonFormatter(**_fields(role)))


class TextFormatter(logging.Formatter):
    """Formats a record as one printable line, followed by the traceback of an error."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Returns the line of a record."""
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        """Returns a traceback, whose last lines have the message of an error."""
        return printable_lines(super().formatException(ei))


def log_format() -> LogFormat:
    """Returns the format that the environment selects. Raises InputError if it cannot be used."""
    value = os.environ.get(LOG_FORMAT) or LogFormat.TEXT
    try:
        selected = LogFormat(value)
    except ValueError as error:
        raise InputError([f"{LOG_FORMAT}: unknown log format {value!r}. To fix: text, or json"]) from error
    if selected is LogFormat.JSON and (fault := missing_extra("pool", feature=f"{LOG_FORMAT}=json")):
        raise InputError([fault])
    return selected


def log_to_stderr(role: ProcessRole) -> None:
    """Makes this process log to stderr in the format that the environment selects.

    Call it again once libraries that configure logging were imported, as Prefect and uvicorn do.
    """
    logger = logging.getLogger(OURS)
    logger.setLevel(logging.INFO)
    if log_format() is LogFormat.JSON:
        _log_as_json(role)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger.handlers = [handler, *(each for each in logger.handlers if isinstance(each, _RunHandler))]
    logger.propagate = False


@contextmanager
def logs_to(run_logger: logging.LoggerAdapter[Any] | logging.Logger) -> Iterator[None]:
    """Inside the context, shows what this process logs in the log of a flow run in Prefect, too, from all threads."""
    handler = _RunHandler(run_logger)
    logging.getLogger(OURS).addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger(OURS).removeHandler(handler)


class _RunHandler(logging.Handler):
    def __init__(self, run_logger: logging.LoggerAdapter[Any] | logging.Logger) -> None:
        super().__init__()
        self._run_logger = run_logger
        self.setFormatter(TextFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        self._run_logger.log(record.levelno, "%s", self.format(record))


def is_json() -> bool:
    """Returns whether this process logs JSON."""
    return any(isinstance(handler, JsonHandler) for handler in logging.getLogger().handlers)


def notice(text: str) -> None:
    """Reports what this process does: as a line of text, or as a record of a JSON log."""
    if is_json():
        logging.getLogger(OURS).info("%s", text)
    else:
        error_console().print(text, soft_wrap=True)


def report_faults(faults: Sequence[object]) -> None:
    """Reports why this process ends, a line for each error: as text, or as a record of a JSON log."""
    if is_json():
        logging.getLogger(OURS).error("%s", join_limited(faults))
    else:
        error_console().print(*map(message, first_of(faults)), sep="\n", soft_wrap=True)


def logging_config(role: ProcessRole) -> dict[str, Any]:
    """Returns the same JSON log as a configuration for `logging.config.dictConfig`, for processes that are not ours."""
    formatter = {"()": "pythonjsonlogger.json.JsonFormatter", **_fields(role)}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": formatter},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "stream": "ext://sys.stderr", "formatter": "json"}},
        "root": {"level": "WARNING", "handlers": ["stderr"]},
        "loggers": {"uvicorn": {"level": "INFO"}, "mlflow": {"level": "INFO"}},
    }


def _fields(role: ProcessRole) -> Mapping[str, Any]:
    """Returns the arguments of the formatter. `timestamp` is RFC 3339 in UTC."""
    from pythonjsonlogger.core import RESERVED_ATTRS

    return {
        "fmt": ["levelname", "name", "message", "process"],
        "rename_fields": {"levelname": "level", "name": "logger", "process": "pid", "exc_info": "exception"},
        "timestamp": "timestamp",
        "reserved_attrs": [*RESERVED_ATTRS, "color_message"],  # uvicorn's message again, with escapes of terminals
        "static_fields": {"role": role},
    }


def _log_as_json(role: ProcessRole) -> None:
    root = logging.getLogger()
    named = [each for each in list(logging.Logger.manager.loggerDict.values()) if isinstance(each, logging.Logger)]
    for logger in (root, *named):
        for handler in [each for each in logger.handlers if _is_of_terminal(each)]:
            logger.removeHandler(handler)
            logger.propagate = True
    if not is_json():
        root.addHandler(JsonHandler(role))
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread
    os.environ["MLFLOW_CONFIGURE_LOGGING"] = "false"  # MLflow would add handlers of its own once it is imported


def _is_of_terminal(handler: logging.Handler) -> bool:
    """Whether a handler writes to stderr or stdout, and not to a file or into memory."""
    is_ours_or_file = isinstance(handler, (logging.FileHandler, JsonHandler))
    return (
        isinstance(handler, logging.StreamHandler)
        and not is_ours_or_file
        and not isinstance(handler.stream, io.StringIO)
    )


def _log_uncaught(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None, *, who: str = "this process"
) -> None:
    """Logs the error that ends the process or a thread. Ctrl-C is none, nor is a thread that ends itself."""
    if isinstance(error, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif error is not None and kind is not SystemExit:
        logging.getLogger(OURS).critical("%s ends with an error: %s", who, error, exc_info=(kind, error, trace))


def _log_uncaught_in_thread(hook: threading.ExceptHookArgs) -> None:
    name = hook.thread.name if hook.thread is not None else "?"
    _log_uncaught(hook.exc_type, hook.exc_value, hook.exc_traceback, who=f"thread {name}")
