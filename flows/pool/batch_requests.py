"""Requests of a person about batches that run on a pool: finding the batch, asking, and waiting for the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from ringmaster.errors import InputError, raise_faults
from ringmaster.flows import settings
from ringmaster.flows.dated_runs import runs_below
from ringmaster.tasks.cluster import kind_of
from ringmaster.tasks.control.batch_terms import ALONE
from ringmaster.tasks.control.requests import RequestKind, Requests, RequestStatus
from ringmaster.tasks.planning import Problem
from ringmaster.tasks.planning.objectives import objective_by_name, objective_names
from ringmaster.tasks.planning.term_features import has_limits, worth_in_words
from ringmaster.tasks.pool.active_batches import features_of_pool
from ringmaster.tasks.pool.nodes import NodeRegistry
from ringmaster.tasks.pool.submissions import BatchStatus, Submissions, hand_over, unsubmitted
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import Journal
from ringmaster.tasks.storage.schema import BATCHES, PLANS, check_release
from ringmaster.techniques.job_features import is_name

if TYPE_CHECKING:
    from ringmaster.tasks.batch import Batch

DATABASE_TIMEOUT_S = 15.0  # for a person who waits at a command
ANSWER_TIMEOUT_S = 20.0  # longer than the replacement of a controller takes

ALONE_OVER = "no run of batch {!r} runs on this machine, and no pool is up here. To fix: see `ringmaster status`"
NO_POOL = (
    "no pool is up here. To fix: `ringmaster up` starts one on this machine; RINGMASTER_DATABASE, PREFECT_API_URL and "
    "MLFLOW_TRACKING_URI name one elsewhere"
)


@dataclass(frozen=True, kw_only=True)
class ControllerAnswer:
    """The answer of a pool's controller about one batch.

    batch: id of the batch.
    is_done: whether the controller has performed the request; if not, it will.
    message: the answer's text.
    price, jump: of a job that is added: what it costs (`JobPrice`), and how the size of a step jumps, if it does.
    """

    batch: str
    is_done: bool
    message: str
    price: Mapping[str, Any] | None = None
    jump: str = ""


def pool_address() -> settings.PoolAddress:
    """Returns the pool that this machine belongs to. Raises InputError if there is none, or if it has ended."""
    fault = settings.pool_fault()
    if fault is not None or (address := settings.checked_pool()) is None:
        raise InputError([fault or NO_POOL])
    return address


@contextmanager
def open_database(address: settings.PoolAddress) -> Iterator[Database]:
    """Opens the pool's database with a short timeout. Raises InputError if it does not answer."""
    try:
        database = Database(address.database, timeout_s=DATABASE_TIMEOUT_S)
    except DBAPIError as error:
        raise InputError([f"the pool's database does not answer: {error.orig}. To fix: see that it runs"]) from error
    with closing(database):
        yield database


def limits_in_words(database: Database) -> list[str]:
    """Returns what limits the use of a pool's nodes, in sentences.

    These are the untrusted nodes, with why the expelled ones get no work, and what features say, also of the newest
    plan.
    """
    nodes = [node for node in NodeRegistry(database).all() if not node.devices[0].is_trusted]
    reasons = {node.name: node.health.get("0") or "it gets jobs with allow_untrusted" for node in nodes}
    own = [line for feature in features_of_pool(database) for line in feature.in_words()]
    problem = limited_problem(database)
    worth = [] if problem is None else worth_in_words(problem)
    return [*(f"node {name} is untrusted: {why}" for name, why in reasons.items()), *own, *worth]


def limited_problem(database: Database) -> Problem | None:
    """Returns the problem of a pool's newest plan; None where there is none, or where no feature limits anything in it.

    The problem of a large pool takes seconds to read.
    """
    query = select(PLANS.c.content).where(PLANS.c.batch == "").order_by(PLANS.c.id.desc()).limit(1)
    newest = database.scalar(query) if Submissions(database).active() else None
    return None if newest is None or not has_limits(newest["problem"]) else Problem.from_json(newest["problem"])


@contextmanager
def database_of(batch: str) -> Iterator[Database]:
    """Opens the database of the pool or, without one, of the run of a batch that runs on this machine.

    Raises InputError if there is neither.
    """
    fault = settings.pool_fault()
    if fault is None and (address := settings.checked_pool()) is not None:
        with open_database(address) as database:
            yield database
        return
    from ringmaster.flows.batch.run_folder import is_going_on  # half a second, which a request to a pool need not wait

    runs = runs_below(settings.home() / "batches" / batch) if is_name(batch) else []
    if not runs or not is_going_on(runs[-1]):
        raise InputError([fault or (ALONE_OVER.format(batch) if runs else NO_POOL)])
    with closing(Database(file_url(runs[-1] / "journal.db"), timeout_s=DATABASE_TIMEOUT_S)) as database:
        yield database


def ask_about(
    database: Database,
    kind: str,
    *,
    batch: str,
    jobs: Sequence[str] = (),
    timeout_s: float = ANSWER_TIMEOUT_S,
    **more: Any,
) -> list[ControllerAnswer]:
    """Sends the pool's controller a request about a batch, or some of its jobs, and waits for its answers.

    kind: a `RequestKind`, or a kind of request of a feature.
    batch: an id, or a name, which means all active batches of that name.

    Raises InputError if there is no such batch or job, or if the controller refuses.
    """
    requests = Requests(database)
    numbers = {
        key: requests.ask(kind, {"batch": key, "jobs": list(own), **more})
        for key, own in meant(database, batch=batch, jobs=jobs, kind=kind).items()
    }
    is_over = timeout(timeout_s)
    result = {key: requests.wait(number, until=is_over) for key, number in numbers.items()}
    faults = [
        str(r.answer.get("message", r.status))
        for r in result.values()
        if r.status not in (RequestStatus.DONE, RequestStatus.OPEN)
    ]
    raise_faults(faults)
    late = "no controller has answered yet: it is done once one leads (`ringmaster pool controller`)"
    return [
        ControllerAnswer(
            batch=key or batch,
            is_done=request.status == RequestStatus.DONE,
            message=str(request.answer.get("message", late)),
            price=request.answer.get("price"),
            jump=str(request.answer.get("jump", "")),
        )
        for key, request in result.items()
    ]


def submit_batch(
    database: Database, batch: Batch, *, checkpoint_every_s: float | None = None, notice: Callable[[str], None]
) -> str | None:
    """Hands a batch over to the pool; returns its flow run, None where no controller has begun it yet."""
    from ringmaster.flows.batch.batch_input import batch_in_file  # imports pydantic

    database.read(check_release)
    check_terms(batch, database, notice=notice)
    requests = Requests(database)
    number = hand_over(requests, batch.to_json(), file=batch_in_file(batch), checkpoint_every_s=checkpoint_every_s)
    notice(f"batch {batch.name} (jobs: {len(batch.jobs)}) is handed over")
    run: str | None = requests.wait(number, until=timeout(ANSWER_TIMEOUT_S)).answer.get("flow_run")
    return run


def check_terms(batch: Batch, database: Database, *, notice: Callable[[str], None]) -> None:
    """Raises BatchFileError where a batch cannot be planned by its terms beside those of the pool."""
    from ringmaster.tasks.batch.placement import check_placement  # imports pydantic

    kinds = {node.name: kind_of(node.devices) for node in NodeRegistry(database).all()}
    of_pool = features_of_pool(database)
    check_placement(batch, nodes=kinds, of_pool=of_pool, notice=notice)
    others = objectives_of_pool(database) - {batch.objective}
    if line := objectives_in_words(batch.objective, others):
        notice(line)


def objectives_of_pool(database: Database) -> set[str]:
    """Returns the objectives of the batches that have not ended. Reads no batch as a whole."""
    objective = BATCHES.c.content["terms"]["objective"].as_string()
    return {*database.scalars(select(objective).where(BATCHES.c.status == BatchStatus.SUBMITTED))}


def objectives_in_words(own: str, others: Collection[str]) -> str:
    """Returns how a batch is planned beside running batches with other objectives; empty where there are none."""
    known = objective_names()
    waiting = {name for name in (own, *others) if name in known and objective_by_name(name).may_wait}
    if not others or not waiting:
        return ""
    there = f"the pool trains batches by {', '.join(sorted(others))}"
    if len(waiting) > 1:
        return f"{there}: beside this one by {own}, all are planned by their ends, and nothing waits for good hours"
    if own in waiting:
        return f"{there}: these are planned first, by their ends, and this one by {own} in what they leave"
    return f"{there}: these are planned in what this batch leaves"


def timeout(timeout_s: float) -> Callable[[], bool]:
    """Returns a function that returns whether `timeout_s` seconds have passed since now."""
    end_s = time.monotonic() + timeout_s
    return lambda: time.monotonic() >= end_s


def meant(database: Database, *, batch: str, jobs: Sequence[str], kind: str = "") -> dict[str, list[str]]:
    """Returns the active batches, by id, that `batch` names, and which of `jobs` each has; [] means all jobs.

    kind: of the request. A batch that is not measured yet can be cancelled, and nothing else.

    Raises InputError, which lists the existing names, if there is nothing of that name.
    """
    if alone := Journal(database, batch=ALONE).jobs():  # a run on this machine alone
        if unknown := [job for job in jobs if job not in alone]:
            raise InputError([f"batch {batch} has no job {', '.join(unknown)}; it has {', '.join(alone)}"])
        return {ALONE: list(jobs)}
    every = Submissions(database).names()
    active = {key: name for key, name, status in every if status == BatchStatus.SUBMITTED}
    early = unsubmitted(database)
    known = active | (early if kind == RequestKind.CANCEL else {})
    chosen = [key for key in known if key == batch] or [key for key, name in known.items() if name == batch]
    if not chosen and batch in (*early, *early.values()):
        raise InputError([f"batch {batch!r} is not measured yet. To fix: cancel it, or wait until it is planned"])
    if not chosen:
        there = ", ".join(sorted({f"{name} ({key})" for key, name in active.items()})) or "none"
        has_ended = any(batch in (key, name) for key, name, _ in every)
        what = f"batch {batch!r} has ended" if has_ended else f"there is no batch {batch!r}"
        raise InputError([f"{what}; active batches: {there}"])
    if not jobs:
        return {key: [] for key in chosen}
    if any(key in early for key in chosen):
        raise InputError([f"the jobs of batch {batch!r} are not measured yet. To fix: cancel the whole batch, or wait"])
    names = {key: list(Journal(database, batch=key).jobs()) for key in chosen}
    unknown = [job for job in jobs if not any(job in own for own in names.values())]
    if unknown:
        there = ", ".join(dict.fromkeys(job for own in names.values() for job in own))
        raise InputError([f"batch {batch} has no job {', '.join(unknown)}; it has {there}"])
    return {key: own for key in chosen if (own := [job for job in jobs if job in names[key]])}
