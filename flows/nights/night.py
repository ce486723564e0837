"""A night of retraining: opened under its date, held by one process, and saved step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from prefect.context import FlowRunContext

from ringmaster.flows import settings
from ringmaster.flows.faults import InputError
from ringmaster.flows.promotions import open_move_log
from ringmaster.flows.workshop import Bench, lent_server, open_bench
from ringmaster.model_lineage import Ledger, ModelRecord
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.pool.database import Database, file_url
from ringmaster.tasks.profiling.lending import DevicesWanted
from ringmaster.tasks.promotion.moves import MoveLog
from ringmaster.tasks.promotion.stage import Standing, standings
from ringmaster.tasks.retraining.dates import Clock
from ringmaster.tasks.retraining.nights import SKIPPED, NightHeld, NightRecord, Nights
from ringmaster.tasks.retraining.production import Production, with_tagged

LEASE_RETRY_S = 1.0
TAG = "ringmaster.retraining"
"""The tag of a registered model that says how it is retrained."""

# The clock by which nights are told apart; no parameter of a flow, since only tests and demonstrations have another.
current_clock: ContextVar[Clock] = ContextVar("current_clock", default=time.time)


@dataclass(frozen=True, kw_only=True)
class Night:
    """The open resources of one night.

    record: as it was found when the night was opened. forced: the models that are asked for by name. last: the night
    before, None where there is none. content: what is known of this one, by step; `step` and `save` keep it.
    """

    production: Production
    record: NightRecord
    last: NightRecord | None
    forced: tuple[str, ...]
    bench: Bench
    nights: Nights
    moves: MoveLog
    folder: Path
    content: dict[str, Any] = field(default_factory=dict)

    @property
    def date(self) -> str:
        """The date of the night, without the number of a further round."""
        return self.record.night[:10]

    @property
    def ledger(self) -> Ledger:
        """Where all is recorded."""
        return self.bench.ledger

    @property
    def deadline_s(self) -> float | None:
        """When it has to be over, in seconds since the epoch."""
        return self.production.hours.deadline_of(self.date)

    def step(self, name: str, make: Callable[[], Any]) -> Any:
        """What a step has found out, as plain values: from an earlier process of this night, else made and saved."""
        if name not in self.content:
            self.save(**{name: make()})
        return self.content[name]

    def save(self, *, status: str | None = None, **content: Any) -> None:
        """Keeps what is known of the night."""
        self.content.update(content)
        self.nights.save(replace(self.record, status=status or self.record.status, content=self.content))

    def left_by_earlier(self, key: str) -> Mapping[str, Any]:
        """What the last night left under `key` that came to its end; nothing where there is none."""
        for record in reversed(self.nights.every(self.production.name)):
            if record.night < self.record.night and key in record.content:
                found: Mapping[str, Any] = record.content[key]
                return found
        return {}

    def standings(self) -> dict[str, Standing]:
        """Where its models stand in the registry now, by their registered names."""
        return standings(self.ledger, [model.registered_name for model in self.production.models])

    def download(self, model: ModelRecord) -> Path:
        """The folder of a model's files."""
        return self.ledger.download_model(f"models:/{model.model_id}", settings.home() / "cache" / "models")

    @contextmanager
    def device(self) -> Iterator[Device]:
        """A device that nobody else uses meanwhile; waits for one. On a node of a pool a gang makes room for it."""
        with self.bench.lend(DevicesWanted(least=1, most=1, presses=True)) as (device,):
            yield device


@contextmanager
def open_night(production: Production, *, night: str | None, force: Sequence[str]) -> Iterator[Night | NightRecord]:
    """Opens a night's work, the slow things at the same time; a night that is over, or passed over, is its record.

    night: its date; that of now, or of when the run was scheduled, where it is left out. force: models that are trained
    in any case; where the night is over already, in a further round of it, for these alone.

    Raises InputError where another process works on such a night, or the date or a model's name is none.
    """
    key = _date(production, night)
    with ExitStack() as stack:
        address = settings.pool()
        database = Database(address.database if address else file_url(settings.home() / "nights.db"))
        stack.callback(database.close)
        nights = Nights(database, clock=current_clock.get())
        if (answered := _answered(nights, production.name, key, is_forced=bool(force))) is not None:
            yield answered
            return
        try:
            stack.enter_context(nights.held(production.name, key))
        except NightHeld as error:
            raise InputError([str(error)]) from error
        # Whoever held it until now may have come to its end meanwhile.
        if (answered := _answered(nights, production.name, key, is_forced=bool(force))) is not None:
            yield answered
            return
        known = nights.find(production.name, key)
        bench = stack.enter_context(_open_bench(production))
        if production.with_registry:
            production = with_tagged(production, bench.ledger.tagged(TAG))
        production = _of_this_round(production, force, is_over=known is not None and known.is_over)
        record = nights.begin(production.name, _round(nights, production.name, key) if force else key)
        if "looked" in record.content and sorted(force) != record.content.get("forced", []):
            remedy = f"run it without --force first, with `--night {key}`"
            raise InputError([f"the night {record.night} was cut short, and has begun without that. To fix: {remedy}"])
        moves = stack.enter_context(open_move_log())
        moves.finish_left_behind(bench.ledger)
        yield Night(
            production=production,
            record=record,
            last=nights.before(production.name, record.night),
            forced=tuple(force),
            bench=bench,
            nights=nights,
            moves=moves,
            folder=settings.home() / "retraining" / production.name,
            content={**record.content, "forced": sorted(force)},
        )


def _answered(nights: Nights, name: str, key: str, *, is_forced: bool) -> NightRecord | None:
    """The record of a night in which nothing is left to do: it is over, or a later one was begun; None of others."""
    known = nights.find(name, key)
    if known is not None and known.is_over and not is_forced:
        return known
    if (later := nights.after(name, f"{key}.99")) is not None:
        return NightRecord(name=name, night=key, status=SKIPPED, content={"later": later.night})
    return None


def _date(production: Production, said: str | None) -> str:
    """The night that is meant: the one that is named, else that of the schedule which started this run, else now's."""
    if said is not None:
        try:
            return date.fromisoformat(said).isoformat()
        except ValueError:
            raise InputError([f"{said!r} is no night. To fix: give its date, such as 2026-11-20"]) from None
    context = FlowRunContext.get()
    run = None if context is None else context.flow_run
    if run is not None and run.auto_scheduled and run.expected_start_time is not None:
        return production.hours.night_of(run.expected_start_time.timestamp())  # a late run is not the next night's
    return production.hours.night_of(current_clock.get()())


def _round(nights: Nights, name: str, key: str) -> str:
    """The night itself while it is not over, else the round of it that is not, or a new one."""
    number, tried = 1, key
    while (known := nights.find(name, tried)) is not None and known.is_over:
        number += 1
        tried = f"{key}.{number:02d}"
    return tried


def _of_this_round(production: Production, force: Sequence[str], *, is_over: bool) -> Production:
    """All models or, where the night is over already, those that are asked for."""
    names = [model.name for model in production.models]
    if unknown := sorted(set(force) - set(names)):
        raise InputError(
            [f"there is no model {name!r} to force. To fix: use one of {', '.join(names)}" for name in unknown]
        )
    if not is_over:
        return production
    return replace(production, models=tuple(m for m in production.models if m.name in force), broken={})


@contextmanager
def _open_bench(production: Production) -> Iterator[Bench]:
    """The bench of a night, whose batch uses its fork server, too."""
    every_job = Batch(
        name=production.name,
        jobs=tuple(production.jobs),
        devices=production.devices,
        folder=production.folder,
        text="",
    )
    with open_bench(every_job, home=settings.home()) as bench:
        token = lent_server.set(bench.server)
        try:
            yield bench
        finally:
            lent_server.reset(token)
