"""What a batch has spent and emitted, as planned and as measured, in its result and in its run in MLflow."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ringmaster.codec import from_json, to_json
from ringmaster.features.tariffs.pool_tariff import tariffs_of_pool
from ringmaster.features.tariffs.tariff_values import Measures, measures_of
from ringmaster.features.tariffs.terms import GIVEN, Spending, Tariffs
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.control.batch_terms import uses_of
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.planning.problems.series import J_PER_KWH
from ringmaster.tasks.recording.record_hooks import RecordHook
from ringmaster.tasks.storage.journal import JobRecord, Journal, SegmentRecord

KEY = "spending"
"""The key of the result of a batch: what all of its runs have spent ("measured"), the first plan since it was started
or resumed ("planned"), the bounds ("at_most"), and how power is known ("power")."""
MEASURED = "measured by NVML"


class SpendingReport(RecordHook):
    """Counts money and emissions. What was spent before an interruption counts too."""

    def batch_results(self, batch: Batch, journal: Journal, *, since_s: float) -> Mapping[str, Any]:
        """Returns the spending of a batch with tariffs, and the value of its objective where that depends on them.

        The tariffs are those of the pool or, without any, of the batch.
        """
        own = next((each for each in batch.terms.features if isinstance(each, Tariffs)), None)
        tariffs = Tariffs.combined([own], of_pool=tariffs_of_pool(journal.database))
        if tariffs is None:
            return {}
        is_removed = tariffs.is_empty
        first = next(iter(journal.plans(since_s=since_s)), None)
        problem = None if first is None else Problem.from_json(first["problem"])
        planned = None if first is None or problem is None else measures_of(Plan.from_json(first["plan"]), problem)
        tariffs = tariffs if problem is None else tariffs.with_power(problem)
        records, segments = journal.jobs(), journal.segments()
        energies = {segment.id: _energy_j(segment, records) for segment in segments}
        spent = spent_by(tariffs, segments, energies, now_s=journal.clock())
        earlier = [segment for segment in segments if segment.started_s < since_s]
        if is_removed and own is None and spent.money is None and spent.emissions_g is None:
            return {}  # the pool's tariffs were removed before the batch held any device
        before = spent_by(tariffs, earlier, energies, now_s=since_s)
        content = {
            "measured": to_json(spent),
            "planned": None if planned is None else _planned(planned, spent, before=before),
            "at_most": {"money": tariffs.max_money, "emissions_g": tariffs.max_emissions_g},
            "power": None if spent.energy_j is None else _power_source(problem, [*energies.values()]),
        }
        value = _value(batch, tariffs, [s for s in segments if s.started_s >= since_s], energies)
        return {KEY: content, **({} if value is None else {"value": value})}

    def batch_metrics(self, results: Mapping[str, Any]) -> Mapping[str, float]:
        """Returns the money, grams and joules, as measured and as planned."""
        content = results.get(KEY, {})
        return {
            f"{'planned_' if part == 'planned' else ''}{key}": value
            for part in ("measured", "planned")
            for key, value in (content.get(part) or {}).items()
            if value is not None
        }

    def batch_sentences(self, results: Mapping[str, Any]) -> Iterator[str]:
        """Yields what was spent and emitted, beside the plan."""
        if (content := results.get(KEY)) is None:
            return
        spent, planned = from_json(Spending, content["measured"]), content["planned"] or {}
        if spent.money is not None:
            yield _line("money", spent.money, planned.get("money"), content["at_most"]["money"])
        if spent.emissions_g is not None:
            at_most = content["at_most"]["emissions_g"]
            yield _line("grams of CO2e", spent.emissions_g, planned.get("emissions_g"), at_most)
        if spent.energy_j is not None:
            yield f"energy: {spent.energy_j / J_PER_KWH:.4g} kWh, {content['power']}"


def spent_by(
    tariffs: Tariffs, segments: Sequence[SegmentRecord], energies: Mapping[int, float | None], *, now_s: float
) -> Spending:
    """Returns what segments have spent until now. energies: joules by segment; None where they were not measured."""
    rows = []
    for segment in segments:
        uses = uses_of(segment, now_s=now_s)
        total = sum(use.num_devices for use in uses)
        for use in uses:
            energy_j = energies.get(segment.id)
            share_j = None if energy_j is None else energy_j * use.num_devices / total
            rows.append(tariffs.spent(use, energy_j=share_j))
    return Spending.sum_of(rows)


def _energy_j(segment: SegmentRecord, records: Mapping[str, JobRecord]) -> float | None:
    """Returns the measured energy of a segment's gang, of which each of its jobs has a share."""
    shares = [records[job].energy_j.get(str(segment.id)) for job in (segment.job, *segment.members) if job in records]
    known = [share for share in shares if share is not None]
    return sum(known) if known else None


def _planned(measures: Measures, spent: Spending, *, before: Spending) -> dict[str, float | None]:
    """Returns what was planned of what is known: what was spent before, and the plan of the rest."""
    return {
        "money": None if spent.money is None else measures.cost + (before.money or 0.0),
        "emissions_g": None if spent.emissions_g is None else measures.emissions_g + (before.emissions_g or 0.0),
    }


def _power_source(problem: Problem | None, energies: Sequence[float | None]) -> str:
    """Returns how energy is known. energies: by segment, where it was measured."""
    if all(energy_j is not None for energy_j in energies):
        return MEASURED
    nodes = () if problem is None else problem.nodes
    others = ", ".join(dict.fromkeys(node.power_source or GIVEN for node in nodes)) or GIVEN
    return f"partly {MEASURED}, else {others}" if any(energy_j is not None for energy_j in energies) else others


def _value(
    batch: Batch, tariffs: Tariffs, segments: Sequence[SegmentRecord], energies: Mapping[int, float | None]
) -> float | None:
    """Returns the actual value of the batch's objective since it was started or resumed, where it has tariffs."""
    ends_s = [segment.ended_s for segment in segments if segment.ended_s is not None]
    if not ends_s:
        return None
    spent = spent_by(tariffs, segments, energies, now_s=max(ends_s))
    if batch.objective == "cost":
        return spent.money
    if batch.objective == "emissions":
        return spent.emissions_g
    if batch.objective == "trade-off":
        end_s = max(ends_s) - min(segment.started_s for segment in segments)
        of = {"end": end_s, "cost": spent.money or 0.0, "emissions": spent.emissions_g or 0.0}
        return sum(factor * of[name] for name, factor in tariffs.factors.items())
    return None


def _line(what: str, spent: float, planned: float | None, at_most: float | None) -> str:
    text = f"{what}: {spent:.4g}"
    text += "" if planned is None else f", planned {planned:.4g}"
    return text if at_most is None else f"{text}, at most {at_most:.4g}"


RECORD_HOOKS = (SpendingReport(),)
