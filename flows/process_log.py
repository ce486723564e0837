"""Logs of our long-lived processes on stderr: text or, with RINGMASTER_LOG_FORMAT=json, one JSON object a line.

In the text format, only the loggers of `ringmaster` write to stderr as we say; other libraries configure their own.
In the JSON format, one handler writes the records of all loggers.
"""

import io
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from types import TracebackType
from typing import Any

from ringmaster.errors import InputError
from ringmaster.extras import missing_extra
from ringmaster.flows.output import error_console, message
from ringmaster.text import first_of, listed, printable, printable_lines

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
    """Tells people what this process does: as a line of text, or as a record of a JSON log."""
    if is_json():
        logging.getLogger(OURS).info("%s", text)
    else:
        error_console().print(text, soft_wrap=True)


def report_faults(faults: Sequence[object]) -> None:
    """Tells people why this process ends, a line for each fault: as text, or as a record of a JSON log."""
    if is_json():
        logging.getLogger(OURS).error("%s", listed(faults))
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
    for logger in _loggers():
        for handler in [each for each in logger.handlers if _is_of_terminal(each)]:
            logger.removeHandler(handler)
            logger.propagate = True
    if not is_json():
        root.addHandler(JsonHandler(role))
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread
    os.environ["MLFLOW_CONFIGURE_LOGGING"] = "false"  # MLflow would add handlers of its own once it is imported


def _loggers() -> Iterator[logging.Logger]:
    yield logging.getLogger()
    for each in list(logging.Logger.manager.loggerDict.values()):
        if isinstance(each, logging.Logger):
            yield each


def _is_of_terminal(handler: logging.Handler) -> bool:
    """Whether a handler writes to stderr or stdout, and not to a file or into memory."""
    if isinstance(handler, (logging.FileHandler, JsonHandler)) or not isinstance(handler, logging.StreamHandler):
        return False
    return not isinstance(handler.stream, io.StringIO)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        logging.getLogger(OURS).critical("this process ends with an error: %s", error, exc_info=(kind, error, trace))


def _log_uncaught_in_thread(hook: threading.ExceptHookArgs) -> None:
    name = hook.thread.name if hook.thread is not None else "?"
    if hook.exc_value is not None and hook.exc_type is not SystemExit:
        info = (hook.exc_type, hook.exc_value, hook.exc_traceback)
        logging.getLogger(OURS).error("thread %s ends with an error: %s", name, hook.exc_value, exc_info=info)
