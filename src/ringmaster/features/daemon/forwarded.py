"""A command in a process that the daemon's server has forked: the child's side of `forwarding`."""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
from typing import Any, NoReturn

from ringmaster.compat.python import run_exit_functions
from ringmaster.features.daemon.environment import environment_digest
from ringmaster.features.daemon.forwarding import SIGNALS
from ringmaster.flows.entry import exit_process, status_of
from ringmaster.flows.entry import main as run_command
from ringmaster.techniques.processes.channel import Channel


def main(channel: Channel, argument: dict[str, Any]) -> NoReturn:
    """Runs one command, and ends with its exit status. The target of a child of the daemon's server."""
    for number, descriptor in enumerate(channel.receive_descriptors(3)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(argument["environment"])
    os.chdir(argument["folder"])
    os.umask(argument["umask"])
    tempfile.tempdir = None  # that of the server, which has an environment of its own
    for number in SIGNALS:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in argument["ignored"] else default)
    _open_streams()
    sys.argv = ["ringmaster", *argument["arguments"]]
    environment_digest()  # before anything changes the environment
    status = status_of(run_command)
    run_exit_functions()
    exit_process(status)


def _open_streams() -> None:
    """Makes Python's streams those of the command, as an interpreter opens them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, name)
        mode = "rb" if name == "stdin" else "wb"
        raw: Any = open(number, mode, closefd=False)  # noqa: SIM115 - for as long as the process lives
        is_terminal = os.isatty(number)
        errors = "backslashreplace" if name == "stderr" else before.errors
        line_buffering = is_terminal or name == "stderr"
        stream = io.TextIOWrapper(raw, encoding=before.encoding, errors=errors, line_buffering=line_buffering)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
