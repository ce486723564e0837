"""The logs of processes, as text and as JSON."""

import json
import os
import subprocess
import sys
from datetime import datetime, timedelta

import pytest

from ringmaster.errors import InputError
from ringmaster.flows.output import LOG_FORMAT, LogFormat, ProcessRole, log_format, logging_config

# A process of a pool, with loggers of ours and of others.
PROCESS = """
import logging, sys, threading, warnings
from ringmaster.flows.output import ProcessRole, log_to_stderr, notice, report_faults
other = logging.getLogger("sqlalchemy.engine")
other.addHandler(logging.StreamHandler(sys.stderr))
other.propagate = False
log_to_stderr(ProcessRole.CONTROLLER)
log_to_stderr(ProcessRole.CONTROLLER)
logging.getLogger("ringmaster.flows").info("plan %d\\nfollowed", 7)
other.warning("slow")
notice("it leads")
report_faults(["it may not"])
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("ringmaster.tasks").exception("no plan")
"""


def stderr_of(program, **environment):
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**{k: v for k, v in os.environ.items() if k != LOG_FORMAT}, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ""
    return done.stderr


def test_json_has_one_object_a_line_for_all_loggers():
    lines = [json.loads(line) for line in stderr_of(PROCESS, **{LOG_FORMAT: "json"}).splitlines()]
    told = [(line["level"], line["logger"], line["message"]) for line in lines]
    assert told == [
        ("INFO", "ringmaster.flows", "plan 7\nfollowed"),
        ("WARNING", "sqlalchemy.engine", "slow"),
        ("INFO", "ringmaster", "it leads"),
        ("ERROR", "ringmaster", "it may not"),
        ("ERROR", "ringmaster.tasks", "no plan"),
    ]
    for line in lines:
        assert line["role"] == "controller"
        assert datetime.fromisoformat(line["timestamp"]).utcoffset() == timedelta(0)
    assert "ZeroDivisionError: division by zero" in lines[-1]["exception"]


def test_text_is_the_default_and_has_what_it_had():
    said = stderr_of(PROCESS)
    assert "plan 7\\nfollowed\n" in said
    assert "{" not in said
    assert said.count("it leads\n") == said.count("it may not\n") == said.count("slow\n") == 1


@pytest.mark.parametrize(
    "program",
    [
        "raise ValueError('no such thing')",
        "t = threading.Thread(target=lambda: {}['no such thing']); t.start(); t.join()",
    ],
    ids=["process", "thread"],
)
def test_an_error_that_nobody_catches_is_a_record_too(program):
    start = "import threading\nfrom ringmaster.flows.output import ProcessRole, log_to_stderr\n"
    said = stderr_of(f"{start}log_to_stderr(ProcessRole.NODE)\n{program}", **{LOG_FORMAT: "json"})
    (line,) = [json.loads(each) for each in said.splitlines()]
    assert "no such thing" in line["exception"]
    assert line["role"] == "node"


def test_prefect_and_mlflow_log_through_the_same_handler():
    """Both configure logging when they are imported, Prefect also when its server is made."""
    program = """
import logging
from ringmaster.flows.output import ProcessRole, log_to_stderr
log_to_stderr(ProcessRole.PREFECT)
from prefect import flow
from prefect.logging.configuration import setup_logging
setup_logging()
log_to_stderr(ProcessRole.PREFECT)
import mlflow
for name in ("prefect.server", "prefect._internal", "uvicorn.error", "mlflow.store", "alembic", "ringmaster"):
    logging.getLogger(name).error("of %s", name)
"""
    lines = [json.loads(line) for line in stderr_of(program, **{LOG_FORMAT: "json"}).splitlines()]
    names = ["prefect.server", "prefect._internal", "uvicorn.error", "mlflow.store", "alembic", "ringmaster"]
    assert [line["logger"] for line in lines if line["message"].startswith("of ")] == names


def test_the_configuration_for_other_processes_makes_the_same_lines():
    program = f"""
import json, logging.config
logging.config.dictConfig(json.loads({json.dumps(json.dumps(logging_config(ProcessRole.MLFLOW)))}))
logging.getLogger("uvicorn.error").info("started", extra={{"color_message": "started"}})
logging.getLogger("mlflow.store").warning("slow")
"""
    lines = [json.loads(line) for line in stderr_of(program).splitlines()]
    assert [(line["logger"], line["role"]) for line in lines] == [
        ("uvicorn.error", "mlflow"),
        ("mlflow.store", "mlflow"),
    ]
    assert set(lines[0]) == {"timestamp", "level", "logger", "message", "pid", "role"}


def test_an_unknown_format_is_refused(monkeypatch):
    monkeypatch.setenv(LOG_FORMAT, "xml")
    with pytest.raises(InputError, match=r"unknown log format 'xml'\. To fix: text, or json"):
        log_format()
    monkeypatch.setenv(LOG_FORMAT, "")
    assert log_format() is LogFormat.TEXT
