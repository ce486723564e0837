"""The MLflow writer: writes a batch's events as runs, metrics and plans, and has its models written.

Each method may be called again after it failed half-way: it finds what it has written, or writes it again.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringmaster.errors import LedgerError
from ringmaster.model_lineage import model_pages
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.records import MetricPoint
from ringmaster.tasks.batch import Batch
from ringmaster.tasks.execution.execution_events import (
    ExecutionEvent,
    GangReport,
    JobEnded,
    PlanUpdate,
    SegmentEnded,
    SegmentStarted,
)
from ringmaster.tasks.planning import gantt
from ringmaster.tasks.planning.durations import compared_with_plan, practice_text
from ringmaster.tasks.profiling.profile_store import MeasuredOptions, ProfileStore
from ringmaster.tasks.recording.model_writer import PROFILES, JobsToRecord, ModelWriter
from ringmaster.tasks.recording.record_hooks import RecordedRun, RunListener, record_hooks
from ringmaster.tasks.recording.rows import (
    EnergyMeter,
    code_version,
    job_params,
    picture,
    plan_rows,
    plan_sentence,
    profile_row,
    telemetry_points,
)
from ringmaster.tasks.storage.fact_keys import FLOW_RUN_PAGE, FUSION, IS_MEASURED, RUN
from ringmaster.tasks.storage.journal import ENDED, GroupDecision, JobRecord, JobStatus, Journal
from ringmaster.techniques.processes.gang_events import (
    CheckpointFailed,
    CheckpointSaved,
    DeviceTelemetry,
    EvaluationReported,
    Event,
    JobReady,
    OutcomeStatus,
    Steps,
)
from ringmaster.text import markdown

REASON = "ringmaster.reason"  # a tag of the run of a job that is not done
NOT_DONE = {JobStatus.CANCELLED: ("Cancelled", "KILLED"), JobStatus.STOPPED: ("Stopped early", "FINISHED")}


def metric_points(event: Event, *, at_ms: int) -> list[MetricPoint]:
    """Returns the metrics of a gang's event.

    Each point includes its time, so that writing the same points again adds none.
    """
    match event:
        case Steps():
            now_ms = int(event.wall_s * 1000)
            rows = list(enumerate(zip(event.losses, event.seconds, strict=True), start=event.first_step + 1))
            losses = [MetricPoint("train/loss", loss, step, now_ms) for step, (loss, _) in rows]
            rewards = enumerate(event.rewards, start=event.first_step + 1)
            losses += [MetricPoint("train/reward", reward, step, now_ms) for step, reward in rewards]
            losses += [MetricPoint("train/step_s", seconds, step, now_ms) for step, (_, seconds) in rows]
            of_features = [each for hook in record_hooks() for each in hook.metrics(event).items()]
            others = [*of_features, *_speed(event).items()]
            return losses + [MetricPoint(key, value, event.step, now_ms) for key, value in others]
        case EvaluationReported(part=part) if part is not None:
            of_part = [each for hook in record_hooks() for each in hook.partial_metrics(event).items()]
            return [MetricPoint(key, value, event.step, at_ms) for key, value in of_part]
        case EvaluationReported():
            return [MetricPoint(f"eval/{key}", value, event.step, at_ms) for key, value in event.metrics.items()]
        case DeviceTelemetry():
            return telemetry_points(event)
        case _:
            return []


def _speed(steps: Steps) -> dict[str, float]:
    """Returns the speed of reported steps on all devices, tokens without padding, and the peak memory so far."""
    seconds = sum(steps.seconds)
    rates = {"train/samples_per_s": steps.num_samples, "train/tokens_per_s": steps.num_tokens}
    result = {key: number / seconds for key, number in rates.items() if number and seconds}
    return result | ({"train/peak_memory_megabytes": steps.peak_bytes * 1e-6} if steps.peak_bytes else {})


def profile_store(ledger: Ledger) -> ProfileStore:
    """Returns the store of measurements in the ledger, which all batches share."""
    return ProfileStore(find=ledger.find_profiles, keep=ledger.record_profile, newest=ledger.newest_profiles)


class MlflowWriter:
    """Writes one batch into the ledger. The journal stores run ids, so that a resumed batch continues in its runs.

    Raises LedgerError if MLflow cannot write, for now or at all.

    num_plans: the number of plans that are recorded already.
    notice: receives a message if a model cannot be kept in the tensor store.
    """

    def __init__(
        self,
        ledger: Ledger,
        journal: Journal,
        *,
        batch: Batch,
        num_plans: int = 0,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.ledger, self._journal, self._batch = ledger, journal, batch
        self._notice = notice
        self._known = JobsToRecord(jobs={}, preflights={}, profiles={})
        self._points = defaultdict[str, list[MetricPoint]](list)  # by job: those that wait for `flush`
        self._refused = defaultdict[str, list[MetricPoint]](list)  # by job: those that can never be written
        self._waiting: set[str] = set()  # jobs whose pages show that they wait
        self._energy = EnergyMeter(journal)
        self._code_version = code_version(batch.folder)
        self._measured = MeasuredOptions(profile_store(ledger))
        self._listeners = [each for hook in record_hooks() for each in hook.listeners(batch, notice=notice)]
        self._followed: set[str] = set()  # jobs whose runs the listeners know
        self._running: set[str] = set()  # jobs whose runs MLflow has as running
        self._unwritten: set[str] = set()  # jobs whose newest segments are not written
        self.num_plans = num_plans
        self.faults: list[str] = []

    def run_of(self, job: str | None = None) -> str | None:
        """Returns the MLflow run of the batch or of a job, None before it is open."""
        run_id: str | None = self._journal.get(f"run:{job}" if job else "run")
        return run_id

    @property
    def _models(self) -> ModelWriter:
        return ModelWriter(
            ledger=self.ledger,
            journal=self._journal,
            batch=self._batch,
            known=self._known,
            plan=f"plan-{self.num_plans}/plan.json" if self.num_plans else None,
            code_version=self._code_version,
            notice=self._notice,
        )

    def begin(self, known: JobsToRecord, *, key: str, devices: Sequence[str], num_trials: int) -> None:
        """Opens the batch's run, or resumes it.

        key: permanently identifies this run of the batch.
        """
        self._known = known
        run_id = self.run_of()
        if run_id is not None and self._resume(run_id):
            self._forget_purged_runs()
        else:
            params = {"objective": self._batch.objective, "num_jobs": len(self._batch.jobs), "devices": list(devices)}
            run_id = self.ledger.start_batch(
                self._batch.name,
                batch=self._batch.name,
                params={**params, "num_trials": num_trials},
                files={"batch.yaml": self._batch.text},
                key=key,
            )
            self._journal.put(RUN, run_id)
        # The segments of these ended in an earlier process, which may not have written them, or to a run that is gone.
        self._unwritten |= {event.job for event in self.unrecorded_ends()}

    def _resume(self, run_id: str) -> bool:
        """Resumes the batch's run, with those of its jobs; forgets all records where MLflow does not have it.

        Returns whether it has.
        """
        try:
            if num_restored := self.ledger.restore_runs(run_id):
                self._notice(f"{num_restored} of the batch's runs were deleted in MLflow, and are restored")
            self.ledger.resume_run(run_id)
        except LedgerError as error:
            if error.code != "RESOURCE_DOES_NOT_EXIST":
                raise
            self._forget_records()
            return False
        return True

    def _forget_purged_runs(self) -> None:
        """Forgets the runs of jobs that are not in MLflow any more, so that what is left to record has new ones.

        A model that such a run has made is kept.
        """
        for name, record in self._journal.jobs().items():
            run_id = None if record.model_uri else self.run_of(name)
            if run_id is None or self.ledger.has_run(run_id):
                continue
            is_done, what = record.status == JobStatus.DONE, "what is left to record of it goes to a new one"
            if is_done and (uri := self.ledger.version_made_by(run_id, self._models.name_of(name))) is not None:
                self._journal.write_job(name, model_uri=uri)
                what = f"its model is {uri}"
            self._journal.remove(f"run:{name}")
            if record.status not in NOT_DONE:  # of which nothing may be left
                self._notice(f"the run of {name} is not in MLflow any more: {what}")

    def _forget_records(self) -> None:
        """Forgets the records in an MLflow that has been replaced by another one: they are made again in that one."""
        self._notice("this MLflow is not the one that has the records of this run: they are made again in this one")
        for name, record in self._journal.jobs().items():
            self._journal.remove(f"run:{name}")
            if record.model_uri:
                self._journal.write_job(name, model_uri=None)
        self._models.forget_ancestors()
        self._journal.remove("run")  # at last: a process that dies before does all of it again

    def write(self, event: ExecutionEvent, *, at_ms: int) -> None:
        """Writes an event. Its metrics wait for `flush`.

        at_ms: when the event arrived, in milliseconds since the epoch.
        """
        match event:
            case PlanUpdate():
                self._write_plan(event)
            case SegmentStarted():
                for job in (event.segment.job, *event.members):
                    run_id = self._job_run(job)
                    if job not in self._running:
                        self.ledger.resume_run(run_id)
                        self._running.add(job)
            case GangReport():
                self._points[event.job] += metric_points(event.event, at_ms=at_ms)
                self._energy.handle_event(event)
                self._note_waiting(event.job, event.event)
            case SegmentEnded():
                for job, points in self._energy.end(event, at_ms=at_ms).items():
                    self._points[job] += points
                self.flush()
                # Each file costs some calls of MLflow, and a group has many jobs: those that go on are written later.
                self._unwritten |= {event.segment.job, *event.members}
                self._write_segments(are_ended=True)
                # For later runs of such jobs.
                if event.profile is not None and event.outcome.status == OutcomeStatus.OUT_OF_MEMORY:
                    self._measured.add_unfit(event.profile, message=event.outcome.message)
                elif event.profile is not None:
                    self._measured.add(event.profile, number=event.number)
            case JobEnded():
                self.flush()
                if event.record.status != JobStatus.DONE:  # else its segment has not ended yet
                    self._unwritten.add(event.job)
                self._write_segments(are_ended=True)
                self._end_job(event)
                self._running.discard(event.job)
                for listener in self._listeners_of(event.job):
                    listener.end_run(event.record)

    def _note_waiting(self, job: str, event: Event) -> None:
        """Notes on the page of a job's run that it waits for a disk or store, until it does no more."""
        if isinstance(event, CheckpointFailed) and event.waits:
            self._waiting.add(job)
            self.ledger.set_note(self._job_run(job), f"**Waits**: {markdown(event.message)}")
        elif job in self._waiting and isinstance(event, (CheckpointSaved, JobReady)):
            self.ledger.set_note(self._job_run(job), "")
            self._waiting.discard(job)

    def flush(self) -> None:
        """Writes the waiting metrics. Metrics that can never be written become a fault."""
        for job in list(self._points):
            try:
                self.ledger.log_metrics(self._job_run(job), self._points[job])
            except LedgerError as error:
                if error.may_pass:
                    raise
                self.faults.append(f"metrics of {job}: {error}")
                self._refused[job] += self._points[job]
            points = self._points.pop(job)
            for listener in self._listeners_of(job):
                listener.add_points(job, points)

    def waiting_points(self) -> dict[str, list[list[Any]]]:
        """Returns the metrics that are not written, by job: key, value as text, step and time in milliseconds."""
        return {
            job: [
                [point.key, repr(float(point.value)), point.step, point.timestamp_ms]
                for points in (self._refused, self._points)
                for point in points.get(job, ())
            ]
            for job in (*self._refused, *self._points)
        }

    def restore_points(self, rows: Mapping[str, Sequence[Sequence[Any]]]) -> None:
        """Lets metrics wait for `flush` that an earlier process could not write. rows: its `waiting_points`."""
        for job, points in rows.items():
            self._points[job] += [MetricPoint(key, float(value), step, at_ms) for key, value, step, at_ms in points]

    def finish(self, *, status: str, metrics: Mapping[str, float], table: Sequence[Mapping[str, Any]]) -> None:
        """Closes the batch's run with its result."""
        self.flush()
        self._measured.close()
        run_id = self.run_of()
        if run_id is None:
            return
        self._write_segments(are_ended=False)
        self.ledger.log_metrics(run_id, [MetricPoint(key, value) for key, value in metrics.items()])
        if table:
            self.ledger.write_table(run_id, "jobs.json", table)
        is_whole = all(row["status"] == JobStatus.DONE for row in table)
        if note := self._batch_note(run_id, metrics, is_whole=is_whole):
            self.ledger.set_note(run_id, note)
        self.ledger.finish_run(run_id, status)

    def _batch_note(self, run_id: str, metrics: Mapping[str, float], *, is_whole: bool) -> str:
        """Returns the note on the page of the batch's run. is_whole: whether all jobs are done."""
        lines = []
        if (planned_s := metrics.get("planned_makespan_s")) is not None:
            makespan_s = metrics["makespan_s"]
            than = compared_with_plan(makespan_s, planned_s, is_whole=is_whole)
            lines += [picture(run_id), f"It took **{makespan_s:.1f} s**, {than} ({planned_s:.1f} s)."]
            if (practice_s := metrics.get("current_practice_s")) is not None:
                are_measured = bool(self._journal.get(IS_MEASURED, False))
                lines.append(f"{practice_text(practice_s, planned_s=planned_s, are_measured=are_measured)}.")
        if fusion := self._journal.read(FUSION, GroupDecision):
            lines.append(f"Which jobs train together was planned: {markdown(fusion.words)}.")
        if (page := self._journal.get(FLOW_RUN_PAGE)) is not None:
            lines.append(f"Its log and artifacts: {model_pages.link('the flow run in Prefect', page)}.")
        return "\n\n".join(lines)

    def unrecorded_ends(self) -> list[JobEnded]:
        """Returns the ends of jobs that are done and have no record, after a kill or an MLflow outage."""
        return [
            JobEnded(record=record)
            for name, record in self._journal.jobs().items()
            if record.status == JobStatus.DONE and not record.model_uri and self._known.preflight(record)
        ]

    def _job_run(self, name: str) -> str:
        run_id = self.run_of(name)
        if run_id is None:
            batch_run = self.run_of()
            if batch_run is None:
                raise LedgerError(f"job {name} is not recorded: the batch's own run could not be opened")
            run_id = self.ledger.start_job(batch_run, name, params=self._params(name), tags=self._tags(name))
            self._running.add(name)
            like = self._known.like(self._record(name))
            if rows := [profile_row(profile) for profile in self._known.profiles.get(like, ())]:
                self.ledger.write_table(run_id, PROFILES, rows)
            self._journal.put(f"run:{name}", run_id)
        return run_id

    def _params(self, name: str) -> dict[str, Any]:
        record = self._record(name)
        preflight = self._known.preflight(record)
        return job_params(self._known.job(record), columns=dict(preflight.data.get("columns", ())) if preflight else {})

    def _tags(self, name: str) -> dict[str, str]:
        tags = {"ringmaster.job": name}
        for hook in record_hooks():
            tags |= hook.tags(self._record(name))
        return tags

    def _listeners_of(self, name: str) -> Sequence[RunListener]:
        """Returns the listeners, which know the run of the job."""
        if self._listeners and name not in self._followed:
            self._followed.add(name)
            run_id = self._job_run(name)
            tags = {**self._tags(name), "mlflow.run_id": run_id, "mlflow.parent_run_id": self.run_of() or ""}
            params = self._params(name)
            run = RecordedRun(batch=self._batch.name, job=name, run_id=run_id, params=params, tags=tags)
            for listener in self._listeners:
                listener.open_run(run)
        return self._listeners

    def close(self) -> None:
        """Ends what follows the records."""
        for listener in self._listeners:
            listener.close()

    def _record(self, name: str) -> JobRecord:
        return self._journal.job(name) or JobRecord(name=name)

    def _write_plan(self, event: PlanUpdate) -> None:
        run_id = self.run_of()
        if run_id is None:
            return
        number = self.num_plans + 1
        plan, problem = event.plan, event.problem
        folder = f"plan-{number}"
        self.ledger.write_json(run_id, f"{folder}/plan.json", plan.to_json())
        self.ledger.write_json(run_id, f"{folder}/problem.json", problem.to_json())
        self.ledger.write_svg(run_id, f"{folder}/gantt.svg", gantt.render_svg(plan, problem))
        self.ledger.write_table(run_id, f"{folder}/segments.json", plan_rows(event))
        figures = {"plan/makespan_s": plan.makespan_s, "plan/lower_bound_s": plan.best_bound_s, "plan/gap": plan.gap}
        points = [MetricPoint(key, value, number) for key, value in figures.items() if value is not None]
        self.ledger.log_metrics(run_id, points)
        if number == 1:
            self.ledger.set_note(run_id, f"{picture(run_id)}\n\n{plan_sentence(event)}")
        self.num_plans = number

    def _write_segments(self, *, are_ended: bool) -> None:
        """Writes the segments that are not written: of the jobs that have ended, or of all."""
        records = self._journal.jobs() if self._unwritten else {}
        for job in sorted(self._unwritten):
            if are_ended and (job not in records or records[job].status not in ENDED):
                continue
            if rows := self._segment_rows(job):
                self.ledger.write_table(self._job_run(job), "segments.json", rows)
            self._unwritten.discard(job)

    def _segment_rows(self, job: str) -> list[dict[str, Any]]:
        return [
            {
                **{key: getattr(record.spec, key) for key in ("technique", "num_devices", "first_step", "last_step")},
                "config": str(record.spec.config),
                "devices": ", ".join(record.spec.devices),
                "seconds": record.seconds,
                "status": record.result.status or "running",
                "message": record.result.message,
            }
            for record in self._journal.segments(job)
        ]

    def _end_job(self, event: JobEnded) -> None:
        record, run_id = event.record, self._job_run(event.job)
        if record.status == JobStatus.DONE:
            self._models.write(record, run_id)
            return
        how, status = NOT_DONE.get(record.status, ("Failed", "FAILED"))
        self.ledger.set_note(run_id, f"**{how}**: {markdown(record.message)}")
        self.ledger.set_tags(run_id, {REASON: record.message})
        self.ledger.finish_run(run_id, status)
