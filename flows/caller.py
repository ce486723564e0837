"""What calls a flow: how it shows progress, how signals stop it, its clock, and the servers that it has started."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ringmaster.flows.interrupts import Interrupts
from ringmaster.flows.output import error_console
from ringmaster.flows.reports.progress import View, view_on
from ringmaster.flows.services.first_processes import ServerProcess
from ringmaster.tasks.profiling.preflight_runs import PreflightAhead
from ringmaster.techniques.processes.forkserver_client import ForkServerClient


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The caller of a flow, by default a program that shows nothing and has started nothing.

    It is a parameter of flows in Python alone: Prefect neither stores it nor shows it in a form.

    view: shows the progress.
    interrupts: the signals that the command handles; those of a program are handled while its jobs are trained.
    clock: the time that determines the date of a retraining run, in seconds since the epoch.
    prefect: Prefect's server, of a run without a pool; None where the flow starts one, or another one is in use.
    fork_server: forks the workers; None where the flow starts one.
    preflight: that of the batch's jobs, in the fork server; None where it has not begun.
    """

    view: View = field(default_factory=View)
    interrupts: Interrupts = field(default_factory=Interrupts)
    clock: Callable[[], float] = time.time
    prefect: ServerProcess | None = None
    fork_server: ForkServerClient | None = None
    preflight: PreflightAhead | None = None


@contextmanager
def opened_caller(interrupts: Interrupts, *, is_verbose: bool = False, **started: Any) -> Iterator[Caller]:
    """Yields the caller of a flow that shows the progress of the enclosed work, and the answers to signals, on stderr.

    started: what is started ahead, as fields of `Caller`.
    """
    with view_on(error_console(), is_verbose=is_verbose) as view, interrupts.shown_by(view.say):
        caller = Caller(view=view, interrupts=interrupts, **started)
        if caller.preflight is not None:
            caller.preflight.notice = view.notice
        yield caller
