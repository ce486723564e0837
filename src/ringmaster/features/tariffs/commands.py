"""`ringmaster pool tariff`, and the option `--wait` of `ringmaster whatif`: what waiting for cheaper hours gains."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringmaster.codec import from_json, to_json
from ringmaster.errors import InputError, ProblemError
from ringmaster.flows.commands.parameters import with_parameters
from ringmaster.flows.commands.planning import read_problem
from ringmaster.flows.commands.running import estimate
from ringmaster.flows.interrupts import Interrupts
from ringmaster.flows.output import AsJson, announce, notice, print_outcome, print_result
from ringmaster.flows.settings import resolve_path

if TYPE_CHECKING:
    from ringmaster.tasks.batch import Batch
    from ringmaster.tasks.planning import Plan, Problem

DEFAULT_OBJECTIVE = "cost"
NO_TARIFF = "none"
QUESTIONS = ("add_devices", "add_node", "add_quota", "without", "deadline", "explain", "plan", "at_once")
"""The other options of the command that ask for something, or say how its answers are made."""


def with_wait(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the option `--wait` to `ringmaster whatif`, and with it the objective of a problem file."""

    def whatif(*, wait: bool, wait_objective: str, **options: Any) -> None:
        if not wait:
            command(**options)
            return
        others = [f"--{key.replace('_', '-')}" for key in QUESTIONS if options.get(key)]
        if others:
            raise InputError([f"--wait answers nothing of {', '.join(others)}. To fix: ask for one after the other"])
        _show_waits(
            options["file"],
            objective=wait_objective,
            limits={key: options[key] for key in ("work", "time_limit", "seed")},
            profiles=options["profiles"],
            as_json=options["as_json"],
        )

    option = typer.Option("--wait", help="What jobs cost and emit if they may end later and wait for cheaper hours.")
    of = typer.Option("--wait-objective", help="With --wait and a problem file: cost, emissions or trade-off.")
    return with_parameters(
        command, whatif, wait=(Annotated[bool, option], False), wait_objective=(Annotated[str, of], DEFAULT_OBJECTIVE)
    )


def _show_waits(file: Path, *, objective: str, limits: dict[str, Any], profiles: Any, as_json: bool) -> None:
    from ringmaster.features.tariffs.waiting import WAITS, gain_lines, gains_to_json, wait_gains
    from ringmaster.tasks.planning.series_bands import power_sentence

    if file.suffix.lower() in (".yaml", ".yml"):
        problem, objective = _of_batch(file, objective=objective, profiles=profiles, seed=limits["seed"])
    else:
        problem = read_problem(file)
    work_s = limits["work"] / (1 + len(WAITS))
    announce(f"planning {1 + len(WAITS)} times")

    def make_plan(problem: "Problem", objective: str) -> "Plan":
        from ringmaster.tasks.planning import solve

        return solve(
            problem, objective=objective, work_s=work_s, time_limit_s=limits["time_limit"], seed=limits["seed"]
        )

    try:
        gains = wait_gains(problem, objective=objective, make_plan=make_plan)
    except (ProblemError, ValueError) as error:
        raise InputError([f"{file}: {fault}" for fault in getattr(error, "faults", [error])]) from None
    lines = [*gain_lines(gains, problem, objective=objective), *filter(None, [power_sentence(problem)])]
    print_outcome(gains_to_json(gains, objective=objective), lines, as_json=as_json)


def _of_batch(file: Path, *, objective: str, profiles: Any, seed: int) -> "tuple[Problem, str]":
    """Returns the problem of a batch's dry run, and its objective where that depends on tariffs."""
    from ringmaster.features.tariffs.batch import EMITTED, PAID, TRADED
    from ringmaster.tasks.batch import load_batch

    batch = without_bounds(load_batch(resolve_path(file)))
    result = estimate(batch, profiles=profiles, seed=seed, interrupts=Interrupts())
    if result.problem is None:
        raise InputError([f"{file}: no job can be trained: {result.summary()}"])
    return result.problem, batch.objective if batch.objective in (PAID, EMITTED, TRADED) else objective


def without_bounds(batch: "Batch") -> "Batch":
    """Returns a batch that may spend and emit whatever its jobs take: a bound that no plan keeps is no answer."""
    from ringmaster.features.tariffs.terms import Tariffs

    if Tariffs.key not in batch.planning:
        return batch
    bounded = from_json(Tariffs, batch.planning[Tariffs.key])
    free = replace(bounded, max_money=None, max_emissions_g=None)
    return replace(batch, planning={**batch.planning, Tariffs.key: to_json(free)})


def tariff(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE|none]", help="YAML file with price, energy_price, carbon, ...; none removes; default: show."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what the pool's devices cost and emit by the hour, or set it for the plans of all batches."""
    from ringmaster.features.tariffs.pool_tariff import load_tariff, set_tariffs, tariffs_of_pool
    from ringmaster.flows.pool.batch_requests import open_database, pool_address
    from ringmaster.tasks.batch.document import place_text
    from ringmaster.tasks.cluster import kind_of
    from ringmaster.tasks.pool.nodes import NodeRegistry
    from ringmaster.tasks.storage.schema import check_release

    address = pool_address()
    new = None if file in (None, NO_TARIFF) else load_tariff(resolve_path(file or ""))
    with open_database(address) as database:
        if file is not None:
            database.read(check_release)
            kinds = {node.name: kind_of(node.devices) for node in NodeRegistry(database).all()}
            for fault in () if new is None else new.node_findings(kinds):
                notice(f"{place_text(fault.place)} {fault.message}; a node that joins later may have this name")
            set_tariffs(database, new)
        stored = tariffs_of_pool(database)
    if stored is not None and stored.is_empty:  # as it was removed
        stored = None
    lines = [] if stored is None else list(stored.in_words())
    result = None if stored is None else to_json(replace(stored, former=()))
    print_result({"tariff": result}, lines or ["the pool has no tariff: batches give their own"], as_json=as_json)


COMMANDS = {"pool": (tariff,)}
OPTIONS = {"whatif": with_wait}
