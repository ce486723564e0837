"""The command line. Results go to stdout, all else to stderr; exit 0 done, 2 a fault in the input, 1 anything else."""

from __future__ import annotations

import sys

import typer

from ringmaster.flows import interrupts
from ringmaster.flows.commands import (
    converting,
    datasets,
    executor,
    lineage,
    looking,
    models,
    nodes,
    planning,
    pool,
    promoting,
    retraining,
    running,
    services,
    watching,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Trains batches of models: parallelism, devices and schedule chosen by one certified optimizer.",
)
for command in (
    running.run,
    running.profile,
    planning.plan,
    planning.check,
    planning.simulate,
    retraining.sweep,
    retraining.retrain,
    pool.submit,
    pool.cancel,
    pool.pause,
    pool.resume,
    pool.set_priority,
    looking.techniques,
    looking.status,
    looking.logs,
    models.evaluate,
    models.monitor,
    promoting.promote,
    promoting.rollback,
    watching.watch,
    converting.convert,
    services.up,
    services.down,
    executor.executor,
    nodes.worker,
):
    app.command()(command)
app.add_typer(datasets.app, name="datasets")
app.add_typer(lineage.app, name="lineage")

INPUT_FAULT = 2


def main() -> None:
    """The command that is given: faults in its input are told without a traceback."""
    from ringmaster.flows import ownership, settings
    from ringmaster.flows.faults import InputError
    from ringmaster.tasks.batch import BatchFileError
    from ringmaster.tasks.messages import listed
    from ringmaster.tasks.planning import ProblemError
    from ringmaster.tasks.pool.faults import OtherRelease

    with interrupts.command(sys.argv[1:]):
        try:
            ownership.keep_to_owner(settings.home())
            app()
        except (BatchFileError, ProblemError, InputError, OtherRelease) as error:
            sys.stderr.write(f"{listed(error.faults)}\n")
            sys.exit(INPUT_FAULT)


if __name__ == "__main__":
    main()
