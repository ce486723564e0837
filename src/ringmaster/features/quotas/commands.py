"""`ringmaster pool quota`, and the options `--quota` of `ringmaster up` and `--add-quota` of `ringmaster whatif`."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ringmaster.codec import to_json
from ringmaster.errors import InputError, raise_faults
from ringmaster.flows.commands.parameters import with_parameters, with_values
from ringmaster.flows.output import AsJson, print_result

if TYPE_CHECKING:
    from ringmaster.features.quotas.job import UserQuota
    from ringmaster.features.quotas.terms import Quotas
    from ringmaster.tasks.storage.database import Database


def quota(
    user: Annotated[str | None, typer.Argument(help="User that jobs name in batch files; default: show all.")] = None,
    limit: Annotated[
        str | None, typer.Argument(metavar="[N|SHARE%|none]", help="Devices that the user may hold at a time.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what users may hold at a time in all batches of the pool and what a device more is worth, or set it."""
    from ringmaster.features.quotas.pool_quotas import quotas_of_pool, set_quotas
    from ringmaster.flows.pool.batch_requests import open_database, pool_address

    if user is not None and limit is None:
        raise InputError([f"no limit of {user} is given. To fix: add a number of devices, a share as 25%, or none"])
    with open_database(pool_address()) as database:
        if user is not None and limit is not None:
            set_quotas(database, _changes([f"{user}:{limit}"]))
        lines, users = quotas_in_words(database), quotas_of_pool(database).users
    result = {"quotas": to_json(users), "prices": lines[len(users) :]}
    print_result(result, lines or ["no user has a quota"], as_json=as_json)


def quotas_in_words(database: "Database") -> list[str]:
    """Returns the quotas of a pool's users, and what a device of each is worth in its newest plan, in sentences.

    Quotas that batches name are in the plan, too.
    """
    from ringmaster.features.quotas.pool_quotas import quotas_of_pool
    from ringmaster.flows.pool.batch_requests import limited_problem

    quotas, problem = quotas_of_pool(database), limited_problem(database)
    return [*quotas.in_words(), *(() if problem is None else quotas.worth_in_words(problem))]


def with_quotas(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the option `--quota` to `ringmaster up`."""

    def limited(*, quota: list[str] | None, **options: Any) -> None:
        changes = _changes(quota or ())
        command(**with_values(options, "when_up", *([partial(_set, changes)] if changes else [])))

    option = typer.Option(
        metavar="USER:N|SHARE%",
        help="Devices that a user's jobs may hold at a time in all batches; `pool quota` changes it later.",
    )
    return with_parameters(command, limited, quota=(Annotated[list[str] | None, option], None))


def _set(changes: "dict[str, UserQuota | None]") -> "Quotas":
    from ringmaster.features.quotas.pool_quotas import set_quotas
    from ringmaster.flows.pool.batch_requests import open_database, pool_address

    with open_database(pool_address()) as database:
        return set_quotas(database, changes)


def _changes(texts: Iterable[str]) -> "dict[str, UserQuota | None]":
    """Returns quotas that are written as USER:LIMIT. Raises InputError with all faults."""
    from ringmaster.features.quotas.pool_quotas import quota_of

    quotas, faults = {}, []
    for text in texts:
        user, _, limit = text.rpartition(":")
        try:
            quotas[user] = quota_of(limit)
        except ValueError as error:
            faults.append(str(error))
        if not user:
            faults.append(f"{text!r} names no user. To fix: as in ana:4")
    raise_faults(faults)
    return quotas


def with_more_quotas(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the option `--add-quota` to `ringmaster whatif`."""

    def extended(*, add_quota: list[str] | None, **options: Any) -> None:
        from ringmaster.features.quotas.quota_worth import MoreQuota

        texts = map(_more, add_quota or ())
        changes = [MoreQuota(user=user, num_devices=num, taken_from=other) for user, num, other in texts]
        command(**with_values(options, "changes", *changes))

    option = typer.Option(
        metavar="USER:N[:OTHER]", help="Let a user hold N more devices at a time, and another N less."
    )
    return with_parameters(command, extended, add_quota=(Annotated[list[str] | None, option], None))


def _more(text: str) -> tuple[str, int, str]:
    """Returns a user, the number of further devices, and the user who may hold as many less, or ""."""
    user, _, rest = text.partition(":")
    number, _, other = rest.partition(":")
    if user and number.isdecimal() and int(number[:9]) > 0:
        return user, int(number[:9]), other
    raise InputError([f"--add-quota {text!r} is not a user and a number of devices. To fix: as in ana:1 or ana:1:ben"])


COMMANDS = {"pool": (quota,)}
OPTIONS = {"up": with_quotas, "whatif": with_more_quotas}
