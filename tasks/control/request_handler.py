"""Handler of the requests of people and flows about running jobs; it answers each request once, with a message.

The module `execute` of a feature lists further kinds of requests in `REQUESTS`: by name a function that is called with
the handler and the content of a request, and returns the answer, or its message. It may raise RequestRefused.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ringmaster.errors import RequestRefused
from ringmaster.features import modules
from ringmaster.tasks.background_worker import keep_calling
from ringmaster.tasks.control.batch_terms import ActiveBatch
from ringmaster.tasks.control.job_changes import change_faults, setting_faults, step_jump, with_steps
from ringmaster.tasks.control.requests import ANSWER_EVERY_S, Request, RequestKind, Requests, RequestStatus
from ringmaster.tasks.execution.executor import Executor
from ringmaster.tasks.execution.steering import SteeringRequest
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.fact_keys import PRIORITIES, TERMS
from ringmaster.tasks.storage.journal import ENDED, JobRecord, JobStatus, Journal
from ringmaster.tasks.storage.quarantine import Quarantine
from ringmaster.techniques import Job

OTHER_VERSION = "To fix: have the same version on all machines, and restart what is older"


class RequestHandler:
    """Answers requests about jobs. Must be called from the executor's thread.

    active_batches: the batches that have not ended, by id.
    quarantine: sets aside the requests that this process fails on.
    on_terms: called when a person has set priorities, weights or deadlines, with the reason for a new plan, if any.
    cancel_waiting: cancels a batch that the executor does not have yet, by the content of the request, and returns the
        answer; returns None if the request is not about one.
    has_ended: returns whether a batch with that id has ended.
    """

    def __init__(
        self,
        database: Database,
        *,
        executor: Executor,
        active_batches: Mapping[str, ActiveBatch],
        quarantine: Quarantine,
        on_terms: Callable[[ActiveBatch, str], None],
        cancel_waiting: Callable[[Mapping[str, Any]], str | None] = lambda content: None,
        has_ended: Callable[[str], bool] = lambda id: False,
    ) -> None:
        self._database, self.executor, self._active_batches = database, executor, active_batches
        self._quarantine, self._on_terms = quarantine, on_terms
        self._requests, self._cancel_waiting, self._has_ended = Requests(database), cancel_waiting, has_ended
        self._acts: Mapping[str, Callable[[Mapping[str, Any]], str | Mapping[str, Any]]] = {
            RequestKind.CANCEL: self._cancel,
            RequestKind.PAUSE: partial(
                self._change,
                verb="paused",
                fits=lambda status: status not in (*ENDED, JobStatus.PAUSED),
                act=executor.pause,
            ),
            RequestKind.RESUME: partial(
                self._change, verb="resumed", fits=JobStatus.PAUSED.__eq__, act=executor.resume
            ),
            RequestKind.RETRY: partial(
                self._change,
                verb="retried",
                fits=(JobStatus.FAILED, JobStatus.CANCELLED).__contains__,
                act=executor.retry,
            ),
            RequestKind.SET: self._set,
            RequestKind.DIRECT: self._direct,
            **{
                kind: partial(act, self)
                for module in modules("execute")
                for kind, act in getattr(module, "REQUESTS", {}).items()
            },
        }

    # -- requests about batches --------------------------------------------------------------------------------------

    def keep_answering(self, until: threading.Event) -> None:
        """Answers the requests about a run on this machine alone; returns once `until` is set. On a thread of its own.

        A pool's controller looks at its requests by itself.
        """

        def open_requests() -> Sequence[Request]:
            return self.about_batches(self._requests.current())

        keep_calling(
            lambda: self.answer(open_requests()),
            until,
            call=self.executor.call,
            every_s=ANSWER_EVERY_S,
            is_due=lambda: bool(open_requests()),
        )

    def about_batches(self, current: Sequence[Request]) -> Sequence[Request]:
        """Returns the open requests about batches."""
        others = frozenset(RequestKind) - self._acts.keys()
        return [each for each in current if each.kind not in others and each.status == RequestStatus.OPEN]

    def answer(self, requests: Sequence[Request]) -> None:
        """Carries out and answers requests about batches."""
        for request in requests:
            self._quarantine.handle(
                f"request {request.id}", partial(self._answer, request), set_aside=partial(self._set_aside, request)
            )

    def _answer(self, request: Request) -> None:
        try:
            if request.kind not in self._acts:
                raise RequestRefused(f"the executor has no such requests. {OTHER_VERSION}")
            answer = self._acts[request.kind](request.content)
        except RequestRefused as error:
            self._requests.refuse(request, str(error))
        else:
            answer = {"message": answer} if isinstance(answer, str) else answer
            self._requests.answer(request.id, status=RequestStatus.DONE, answer=answer)

    def _set_aside(self, request: Request, message: str) -> None:
        """Refuses a request that this controller fails on. A sweep that is not steered any more would never end."""
        self._requests.refuse(request, message)
        if request.kind == RequestKind.DIRECT and (
            batch := self._active_batches.get(str(request.content.get("batch")))
        ):
            self._fail(batch, f"the request that steers it was refused: {message}")

    def _fail(self, batch: ActiveBatch, message: str) -> None:
        self.executor.fail([batch.qualified(job) for job in batch.job_names], message=message)

    def _cancel(self, content: Mapping[str, Any]) -> str:
        is_active = content.get("batch") in self._active_batches
        if not is_active and (waiting := self._cancel_waiting(content)) is not None:
            return waiting
        cancel = partial(self.executor.cancel, message=str(content.get("message") or "cancelled by hand"))
        return self._change(content, verb="cancelled", fits=lambda status: status not in ENDED, act=cancel)

    def _change(
        self,
        content: Mapping[str, Any],
        *,
        verb: str,
        fits: Callable[[JobStatus], bool],
        act: Callable[[Sequence[str]], object],
    ) -> str:
        """Does something with the jobs of a batch. verb: what is done to them, such as paused."""
        batch, jobs = self.jobs_of(content, verb=verb, fits=lambda record: fits(record.status))
        act([batch.qualified(job) for job in jobs])
        return f"{verb}: {_names(batch, jobs)}"

    def _direct(self, content: Mapping[str, Any]) -> str:
        batch = self._batch(str(content.get("batch", "")))
        try:
            requested = SteeringRequest.from_json(content)
        except ValueError as error:  # written by another version
            message = f"the executor cannot read what steers it: {error}. {OTHER_VERSION}"
            self._fail(batch, message)  # as it would never end
            raise RequestRefused(message) from error
        if unknown := requested.names - {*batch.job_names}:
            raise RequestRefused(f"batch {batch.name} has no job {', '.join(sorted(unknown))}")
        self.executor.steer(requested.renamed(batch.qualified))
        return requested.in_words() or "settled"

    def _set(self, content: Mapping[str, Any]) -> str:
        """Changes settings of jobs: their steps, and the terms of their plan."""
        settings = content.get("settings")
        if not isinstance(settings, Mapping) or (faults := setting_faults(settings)):
            raise RequestRefused("; ".join(faults) if isinstance(settings, Mapping) else f"settings are {settings!r}")
        batch, jobs = self.jobs_of(content, verb="changed", fits=lambda record: record.status not in ENDED)
        is_dry, jumps = bool(content.get("is_dry")), list[str]()
        if (num_steps := settings.get("steps")) is not None:
            jumps = self._set_steps(batch, jobs, int(num_steps), is_dry=is_dry)
        words = ", ".join(f"{key} {value:g}" for key, value in settings.items())
        text = f"{words} for {_names(batch, jobs) if content.get('jobs') else f'batch {batch.name}'}"
        if is_dry:
            return "; ".join([f"would set {text}", *jumps])
        if set(settings) - {"steps"}:
            priorities, changes = dict(batch.priorities), {key: dict(own) for key, own in batch.changes.items()}
            if "priority" in settings:
                priorities |= dict.fromkeys(jobs if content.get("jobs") else [""], float(settings["priority"]))
            for key, field in (("weight", "weights"), ("deadline", "deadlines_s")):
                if key in settings:
                    changes[field] = {**changes.get(field, {}), **dict.fromkeys(jobs, float(settings[key]))}
            why = f"a person has set {words} in batch {batch.name}"
            self.store_terms(replace(batch, priorities=priorities, changes=changes), why=why)
        return "; ".join([text, *jumps])

    def store_terms(self, active: ActiveBatch, *, why: str) -> None:
        """Stores the priorities and changes of a batch. why: the reason for a new plan; empty for none."""
        facts = {PRIORITIES: dict(active.priorities), TERMS: dict(active.changes)}
        Journal(self._database, batch=active.id).put_all(facts)
        self._on_terms(active, why)

    def _set_steps(self, batch: ActiveBatch, jobs: Sequence[str], num_steps: int, *, is_dry: bool) -> list[str]:
        """Changes the steps of jobs; returns how their learning rates jump, in sentences."""
        table, changed_jobs, faults, jumps = self.executor.job_table, dict[str, Job](), list[str](), list[str]()
        for name in jobs:
            entry, record = table.entries[batch.qualified(name)], table.records[batch.qualified(name)]
            job, first = entry.job_in_batch, entry.job_in_batch.started_from
            others = [other for other in table.entries.values() if entry.job.name in other.job.checkpoint_roots]
            readers = [other.job_in_batch.name for other in others]
            if job.is_black_box or job.adaptation is not None or job.made_by:
                faults.append(f"{name} does not train by steps that Ringmaster counts")
            elif record.goal is not None:
                remedy = "To fix: add a job with that num_steps (`ringmaster jobs --help`)"
                faults.append(f"{name} trains as far as what steers its batch, such as a sweep, lets it. {remedy}")
            elif readers:
                faults.append(f"{', '.join(readers)} continues from the last step of {name}")
            elif wrong := change_faults(job, {"num_steps": num_steps}):
                faults += [f"{name}: {fault}" for fault in wrong]
            elif num_steps <= record.step:
                faults.append(f"{name} has taken {record.step} steps already")
            else:
                has_begun = record.step > (first.step if first else 0) or record.status == JobStatus.RUNNING
                own = entry.paths.checkpoint_dir(job) if has_begun else ""
                changed_jobs[name] = with_steps(job, num_steps).with_start(first, own=own)
                if jump := step_jump(job, changed_jobs[name], step=record.step):
                    jumps.append(f"{name}: {jump}")
        if faults:
            raise RequestRefused("; ".join(faults))
        for name, changed_job in changed_jobs.items() if not is_dry else ():
            why = f"a person has set {num_steps} steps for {name}"
            self.executor.redefine(batch.qualified(name), changed_job, why=why)
        return jumps

    def jobs_of(
        self, content: Mapping[str, Any], *, verb: str, fits: Callable[[JobRecord], bool]
    ) -> tuple[ActiveBatch, list[str]]:
        """Returns the batch and the jobs that a request is about: the jobs that it names, or all that fit."""
        batch = self._batch(str(content.get("batch", "")))
        records = Journal(self._database, batch=batch.id).jobs()
        requested = [str(job) for job in content.get("jobs") or ()]
        if unknown := [job for job in requested if job not in records]:
            raise RequestRefused(f"batch {batch.name} has no job {', '.join(unknown)}. It has: {', '.join(records)}")
        if unfit := [f"{job} is {records[job].status}" for job in requested if not fits(records[job])]:
            raise RequestRefused(f"of batch {batch.name} {', '.join(unfit)}: it cannot be {verb}")
        jobs = requested or [job for job, record in records.items() if fits(record)]
        if not jobs:
            states = ", ".join(f"{job} is {record.status}" for job, record in records.items())
            raise RequestRefused(f"no job of batch {batch.name} can be {verb}: {states}")
        return batch, jobs

    def _batch(self, name: str) -> ActiveBatch:
        """Returns the active batch with that id, or the only one with that name."""
        if name in self._active_batches:
            return self._active_batches[name]
        named = [each for each in self._active_batches.values() if each.name == name]
        if len(named) == 1:
            return named[0]
        if named:
            ids = ", ".join(batch.id for batch in named)
            raise RequestRefused(f"several batches are named {name}: {ids}. To fix: give its id")
        if self._has_ended(name):
            raise RequestRefused(f"batch {name} has ended")
        there = ", ".join(f"{each.name} ({batch})" for batch, each in self._active_batches.items())
        raise RequestRefused(f"there is no batch {name!r}. There is: {there or 'none'}")


def _names(batch: ActiveBatch, jobs: Sequence[str]) -> str:
    return f"{', '.join(jobs)} of batch {batch.name}"
