"""The reader of run timelines from the database of a batch or a pool. It reads each plan only once."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from ringmaster.tasks.execution.dispatch import device_of
from ringmaster.tasks.execution.execution_events import PredictedEnd
from ringmaster.tasks.execution.job_progress import JobFigures, JobProgress, is_about
from ringmaster.tasks.planning import Plan, Problem
from ringmaster.tasks.planning.durations import seconds_text
from ringmaster.tasks.planning.series_bands import (
    SeriesBand,
    SeriesOfNodes,
    bands_until,
    joined,
    series_bands,
    series_of,
)
from ringmaster.tasks.pool.nodes import NodeRegistry
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.fact_keys import STATUS
from ringmaster.tasks.storage.journal import ENDED, JobRecord, JobStatus, SegmentRecord
from ringmaster.tasks.timeline.queries import Archive, FollowedPlan, PlanHeader, as_span, planned_end_s, to_come
from ringmaster.tasks.timeline.run_timeline import (
    AT_FIRST,
    NOW_RUNNING,
    JobLine,
    NodeLine,
    RunTimeline,
    TimelineNote,
    TimelineSpan,
)
from ringmaster.techniques.processes.gang_events import EvaluationReported, JobEvent, JobReady, PhaseStarted, Steps
from ringmaster.techniques.profiles import UNTRUSTED
from ringmaster.techniques.training.fused.group_requirements import AT_ONCE, num_steps_of_gang

MAX_PLANS = 20  # to read at a time for the first plans of jobs that were added later
MAX_STANDING = 5  # newest plans to read for the segments to come
MAX_NOTES = 200
MAX_EVENTS = 2000  # newest events to read at the first look
INTERRUPTED = "interrupted"
PACE_EVENTS = (JobReady, Steps, EvaluationReported, PhaseStarted)  # the events that report progress


class TimelineReader:
    """Reads a batch that runs alone, or a whole pool, whose jobs are named "BATCH/JOB".

    name: the timeline's name.
    archive: what the timeline is read from.
    clock: seconds since the epoch, as in the database; None for the clock that is recorded there.
    """

    def __init__(
        self, database: Database, *, name: str, is_pool: bool = False, clock: Callable[[], float] | None = None
    ) -> None:
        self.archive = Archive(database, is_pool=is_pool, clock=clock)
        self._name = name
        self._plans: dict[int, tuple[Plan, Problem]] = {}  # the plans that jobs follow
        self._first: dict[
            str, tuple[float, list[TimelineSpan]]
        ] = {}  # by job: when it was planned, and its spans from then on
        self._looked: set[int] = set()  # the plans read for `_first`
        self._series: dict[int, SeriesOfNodes] = {}  # of the first and the newest plan
        self._began = 0
        self._makespans_s: dict[int, float] = {}
        self._nodes: dict[str, int] = {}
        self._paces: dict[int, JobProgress] = {}
        self._member_progress: dict[
            tuple[int, str], JobProgress
        ] = {}  # of members, by segment and name within the batch
        self._heard = 0

    def read(self, batch: str | None = None) -> RunTimeline:
        """Returns the current timeline, of all jobs or of one batch of a pool."""
        whole = self._read(batch)
        return whole if batch is None else whole.only(batch)

    def _read(self, batch: str | None) -> RunTimeline:
        archive = self.archive
        since_s, batches = archive.window(batch) if archive.is_pool else (0.0, ("",))
        heads = archive.heads(since_s=since_s)
        if not archive.is_pool:  # since it was last resumed
            heads = heads[max((i for i, head in enumerate(heads) if head.why == "resumed"), default=0) :]
        zero_s = since_s or (heads[0].made_s if heads else archive.clock())
        records = archive.journal.jobs(batches=batches)
        changed = {name: steps for name, each in records.items() if (steps := each.changed_steps) is not None}
        totals = archive.totals(batches) | changed
        segments = _without_orphans(archive.segments(batches, since_s=zero_s), since_s=since_s or zero_s)
        # Another process has recorded them, after which the clock may have been set back.
        recorded_s = (*(head.made_s for head in heads), *(each.ended_s or each.started_s for each in segments))
        now_s = max(archive.clock(), zero_s, *recorded_s) - zero_s
        ran = {record.job for record in segments}
        planned = {
            name
            for name, r in records.items()
            if r.status not in (JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.STOPPED) or name in ran
        }
        first = self._planned_first(heads, planned, zero_s)
        followed = self._followed_plans(heads, records, zero_s)
        self._listen({record.id: record.job for record in segments if record.ended_s is None})
        past = [_span(record, zero_s) for record in segments if record.ended_s is not None]
        running = [
            self._running(record, zero_s, now_s, followed, records, totals)
            for record in segments
            if record.ended_s is None
        ]
        status = None if archive.is_pool else archive.journal.get(STATUS)
        is_over = _all_ended(records) or (status in (INTERRUPTED, JobStatus.DONE, JobStatus.FAILED) and not running)
        coming = [] if is_over else to_come(followed, past=past, running=running, now_s=now_s)
        ends = {} if is_over else self._predicted(records, batches, zero_s, now_s)
        nodes = NodeRegistry(archive.database).all() if archive.is_pool else ()
        run_timeline = RunTimeline(
            name=self._name,
            zero_s=zero_s,
            now_s=now_s,
            first=tuple(first),
            past=tuple(past),
            running=tuple(running),
            coming=tuple(coming),
            jobs=tuple(self._lines(records, (past, running, coming), segments, totals, ends)),
            notes=tuple(self._notes(heads, past, zero_s)),
            nodes=tuple(
                NodeLine(
                    name=n.name,
                    num_devices=len(n.devices),
                    status=n.status if n.devices[0].is_trusted else f"{n.status}{UNTRUSTED}",
                    health=tuple(sorted(n.health.items())),
                )
                for n in nodes
            ),
            is_over=is_over,
            predicted={batch: ends[batch, None] for batch in batches if (batch, None) in ends},
        )
        bands = self._bands(heads, zero_s, end_s=run_timeline.width_s)
        return replace(_with_rows(run_timeline, self._nodes), bands=bands)

    # -- plans --------------------------------------------------------------------------------------------------------

    def _planned_first(self, heads: Sequence[PlanHeader], jobs: set[str], zero_s: float) -> list[TimelineSpan]:
        """Returns the first planned segments of each of the jobs. Stores these segments, not the plans."""
        if heads and not self.archive.is_pool and heads[0].id != self._began:
            self._first, self._looked, self._began = {}, set(), heads[0].id
        for head in [head for head in heads if head.id not in self._looked][:MAX_PLANS]:
            missing = jobs - set(self._first)
            if not missing:
                break
            plan, problem = self._load(head.id)
            self._looked.add(head.id)
            new: dict[str, list[TimelineSpan]] = {}
            for segment in plan.segments:
                if segment.job in missing:
                    new.setdefault(segment.job, []).append(as_span(segment, problem, from_s=0.0, status=AT_FIRST))
            self._first |= {job: (head.made_s, result) for job, result in new.items()}
        return [
            replace(span, start_s=made_s - zero_s + span.start_s, end_s=made_s - zero_s + span.end_s)
            for job, (made_s, spans) in self._first.items()
            if job in jobs
            for span in spans
        ]

    def _followed_plans(
        self, heads: Sequence[PlanHeader], records: Mapping[str, JobRecord], zero_s: float
    ) -> dict[str, FollowedPlan]:
        """Returns the plan that each job follows: the newest that contains it, as a new plan may omit running jobs."""
        missing = {name for name, record in records.items() if record.status not in (*ENDED, JobStatus.PAUSED)}
        followed: dict[str, FollowedPlan] = {}
        kept = {}
        for head in reversed(heads[-MAX_STANDING:]):
            if not missing:
                break
            plan, problem = kept[head.id] = self._plans.get(head.id) or self._load(head.id)
            result = FollowedPlan(plan=plan, problem=problem, made_s=head.made_s - zero_s)
            followed |= dict.fromkeys({segment.job for segment in plan.segments} & missing, result)
            missing -= set(followed)
        self._plans = kept
        return followed

    def _bands(self, heads: Sequence[PlanHeader], zero_s: float, *, end_s: float) -> tuple[SeriesBand, ...]:
        """Returns the series of the first plan, and from the newest plan on those of that."""
        ends = [*heads[:1], *heads[-1:]]
        known, self._series = self._series, {}
        for head in ends:
            if head.id in known:
                self._series[head.id] = known[head.id]
            else:
                _, problem = self._plans.get(head.id) or self._load(head.id)
                self._series[head.id] = series_of(problem)
        result: SeriesOfNodes = {}
        for head in ends:
            result = joined(result, self._series[head.id], at_s=head.made_s - zero_s)
        return bands_until(series_bands(result), end_s)

    def _load(self, number: int) -> tuple[Plan, Problem]:
        plan, problem = self.archive.plan(number)
        self._makespans_s[number] = plan.makespan_s
        self._nodes |= {node.id: max(node.num_devices, self._nodes.get(node.id, 0)) for node in problem.nodes}
        return plan, problem

    # -- running segments ---------------------------------------------------------------------------------------------

    def _listen(self, running: Mapping[int, str]) -> None:
        """Reads the events that running gangs have sent to the pool since the last call.

        running: the job of each segment.
        """
        self._heard, events = self.archive.gang_events(set(running), after=self._heard, most=MAX_EVENTS)
        for number, event in events:
            if not isinstance(event, PACE_EVENTS):
                continue
            if is_about(event, running.get(number, "")):
                self._paces.setdefault(number, JobProgress()).handle_event(event)
            elif isinstance(event, JobEvent) and event.job is not None:
                self._member_progress.setdefault((number, event.job), JobProgress()).handle_event(event)
        self._paces = {number: pace for number, pace in self._paces.items() if number in running}
        self._member_progress = {key: pace for key, pace in self._member_progress.items() if key[0] in running}

    def _running(
        self,
        record: SegmentRecord,
        zero_s: float,
        now_s: float,
        followed: Mapping[str, FollowedPlan],
        records: Mapping[str, JobRecord],
        totals: Mapping[str, int | None],
    ) -> TimelineSpan:
        span = _span(record, zero_s)
        begin_s, end_s = record.spec.planned_s
        ends_s = span.start_s + end_s - begin_s
        pace, step = self._paces.get(record.id), records[record.job].step
        left = self._steps_left(record, records, totals)
        if pace is not None and pace.step_s is not None and left:
            ends_s = now_s + left * pace.step_s
        elif record.job in followed:
            ends_s = planned_end_s(followed[record.job], span) or ends_s
        done = max(step, pace.step if pace else 0) - record.spec.first_step
        if ends_s <= now_s and done > 0:  # longer than planned: extrapolate its pace so far
            left = record.spec.last_step - record.spec.first_step - done
            ends_s = now_s + left * (now_s - span.start_s) / done
        return replace(span, end_s=max(now_s, ends_s), status=NOW_RUNNING)

    def _steps_left(
        self, record: SegmentRecord, records: Mapping[str, JobRecord], totals: Mapping[str, int | None]
    ) -> int | None:
        """Returns the steps that a running gang has left by its reports, None if that is unknown."""
        spec, pace = record.spec, self._paces.get(record.id, JobProgress())
        own = max(0, spec.last_step - pace.step)
        at_once = spec.config.get(AT_ONCE)
        if at_once is None or spec.last_step < (totals.get(record.job) or 0):  # it ends with its lead job
            return own
        left = [own]
        for member, first in record.members.items():
            if (total := totals.get(member)) is None:
                return None
            reported = self._member_progress.get((record.id, member.rpartition("/")[2]), JobProgress()).step
            is_over = records[member].status in ENDED
            left.append(0 if is_over else max(0, total - max(first, reported, records[member].step)))
        return num_steps_of_gang(left, at_once=at_once)

    # -- lines and notes ----------------------------------------------------------------------------------------------

    def _lines(
        self,
        records: Mapping[str, JobRecord],
        spans: tuple[Sequence[TimelineSpan], Sequence[TimelineSpan], Sequence[TimelineSpan]],
        segments: Sequence[SegmentRecord],
        totals: Mapping[str, int | None],
        ends: Mapping[tuple[str, str | None], PredictedEnd],
    ) -> list[JobLine]:
        past, running, coming = spans
        steps = {r.job: max(r.spec.first_step, self._paces[r.id].step) for r in segments if r.id in self._paces}
        waiting: set[str] = set()
        for segment in segments:
            if segment.id in self._paces:
                for member, first in segment.members.items():
                    reported = self._member_progress.get((segment.id, member.rpartition("/")[2]))
                    if not segment.spec.config.get(AT_ONCE):  # members advance together, up to their own end
                        done = max(self._paces[segment.id].step - segment.spec.first_step, 0)
                        steps[member] = min(first + done, totals.get(member) or 0)
                    elif reported is not None:
                        steps[member] = reported.step
                    elif records[member].status == JobStatus.RUNNING:
                        waiting.add(member)
        figures: dict[str, JobFigures] = {}
        for segment in segments:
            if segment.ended_s is None:
                figures |= self._figures(segment)
        spans_of: dict[str, list[TimelineSpan]] = {}
        for span in (*past, *running, *coming):
            for job in span.jobs:
                spans_of.setdefault(job, []).append(span)
        newest: dict[str, TimelineSpan] = {
            job: span for span in reversed(coming) for job in span.jobs
        }  # the next span, ...
        newest |= {job: span for span in (*past, *running) for job in span.jobs}  # ... or the last to begin
        lines = []
        for name, record in records.items():
            show, is_left = newest.get(name), record.status not in (*ENDED, JobStatus.PAUSED)
            batch, _, own = name.rpartition("/")
            lines.append(
                JobLine(
                    name=name,
                    status=JobStatus.WAITING if name in waiting else record.status,
                    step=max(steps.get(name, 0), record.step),
                    num_steps=totals.get(name),
                    technique=show.technique if show else "",
                    num_devices=len(show.devices) if show else 0,
                    ends_s=max((span.end_s for span in spans_of.get(name, ())), default=None),
                    message=record.message,
                    figures=figures.get(name, JobFigures()),
                    predicted=ends.get((batch, own)) if is_left else None,
                )
            )
        return lines

    def _figures(self, segment: SegmentRecord) -> dict[str, JobFigures]:
        """Returns what a running gang has reported of each of its jobs. Its phases are those of all of them."""
        lead = self._paces.get(segment.id, JobProgress())
        result = {segment.job: lead}
        result |= {
            m: self._member_progress.get((segment.id, m.rpartition("/")[2]), JobProgress()) for m in segment.members
        }
        predicted, phase = segment.spec.predicted_bytes, lead.figures().phase
        return {
            job: replace(progress.figures(), phase=phase, predicted_bytes=predicted) for job, progress in result.items()
        }

    def _predicted(
        self, records: Mapping[str, JobRecord], batches: Collection[str], zero_s: float, now_s: float
    ) -> dict[tuple[str, str | None], PredictedEnd]:
        """Returns the predicted end of each job, by batch and name within it, and of each batch, under the name None.

        What was to have ended by now ends now at the earliest.
        """
        result: dict[tuple[str, str | None], PredictedEnd] = {}
        at_rest = (*ENDED, JobStatus.PAUSED)  # a batch of which nothing runs has no end that could be predicted
        left = {name.rpartition("/")[0] for name, record in records.items() if record.status not in at_rest}
        for batch, prediction in self.archive.predictions(left.intersection(batches)).items():
            for name, end in ((None, prediction.end), *prediction.jobs.items()):
                result[batch, name] = end.later(prediction.since_s - zero_s).not_before(now_s)
        return result

    def _notes(self, heads: Sequence[PlanHeader], past: Sequence[TimelineSpan], zero_s: float) -> list[TimelineNote]:
        notes = []
        for head in heads[-MAX_NOTES:]:
            makespan_s = self._makespans_s.get(head.id)
            end = "" if makespan_s is None else f": {seconds_text(makespan_s)} from then on"
            notes.append(TimelineNote(at_s=head.made_s - zero_s, text=f"planned ({head.why}){end}"))
        for span in past:
            if span.status != JobStatus.DONE:
                text = f": {span.message}" if span.message else ""
                notes.append(TimelineNote(at_s=span.end_s, text=f"{span.job} {span.status.replace('_', ' ')}{text}"))
        return sorted(notes, key=lambda note: note.at_s)[-MAX_NOTES:]


def _span(record: SegmentRecord, zero_s: float) -> TimelineSpan:
    return TimelineSpan(
        job=record.job,
        technique=record.spec.technique,
        devices=tuple(device_of(name) for name in record.spec.devices),
        start_s=record.started_s - zero_s,
        end_s=(record.ended_s or record.started_s) - zero_s,
        status=record.result.status or NOW_RUNNING,
        number=record.id,
        message=record.result.message,
        members=tuple(record.members),
    )


def _without_orphans(segments: Sequence[SegmentRecord], *, since_s: float) -> list[SegmentRecord]:
    """Returns the segments without those that never got an end in the journal.

    Such a segment began before `since_s`, or another segment of its job follows it.
    """
    newest = {record.job: record.id for record in segments}
    return [r for r in segments if r.ended_s is not None or (r.started_s >= since_s and newest[r.job] == r.id)]


def _all_ended(records: Mapping[str, JobRecord]) -> bool:
    return bool(records) and all(record.status in ENDED for record in records.values())


def _with_rows(run_timeline: RunTimeline, nodes: Mapping[str, int]) -> RunTimeline:
    """Returns the timeline with a row for every device that exists or existed."""
    rows = dict(nodes)
    rows |= {node.name: max(node.num_devices, rows.get(node.name, 0)) for node in run_timeline.nodes}
    for span in (*run_timeline.first, *run_timeline.real):
        for node, device in span.devices:
            rows[node] = max(rows.get(node, 0), device + 1)
    return replace(run_timeline, rows=tuple(rows.items()))
