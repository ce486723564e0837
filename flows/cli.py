"""The command line. Results go to stdout, all else to stderr; exit 0 done, 2 a fault in the input, 1 anything else."""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import typer

from ringmaster.feature_hooks import command_name
from ringmaster.features import modules, modules_by_package
from ringmaster.flows.commands import lineage, models, observing, planning, pool, running, stored_models

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Trains batches of models: parallelism, devices and schedule chosen by one certified optimizer.",
)
TRAIN, PLAN, POOL, MODELS, DATA = "Train", "Plan", "Pool", "Models", "Data"
COMMANDS: Mapping[str, Sequence[Callable[..., None]]] = {
    TRAIN: (
        *(running.run, running.sweep, running.retrain),
        *(pool.submit, observing.status, observing.watch, observing.logs),
    ),
    PLAN: (running.profile, planning.plan, planning.check, observing.schema_command()),
    POOL: (pool.up, pool.down),
    MODELS: (
        *(models.evaluate, models.monitor, models.promote, models.rollback, models.export),
        stored_models.verify,
    ),
}
COMMAND_GROUPS = (
    (pool.jobs_app, "jobs", TRAIN),
    (pool.pool_app, "pool", POOL),
    (lineage.app, "lineage", MODELS),
    (models.datasets_app, "datasets", DATA),
)

# The module `commands` of a feature may define COMMANDS and COMMAND_GROUPS too. Its commands may join a group by name.
# A command that trains gives the `Interrupts` of its `typer.Context` to what trains, as `run` does. One of the core
# joins the lists in `flows.interrupts`; others stop in order while their jobs are trained.
# OPTIONS are functions by the names of other commands, of which each returns the command with further options.


def with_options_of_features(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command with the options that features add; those that fail are left out, with a line in the log."""
    for package, module in modules_by_package("commands").items():
        try:
            command = getattr(module, "OPTIONS", {}).get(command.__name__, lambda plain: plain)(command)
        except Exception as error:
            if not package.distribution:
                raise
            why = f"{type(error).__name__}: {error}"
            logging.getLogger(__name__).warning("options of %s for %s left out: %s", package, command.__name__, why)
    return command


OWN_GROUPS = {name: group for group, name, _ in COMMAND_GROUPS}
# What two features call the same, or a feature and Ringmaster, is that of the first: see `ringmaster.feature_check`.
TAKEN = {*OWN_GROUPS}
for group, own_app in OWN_GROUPS.items():
    TAKEN |= {f"{group} {each.name or command_name(each.callback)}" for each in own_app.registered_commands}
for source in (sys.modules[__name__], *modules("commands")):
    for panel, commands in getattr(source, "COMMANDS", {}).items():
        for each in map(with_options_of_features, commands):
            register = OWN_GROUPS[panel].command if panel in OWN_GROUPS else partial(app.command, rich_help_panel=panel)
            name = command_name(each)
            if (key := f"{panel} {name}" if panel in OWN_GROUPS else name) not in TAKEN:
                TAKEN.add(key)
                register(name)(each)
    for group, name, panel in getattr(source, "COMMAND_GROUPS", ()):
        if name not in TAKEN or source is sys.modules[__name__]:
            TAKEN.add(name)
            app.add_typer(group, name=name, rich_help_panel=panel)
