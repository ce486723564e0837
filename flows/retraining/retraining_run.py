"""A retraining run: opened under its date, locked by one process, and saved step by step."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from ringmaster.errors import InputError, RetrainingInProgress, input_errors
from ringmaster.flows import settings
from ringmaster.flows.batch.context import LentServer, NodeContext, lent_server, open_node_context
from ringmaster.flows.batch.flow_runs import current_flow_run
from ringmaster.flows.reports.progress import current_view
from ringmaster.flows.retraining.examine import open_move_log
from ringmaster.model_lineage import Ledger, ModelRecord
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.profiling.preflight import preflight_jobs
from ringmaster.tasks.profiling.trials import DevicesWanted
from ringmaster.tasks.retraining.production import Production, with_tagged
from ringmaster.tasks.retraining.promotion import MoveLog, ServingVersions, standings
from ringmaster.tasks.retraining.runs import RetrainingRuns, RetrainingStatus, RunRecord
from ringmaster.tasks.retraining.selection import Clock
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.techniques import Job
from ringmaster.techniques.preflight import Preflight

TAG = "ringmaster.retraining"
"""The tag of a registered model that specifies how it is retrained."""

# The clock that determines the date of a run. Only tests and demonstrations replace it, so no flow has it as parameter.
current_clock: ContextVar[Clock] = ContextVar("current_clock", default=time.time)


@dataclass(frozen=True, kw_only=True)
class RetrainingRun:
    """The open resources of one retraining run.

    production: the models and their rules.
    record: the run as it was found when it was opened.
    last: the run before; None if there is none.
    forced: the models that were requested by name.
    node_context: the node context.
    runs: the store of all retraining runs.
    moves: the log of alias moves.
    folder: the folder of the runs' files.
    content: what is known of this run, by step; `step` and `save` store it.
    """

    production: Production
    record: RunRecord
    last: RunRecord | None
    forced: tuple[str, ...]
    node_context: NodeContext
    runs: RetrainingRuns
    moves: MoveLog
    folder: Path
    content: dict[str, Any] = field(default_factory=dict)

    @property
    def date(self) -> str:
        """The date of the run, without the number of a further round."""
        return self.record.run_date[:10]

    @property
    def ledger(self) -> Ledger:
        """The MLflow records."""
        return self.node_context.ledger

    @property
    def deadline_s(self) -> float | None:
        """The deadline of the run, in seconds since the epoch; None if it has none."""
        return self.production.entry.night.deadline_of(self.date)

    @property
    def left_s(self) -> float | None:
        """The seconds until the deadline; None if it has none."""
        return None if self.deadline_s is None else self.deadline_s - current_clock.get()()

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return self.left_s is not None and self.left_s <= 0

    def preflight(
        self, jobs: Sequence[Job], *, evaluated: Sequence[str]
    ) -> tuple[Mapping[str, Preflight], Mapping[str, str]]:
        """Returns preflights and faults by job name. evaluated: the jobs whose data is only evaluated on."""
        context, notice = self.node_context, current_view.get().notice
        if not jobs:
            return {}, {}
        return preflight_jobs(
            jobs, environment=context.environment, cluster=context.cluster, notice=notice, evaluated=evaluated
        )

    def step(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns a step's result as plain values: from an earlier process of this run, else made and saved."""
        if name not in self.content:
            self.save(**{name: make()})
        return self.content[name]

    def save(self, *, status: str | None = None, **content: Any) -> None:
        """Stores what is known of the run."""
        self.content.update(content)
        self.runs.save(replace(self.record, status=status or self.record.status, content=self.content))

    def left_by_earlier(self, key: str) -> Mapping[str, Any]:
        """Returns what the last run with an entry under `key` stored there; empty if there is none."""
        for record in reversed(self.runs.every(self.production.name)):
            if record.run_date < self.record.run_date and key in record.content:
                result: Mapping[str, Any] = record.content[key]
                return result
        return {}

    def standings(self) -> dict[str, ServingVersions]:
        """Returns the current versions of its models in the registry, by registered name."""
        return standings(self.ledger, [model.registered_name for model in self.production.models])

    def download(self, model: ModelRecord) -> Path:
        """Returns the folder of a model's files."""
        return self.ledger.download_model(f"models:/{model.model_id}", settings.home() / "cache" / "models")

    @contextmanager
    def device(self) -> Iterator[Device]:
        """Yields a leased device; waits for one. On a node of a pool, a gang may have to stop for it."""
        with self.node_context.lend(DevicesWanted(least=1, most=1, presses=True)) as (device,):
            yield device


@contextmanager
def open_run(
    production: Production, *, run_date: str | None, force: Sequence[str]
) -> Iterator[RetrainingRun | RunRecord]:
    """Opens a retraining run, its slow resources in parallel; yields the record of one that is over, skipped or late.

    run_date: date of the run; by default that of now, or of the schedule that started this flow run.
    force: models that are trained in any case; if the run is over already, in a further round for these alone.

    Raises InputError if another process holds such a run, or the date or a model's name is invalid.
    """
    key = _date(production, run_date)
    with ExitStack() as stack:
        address = settings.pool()
        database = Database(address.database if address else file_url(settings.home() / "nights.db"))
        stack.callback(database.close)
        runs = RetrainingRuns(database, clock=current_clock.get())
        if (answered := _answered(runs, production, key, is_forced=bool(force))) is not None:
            yield answered
            return
        with input_errors(RetrainingInProgress):
            stack.enter_context(runs.held(production.name, key))
        # The process that held the run until now may have finished it meanwhile.
        if (answered := _answered(runs, production, key, is_forced=bool(force))) is not None:
            yield answered
            return
        known = runs.find(production.name, key)
        every_job = Batch(
            name=production.name,
            jobs=tuple(production.jobs),
            devices=production.devices,
            folder=production.folder,
            text="",
        )
        node_context = stack.enter_context(open_node_context(every_job, home=settings.home()))
        # The run's batch uses its fork server, too.
        stack.callback(lent_server.reset, lent_server.set(LentServer(server=node_context.server)))
        if production.entry.registry:
            production = with_tagged(production, node_context.ledger.tagged(TAG))
        production = _of_this_round(production, force, is_over=known is not None and known.is_over)
        for fault in production.broken.values():
            current_view.get().notice(fault)
        record = runs.begin(production.name, _round(runs, production.name, key) if force else key)
        if "looked" in record.content and sorted(force) != record.content.get("forced", []):
            remedy = f"run it without --force first, with `--night {key}`"
            raise InputError(
                [f"the retraining run {record.run_date} was interrupted, and has begun without that. To fix: {remedy}"]
            )
        moves = stack.enter_context(open_move_log())
        moves.finish_left_behind(node_context.ledger)
        yield RetrainingRun(
            production=production,
            record=record,
            last=runs.before(production.name, record.run_date),
            forced=tuple(force),
            node_context=node_context,
            runs=runs,
            moves=moves,
            folder=settings.home() / "retraining" / production.name,
            content={**record.content, "forced": sorted(force)},
        )


def _answered(runs: RetrainingRuns, production: Production, key: str, *, is_forced: bool) -> RunRecord | None:
    """Returns the record of a run that does no work: it is over, a later one was begun, or it is late; else None."""
    name = production.name
    known = runs.find(name, key)
    if known is not None and known.is_over and not is_forced:
        return known
    if (later := runs.after(name, f"{key}.99")) is not None:
        return RunRecord(name=name, run_date=key, status=RetrainingStatus.SKIPPED, content={"later": later.run_date})
    deadline_s, now_s = production.entry.night.deadline_of(key), current_clock.get()()
    is_begun = known is not None and not known.is_over  # what it has trained is still to be compared
    if deadline_s is not None and deadline_s <= now_s and not is_begun and not _is_scheduled():
        content = {"deadline_s": deadline_s, "next": production.entry.night.next_in_time(now_s)}
        return RunRecord(name=name, run_date=key, status=RetrainingStatus.LATE, content=content)
    return None


def _is_scheduled() -> bool:
    """Whether a schedule has started this flow run. A late one leaves its models for the next run, and says so."""
    run = current_flow_run()
    return run is not None and run.auto_scheduled is True


def _date(production: Production, given: str | None) -> str:
    """Returns the date of the run: the given one, else that of the schedule which started this flow run, else now's."""
    if given is not None:
        try:
            return date.fromisoformat(given).isoformat()
        except ValueError:
            raise InputError([f"{given!r} is no date of a run. To fix: give its date, such as 2026-11-20"]) from None
    run = current_flow_run()
    if run is not None and run.auto_scheduled and run.expected_start_time is not None:
        # A run that starts late still has its scheduled date.
        return production.entry.night.run_date_of(run.expected_start_time.timestamp())
    return production.entry.night.run_date_of(current_clock.get()())


def _round(runs: RetrainingRuns, name: str, key: str) -> str:
    """Returns the key of the run itself while it is not over, else of its unfinished round, or of a new one."""
    number, tried = 1, key
    while (known := runs.find(name, tried)) is not None and known.is_over:
        number += 1
        tried = f"{key}.{number:02d}"
    return tried


def _of_this_round(production: Production, force: Sequence[str], *, is_over: bool) -> Production:
    """Returns all models or, if the run is over already, the requested ones."""
    names = [model.name for model in production.models]
    if unknown := sorted(set(force) - set(names)):
        raise InputError(
            [f"there is no model {name!r} to force. To fix: use one of {', '.join(names)}" for name in unknown]
        )
    if not is_over:
        return production
    return replace(production, models=tuple(m for m in production.models if m.name in force), broken={})
