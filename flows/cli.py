"""The command line. Results go to stdout, all else to stderr; exit 0 done, 2 a fault in the input, 1 anything else."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

from ringmaster.flows.commands import datasets, lineage, models, planning, pool, running, services, watching, whatif
from ringmaster.flows.commands import models as promoting
from ringmaster.flows.commands import pool as processes
from ringmaster.flows.commands import running as retraining
from ringmaster.flows.output import error_console


def renamed(command: Callable[..., None], *, was: str, now: str) -> Callable[..., None]:
    """Returns a command under its former name, under which it works as before and prints the new one."""

    @functools.wraps(command)
    def under_former_name(*args: Any, **options: Any) -> None:
        error_console().print(f"`ringmaster {was}` is now `ringmaster {now}`", soft_wrap=True)
        command(*args, **options)

    return under_former_name


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Trains batches of models: parallelism, devices and schedule chosen by one certified optimizer.",
)
TRAIN, PLAN, POOL, MODELS, DATA = "Train", "Plan", "Pool", "Models", "Data"
COMMANDS: Mapping[str, Sequence[Callable[..., None]]] = {
    TRAIN: (
        running.run,
        retraining.sweep,
        retraining.retrain,
        pool.submit,
        watching.status,
        watching.watch,
        watching.logs,
    ),
    PLAN: (running.profile, planning.plan, planning.check, whatif.whatif, planning.simulate, watching.techniques),
    POOL: (services.up, services.down, services.diagnose),
    MODELS: (models.evaluate, models.monitor, promoting.promote, promoting.rollback, models.convert),
}
JOBS = (pool.cancel, pool.pause, pool.resume, pool.set_priority)
PROCESSES = (processes.controller, processes.worker)
FORMER_NAMES = {"controller": "executor"}

for panel, commands in COMMANDS.items():
    for each in commands:
        app.command(rich_help_panel=panel)(each)
for name, panel, of_group, text in (
    ("jobs", TRAIN, JOBS, "Cancel, pause and resume jobs that a pool trains, and set their priorities."),
    ("pool", POOL, PROCESSES, "The processes of a pool: its controller, and a worker on each node."),
):
    group = typer.Typer(no_args_is_help=True, help=text)
    for each in of_group:
        called = each.__name__.replace("_", "-")
        was = FORMER_NAMES.get(called, called)
        group.command()(each)
        app.command(was, hidden=True)(renamed(each, was=was, now=f"{name} {called}"))
        if was != called:
            group.command(was, hidden=True)(renamed(each, was=f"{name} {was}", now=f"{name} {called}"))
    app.add_typer(group, name=name, rich_help_panel=panel)
app.add_typer(lineage.app, name="lineage", rich_help_panel=MODELS)
app.add_typer(datasets.app, name="datasets", rich_help_panel=DATA)
