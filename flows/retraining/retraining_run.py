"""A retraining run: opened under its date, locked by one process, and saved step by step."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from ringmaster.errors import InputError, RetrainingInProgress, input_errors
from ringmaster.flows import settings
from ringmaster.flows.batch.context import NodeContext, open_node_context
from ringmaster.flows.batch.flow_runs import current_flow_run
from ringmaster.flows.caller import Caller
from ringmaster.flows.retraining.examine import open_move_log
from ringmaster.model_lineage import Ledger, ModelRecord
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.profiling.preflight_runs import preflight_jobs
from ringmaster.tasks.profiling.trials import DevicesWanted
from ringmaster.tasks.retraining.production import Production, with_tagged
from ringmaster.tasks.retraining.promotion import MoveLog, ServingVersions, standings
from ringmaster.tasks.retraining.report import FAILED
from ringmaster.tasks.retraining.runs import RetrainingRuns, RetrainingStatus, RunRecord
from ringmaster.tasks.retraining.selection import Clock, day_text
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.techniques import Job
from ringmaster.techniques.preflight_result import Preflight

TAG = "ringmaster.retraining"
"""The tag of a registered model that specifies how it is retrained."""


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
    def caller(self) -> Caller:
        """The caller of its batches, which use its fork server too."""
        return replace(self.node_context.caller, fork_server=self.node_context.server)

    @property
    def deadline_s(self) -> float | None:
        """The deadline of the run, in seconds since the epoch; None if it has none."""
        return self.production.entry.night.deadline_of(self.date)

    @property
    def left_s(self) -> float | None:
        """The seconds until the deadline; None if it has none."""
        return None if self.deadline_s is None else self.deadline_s - self.caller.clock()

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return self.left_s is not None and self.left_s <= 0

    def preflight(
        self, jobs: Sequence[Job], *, evaluated: Sequence[str]
    ) -> tuple[Mapping[str, Preflight], Mapping[str, str]]:
        """Returns preflights and faults by job name. evaluated: the jobs whose data is only evaluated on."""
        context, notice = self.node_context, self.caller.view.notice
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
    production: Production, *, run_date: str | None, force: Sequence[str], caller: Caller
) -> Iterator[RetrainingRun | RunRecord]:
    """Opens a retraining run, its slow resources in parallel; yields the record of one that does no work.

    If the run is over already, a further round trains the models that failed, or those of `force`.

    run_date: date of the run; by default that of now, or of the schedule that started this flow run.
    force: models that are trained in any case.
    caller: the caller of the flow, which may have started servers ahead.

    Raises InputError if another process holds such a run, or the date or a model's name is invalid.
    """
    key = _date(production, run_date, clock=caller.clock)
    with ExitStack() as stack:
        runs = stack.enter_context(_open_runs(caller.clock))
        _check_file(runs, production)
        if (answered := _answered(runs, production, key, is_forced=bool(force))) is not None:
            yield answered
            return
        with input_errors(RetrainingInProgress):
            stack.enter_context(runs.held(production.name, key))
        # The process that held the run until now may have finished it meanwhile.
        if (answered := _answered(runs, production, key, is_forced=bool(force))) is not None:
            yield answered
            return
        _check_file(runs, production)
        source = {"file": str(production.file), "file_digest": production.digest}
        every_job = Batch(
            name=production.name,
            jobs=tuple(production.jobs),
            devices=production.devices,
            folder=production.folder,
            text="",
        )
        node_context = stack.enter_context(open_node_context(every_job, home=settings.home(), caller=caller))
        if production.entry.registry:
            production = with_tagged(production, node_context.ledger.tagged(TAG))
        rounds = runs.rounds(production.name, key)
        is_resumed = bool(rounds) and not rounds[-1].is_over
        if is_resumed and not force:
            force = rounds[-1].content.get("forced", [])
        names = _names_of_round(production, rounds, force)
        production = _of_this_round(production, names)
        for fault in production.broken.values():
            caller.view.notice(fault)
        new = f"{key}.{len(rounds) + 1:02d}" if rounds else key
        record = runs.begin(production.name, rounds[-1].run_date if is_resumed else new)
        if names is not None:
            caller.view.notice(f"run again, as {record.run_date}: {', '.join(sorted(names))}")
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
            content={
                **record.content,
                **source,
                "forced": sorted(force),
                "names": None if names is None else sorted(names),
            },
        )


@contextmanager
def _open_runs(clock: Clock) -> Iterator[RetrainingRuns]:
    """Yields the store of all retraining runs: that of the pool, or of this home."""
    address = settings.checked_pool()
    with closing(Database(address.database if address else file_url(settings.home() / "nights.db"))) as database:
        yield RetrainingRuns(database, clock=clock)


def forget_run(production: Production, run_date: str) -> None:
    """Forgets the run of a date, such as one that was begun while the clock was wrong. Its models stay as they are.

    Raises InputError if there is no such run, or if another process holds a run of these models.
    """
    with _open_runs(time.time) as runs, input_errors(RetrainingInProgress), runs.held(production.name, run_date):
        if not runs.rounds(production.name, run_date):
            dates = ", ".join(dict.fromkeys(record.run_date[:10] for record in runs.every(production.name)[-5:]))
            there = f"name one of them; the last are {dates}" if dates else "leave out --forget: there is none yet"
            raise InputError([f"{production.name} has no retraining run {run_date}. To fix: {there}"])
        runs.forget(production.name, run_date)


def _check_file(runs: RetrainingRuns, production: Production) -> None:
    """Raises InputError if the runs of this name are of another file, whose models are other ones.

    A file that was changed or moved, and a copy with the same models and data, is still the same.
    """
    for record in reversed(runs.every(production.name)):
        if (other := record.content.get("file")) is not None:  # earlier releases did not store it
            is_same = other == str(production.file) or record.content["file_digest"] == production.digest
            if not is_same and Path(other).is_file() and not production.file.samefile(other):
                what = f"name: the runs of {production.name!r} are of {other}, a file with other models or data"
                raise InputError([f"{what}. To fix: give {production.file} another name, or remove the other file"])
            return


def _answered(runs: RetrainingRuns, production: Production, key: str, *, is_forced: bool) -> RunRecord | None:
    """Returns the record of a run that does no work: it is over, a later one was begun, or it is late; else None."""
    name, night, now_s = production.name, production.entry.night, runs.clock()
    rounds = runs.rounds(name, key)
    is_begun = bool(rounds) and not rounds[-1].is_over  # what it has trained is still to be compared
    if rounds and not (is_begun or is_forced or _left_of(rounds, production)):
        return rounds[-1]
    if (later := runs.after(name, f"{key}.99")) is not None:
        is_ahead = later.run_date[:10] > night.next_date(now_s)
        status = RetrainingStatus.AHEAD if is_ahead else RetrainingStatus.SKIPPED
        return RunRecord(name=name, run_date=key, status=status, content={"later": later.run_date, "now_s": now_s})
    deadline_s = night.deadline_of(key)
    if deadline_s is not None and deadline_s <= now_s and not is_begun and not _is_scheduled():
        content = {"deadline_s": deadline_s, "next": night.next_in_time(now_s)}
        return RunRecord(name=name, run_date=key, status=RetrainingStatus.LATE, content=content)
    return None


def _is_scheduled() -> bool:
    """Whether a schedule has started this flow run. A late one leaves its models for the next run, and reports it."""
    run = current_flow_run()
    return run is not None and run.auto_scheduled is True


def _date(production: Production, given: str | None, *, clock: Clock) -> str:
    """Returns the date of the run: the given one, else that of the schedule which started this flow run, else now's."""
    if given is not None:
        try:
            run_date = date.fromisoformat(given).isoformat()
        except ValueError:
            raise InputError([f"{given!r} is not a date of a run. To fix: give its date, such as 2026-11-20"]) from None
        now_s = clock()
        if run_date > (last := production.entry.night.next_date(now_s)):
            raise InputError(
                [
                    f"the run {run_date} is later than the next one, {last}, by this machine's clock "
                    f"({day_text(now_s)} UTC). To fix: give {last} at most, or set the clock"
                ]
            )
        return run_date
    run = current_flow_run()
    if run is not None and run.auto_scheduled and run.expected_start_time is not None:
        # A run that starts late still has its scheduled date.
        return production.entry.night.run_date_of(run.expected_start_time.timestamp())
    return production.entry.night.run_date_of(clock())


def _left_of(rounds: Sequence[RunRecord], production: Production) -> set[str]:
    """Returns the models that a repetition of a date trains: if models failed, these and those without a result."""
    results = [model for record in rounds for model in record.content.get("answer", {}).get("models", ())]
    outcomes = {model["model"]: model["outcome"] for model in results}
    failed = {name for name, outcome in outcomes.items() if outcome == FAILED}
    names = {model.name for model in production.models} | production.broken.keys()
    if production.entry.registry:
        names |= failed  # the tags in the registry are not read yet
    return {name for name in names if outcomes.get(name, FAILED) == FAILED} if failed else set()


def _names_of_round(
    production: Production, rounds: Sequence[RunRecord], force: Sequence[str]
) -> Collection[str] | None:
    """Returns the models of the round that is begun or resumed; None for all. Raises InputError if `force` is wrong."""
    names = [*(model.name for model in production.models), *production.broken]
    if unknown := sorted(set(force) - set(names)):
        raise InputError(
            [f"there is no model {name!r} to force. To fix: use one of {', '.join(names)}" for name in unknown]
        )
    if rounds and rounds[-1].is_over:
        return force or _left_of(rounds, production)
    # Earlier releases had further rounds of forced models only, and did not store their names.
    return rounds[-1].content.get("names", force) if len(rounds) > 1 else None


def _of_this_round(production: Production, names: Collection[str] | None) -> Production:
    """Returns all models, or some of them."""
    if names is None:
        return production
    broken = {name: fault for name, fault in production.broken.items() if name in names}
    return replace(production, models=tuple(m for m in production.models if m.name in names), broken=broken)
