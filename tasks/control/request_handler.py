"""Handler of the requests of people and flows about running jobs; it answers each request once, with a message."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ringmaster.errors import CheckpointNotFound, RequestRefused
from ringmaster.features.warm_start.job import WarmStart, started_from
from ringmaster.tasks.background_worker import keep_calling
from ringmaster.tasks.control.batch_terms import PRIORITIES, TERMS, USUAL, ActiveBatch
from ringmaster.tasks.control.job_changes import (
    clone_faults,
    setting_faults,
    start_root,
    step_jump,
    warm_step,
    with_settings,
    with_steps,
)
from ringmaster.tasks.control.requests import LOOK_EVERY_S, Request, RequestKind, Requests, RequestStatus
from ringmaster.tasks.execution.executor import Executor
from ringmaster.tasks.execution.job_table import CLONED, GOAL, SteeringRequest
from ringmaster.tasks.storage.database import Database
from ringmaster.tasks.storage.journal import ENDED, JobRecord, JobStatus, Journal
from ringmaster.tasks.storage.quarantine import Quarantine
from ringmaster.techniques import Job
from ringmaster.techniques.checkpoints.checkpoint import link_checkpoint

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
        self._database, self._executor, self._active_batches = database, executor, active_batches
        self._quarantine, self._on_terms = quarantine, on_terms
        self._requests, self._cancel_waiting, self._has_ended = Requests(database), cancel_waiting, has_ended
        self._acts: Mapping[RequestKind, Callable[[Mapping[str, Any]], str | Mapping[str, Any]]] = {
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
            RequestKind.CLONE: self._clone,
            RequestKind.DIRECT: self._direct,
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
            call=self._executor.call,
            every_s=LOOK_EVERY_S,
            is_due=lambda: bool(open_requests()),
        )

    def about_batches(self, current: Sequence[Request]) -> Sequence[Request]:
        """Returns the open requests about batches."""
        kinds = (*self._acts, None)
        return [each for each in current if each.kind in kinds and each.status == RequestStatus.OPEN]

    def answer(self, requests: Sequence[Request]) -> None:
        """Carries out and answers requests about batches."""
        for request in requests:
            self._quarantine.handle(
                f"request {request.id}", partial(self._answer, request), set_aside=partial(self._set_aside, request)
            )

    def _answer(self, request: Request) -> None:
        try:
            if request.kind is None:
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
        self._executor.fail([batch.qualified(job) for job in batch.job_names], message=message)

    def _cancel(self, content: Mapping[str, Any]) -> str:
        is_active = content.get("batch") in self._active_batches
        if not is_active and (waiting := self._cancel_waiting(content)) is not None:
            return waiting
        cancel = partial(self._executor.cancel, message=str(content.get("message") or "cancelled by hand"))
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
        batch, jobs = self._jobs(content, verb=verb, fits=lambda record: fits(record.status))
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
        names = {*requested.jobs, *requested.goals, *requested.stops, *requested.phases, *requested.choices}
        if unknown := names - {*batch.job_names}:
            raise RequestRefused(f"batch {batch.name} has no job {', '.join(sorted(unknown))}")
        self._executor.steer(
            SteeringRequest(
                jobs={batch.qualified(name): job for name, job in requested.jobs.items()},
                likes={batch.qualified(name): like for name, like in requested.likes.items()},
                goals={batch.qualified(name): goal for name, goal in requested.goals.items()},
                stops={batch.qualified(name): why for name, why in requested.stops.items()},
                phases={batch.qualified(name): phases for name, phases in requested.phases.items()},
                choices={batch.qualified(name): why for name, why in requested.choices.items()},
            )
        )
        return requested.in_words() or "settled"

    def _set(self, content: Mapping[str, Any]) -> str:
        """Changes settings of jobs: their steps, and the terms of their plan."""
        settings = content.get("settings")
        if not isinstance(settings, Mapping) or (faults := setting_faults(settings)):
            raise RequestRefused("; ".join(faults) if isinstance(settings, Mapping) else f"settings are {settings!r}")
        batch, jobs = self._jobs(content, verb="changed", fits=lambda record: record.status not in ENDED)
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
            self._store_terms(replace(batch, priorities=priorities, changes=changes), why=why)
        return "; ".join([text, *jumps])

    def _store_terms(self, active: ActiveBatch, *, why: str) -> None:
        facts = {PRIORITIES: dict(active.priorities), TERMS: dict(active.changes)}
        Journal(self._database, batch=active.id).put_all(facts)
        self._on_terms(active, why)

    def _set_steps(self, batch: ActiveBatch, jobs: Sequence[str], num_steps: int, *, is_dry: bool) -> list[str]:
        """Changes the steps of jobs; returns how their learning rates jump, in sentences."""
        table, changed_jobs, faults, jumps = self._executor.job_table, dict[str, Job](), list[str](), list[str]()
        for name in jobs:
            entry, record = table.entries[batch.qualified(name)], table.records[batch.qualified(name)]
            job, first = entry.local_job, started_from(entry.local_job)
            readers = [
                other.local_job.name for other in table.entries.values() if entry.job.name in other.job.checkpoint_roots
            ]
            if job.model.command is not None or job.adaptation is not None or job.made_by:
                faults.append(f"{name} does not train by steps that Ringmaster counts")
            elif GOAL in record.details:
                remedy = "To fix: clone it with another num_steps"
                faults.append(f"{name} trains as far as its sweep, or the way to its target, lets it. {remedy}")
            elif readers:
                faults.append(f"{', '.join(readers)} goes on from the last step of {name}")
            elif wrong := clone_faults(job, {"num_steps": num_steps}):
                faults += [f"{name}: {fault}" for fault in wrong]
            elif num_steps <= record.step:
                faults.append(f"{name} has taken {record.step} steps already")
            else:
                has_begun = record.step > (first.step if first else 0) or record.status == JobStatus.RUNNING
                own = WarmStart(checkpoints=entry.place.checkpoint_dir(job), step=0, first=first)
                changed_jobs[name] = _starting(with_steps(job, num_steps), own if has_begun else first)
                if jump := step_jump(job, changed_jobs[name], step=record.step):
                    jumps.append(f"{name}: {jump}")
        if faults:
            raise RequestRefused("; ".join(faults))
        for name, changed_job in changed_jobs.items() if not is_dry else ():
            why = f"a person has set {num_steps} steps for {name}"
            self._executor.redefine(batch.qualified(name), changed_job, why=why)
        return jumps

    def _clone(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Prices a clone of a job and, unless it is a dry request, starts it."""
        requested, is_warm, is_dry = content.get("jobs") or (), content.get("is_warm"), content.get("is_dry")
        if len(requested) != 1:
            raise RequestRefused(f"a clone has one source, got {', '.join(map(str, requested)) or 'none'}")
        batch, (source,) = self._jobs(content, verb="cloned", fits=lambda record: True)
        name, settings = str(content.get("name", "")), content.get("settings") or {}
        table, of_source, of_clone = self._executor.job_table, batch.qualified(source), batch.qualified(name)
        entry, record = table.entries.get(of_source), table.records.get(of_clone)
        if entry is None or not table.profiles[of_source]:
            raise RequestRefused(f"{source} cannot be trained here, so it cannot be cloned")
        if record is not None and record.details.get(CLONED, {}).get("job") == source:
            return {"message": f"{name} is a clone of {source}"}  # this request, before the controller died
        if record is not None or not name:
            raise RequestRefused(f"batch {batch.name} has a job {name!r} already. To fix: choose another --name")
        try:
            job = with_settings(entry.local_job, settings, name=name)
        except ValueError as error:
            raise RequestRefused(f"these settings make no job: {error}") from error
        begun = started_from(job)
        job = _starting(job, begun)
        batch_jobs, jump, origin = {*batch.job_names}, "", "from its first step"
        step = 0 if begun is None else begun.step
        if is_warm:
            step = warm_step(entry, at_step=content.get("at_step"))
        if job.trains and job.total_steps <= step:
            raise RequestRefused(f"num_steps must be more than the {step} of the checkpoint, got {job.total_steps}")
        if is_warm:
            jump, origin = step_jump(entry.local_job, job, step=step), f"from its checkpoint of step {step}"
            start = start_root(entry, name)
            job = job.with_parts(WarmStart(checkpoints=str(start), step=step))
            if not is_dry:
                try:
                    link_checkpoint(Path(entry.place.checkpoint_dir(entry.local_job)), step, to=start)
                except CheckpointNotFound as error:
                    raise RequestRefused(f"{error}. To fix: clone it again") from error
        renamed = job.renamed(of_clone, lambda other: batch.qualified(other) if other in batch_jobs else other)
        price = self._executor.price(renamed, source=of_source, step=step)
        if not is_dry:
            self._inherit_terms(batch, source, name)
            self._executor.clone(of_clone, job, source=of_source, step=step if is_warm else None)
        words = "it waits for others, so its price is not known yet" if price is None else price.in_words()
        return {
            "message": f"{name}: a clone of {source} {origin}: {words}",
            "price": None if price is None else {
                "least_s": price.least_s, "most_s": price.most_s, "ends_s": price.ends_s,
                "delays_s": dict(price.delays_s),
            },
            "jump": jump,
        }  # fmt: skip

    def _inherit_terms(self, batch: ActiveBatch, source: str, name: str) -> None:
        """Gives a clone the priority, the weight and the user of its source."""
        like = batch.changes.get("like", {})
        changes = {**batch.changes, "like": {**like, name: like.get(source, source)}}
        priorities = {**batch.priorities, name: batch.priorities.get(source, USUAL)}
        self._store_terms(replace(batch, priorities=priorities, changes=changes), why="")

    def _jobs(
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


def _starting(job: Job, start: WarmStart | None) -> Job:
    """Returns a job that begins with a checkpoint, or at its own beginning."""
    return job.without(WarmStart) if start is None else job.with_parts(start)
