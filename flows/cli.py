"""The command line. Results go to stdout, all else to stderr; exit 0 done, 2 a fault in the input, 1 anything else."""

from __future__ import annotations

import sys

import typer

from flows import (
    commands_converting,
    commands_datasets,
    commands_executor,
    commands_lineage,
    commands_looking,
    commands_models,
    commands_nodes,
    commands_planning,
    commands_pool,
    commands_promoting,
    commands_retraining,
    commands_running,
    commands_services,
    commands_watching,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Trains batches of models: parallelism, devices and schedule chosen by one certified optimizer.",
)
for command in (
    commands_running.run,
    commands_running.profile,
    commands_planning.plan,
    commands_planning.check,
    commands_planning.simulate,
    commands_retraining.sweep,
    commands_retraining.retrain,
    commands_pool.submit,
    commands_pool.cancel,
    commands_pool.pause,
    commands_pool.resume,
    commands_pool.set_priority,
    commands_looking.techniques,
    commands_looking.status,
    commands_looking.logs,
    commands_models.evaluate,
    commands_models.monitor,
    commands_promoting.promote,
    commands_promoting.rollback,
    commands_watching.watch,
    commands_converting.convert,
    commands_services.up,
    commands_services.down,
    commands_executor.executor,
    commands_nodes.worker,
):
    app.command()(command)
app.add_typer(commands_datasets.app, name="datasets")
app.add_typer(commands_lineage.app, name="lineage")

INPUT_FAULT = 2


def main() -> None:
    """The entry point: faults in the input are told without a traceback."""
    from flows.faults import InputError
    from tasks.batch import BatchFileError
    from tasks.planning import ProblemError

    try:
        app()
    except (BatchFileError, ProblemError, InputError) as error:
        sys.stderr.write("\n".join(str(fault) for fault in error.faults) + "\n")
        sys.exit(INPUT_FAULT)


if __name__ == "__main__":
    main()
