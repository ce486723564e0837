"""Private and undocumented names of Prefect. Importing this imports no Prefect."""

from collections.abc import Mapping
from typing import Any, TypeVar

F = TypeVar("F")

STARTED_RUN = "PREFECT__FLOW_RUN_ID"
"""The environment variable with the id of the flow run for which Prefect has started a process.

`prefect.runtime.flow_run.id` is the id of any current run, also of one that a command has started itself. Without it a
signal that Prefect sends is taken for a person's.
"""

MIGRATIONS = "prefect:server/database/_migrations/versions/sqlite"
"""Where the versions of the tables of its SQLite file are.

Without it a server that cannot read the file of a later release ends with a trace, and not with what to do.
"""

SETTINGS_FILES = (".env", "prefect.toml", "pyproject.toml")
"""The files in the working folder from which Prefect takes settings, beside the environment and its profiles.

No public name lists them. Without it nobody could say which file has the setting that is wrong.
"""


async def create_database() -> None:
    """Creates the tables of the database that the settings name, or upgrades them, as Prefect's server does.

    The server does so as it starts, and then adds rows. Without it no copy of the tables alone could be kept, and each
    new home would wait for its migrations.
    """
    from prefect.server.database import provide_database_interface

    await provide_database_interface().create_db()


def server_app(*, ephemeral: bool) -> Any:
    """Returns the application that `prefect server start` serves.

    ephemeral: whether it is for the life of one process, without the services that a lasting server runs.

    The command takes no other middleware. Without it pages of other origins may use Prefect's API.
    """
    from prefect.server.api.server import create_app

    return create_app(final=True, ephemeral=ephemeral)


def process_settings() -> Any:
    """Returns the settings of this process, whatever those of the current context are.

    `get_current_settings` returns those of a context, such as the one that `temporary_settings` makes. Without it a
    run in such a context would start a server of its own.
    """
    from prefect import context

    return context.GLOBAL_SETTINGS_CONTEXT.settings


def copy_flow(flow: Any, kind: type[F]) -> F:
    """Returns a flow of a subclass of `Flow`, with the function and all options of another flow.

    Prefect's decorator makes instances of `Flow` alone, and `Flow` has no copy with another class. Without it a flow
    that is called in Python starts no server of its own.
    """
    result = kind.__new__(kind)
    vars(result).update(vars(flow))
    return result


def set_run_limit(worker: Any, limit: int) -> None:
    """Sets how many flow runs a worker runs at once, while it works. Raises RuntimeError before it has begun.

    Prefect reads a worker's limit as it begins. Without it a worker that was started again runs more than its limit:
    the runs of its former process are not counted.
    """
    worker.limiter.total_tokens = limit


def worker_texts(*, description: str, display_name: str) -> Mapping[str, str]:
    """Returns the attributes of a worker's class with the texts that Prefect's pages have for it.

    Without them the type of the worker is nameless there.
    """
    return {"_description": description, "_display_name": display_name}
