"""A pool without nodes or gangs: a thread stands in for its controller on the database."""

import threading
from contextlib import contextmanager

from ringmaster.tasks.control.requests import RequestKind, Requests, RequestStatus
from ringmaster.tasks.execution.dispatch import PlannedSegment
from ringmaster.tasks.execution.execution_events import JobEnded, PlanUpdate, SegmentEnded, SegmentStarted
from ringmaster.tasks.pool.event_log import EventLog
from ringmaster.tasks.pool.submissions import Submissions
from ringmaster.tasks.profiling.search import planning_problem
from ringmaster.tasks.storage.journal import ENDED, JobRecord, JobStatus, Journal, SegmentSpec
from ringmaster.tasks.storage.message_store import MessageStore
from ringmaster.techniques.processes.gang_events import EvaluationReported, JobResult, Outcome
from tests.unit.execution.fakes import cluster, in_a_row

LOOK_EVERY_S = 0.01


class PlayedExecutor:
    """Trains the waiting jobs of active batches at once, one after another, and answers requests.

    held_back: names of jobs that it does not train. failing: by name, jobs that fail, and the reason.
    """

    def __init__(self, database, *, held_back=()):
        self._database = database
        self._submissions, self._requests, self._told = Submissions(database), Requests(database), EventLog(database)
        self.held_back, self.failing, self.planned = set(held_back), {}, []
        self.num_trained = {}
        self.loans = []  # the nodes whose devices it lent, in order

    def turn(self):
        """Does all that is due."""
        self._answer()
        for batch in self._submissions.unended():
            self._train(batch, Journal(self._database, batch=batch.id))

    def _answer(self):
        statuses = {
            RequestKind.CANCEL: JobStatus.CANCELLED,
            RequestKind.PAUSE: JobStatus.PAUSED,
            RequestKind.RESUME: JobStatus.WAITING,
        }
        for request in self._requests.open():
            content = request.content
            if request.kind == RequestKind.TRAIN:  # another part of a controller's process starts its flow run
                answer = {"flow_run": f"run-{request.id}", "run_name": "dotted-owl"}
                self._requests.answer(request.id, status=RequestStatus.GRANTED, answer=answer)
                continue
            if request.kind == RequestKind.LEND:
                self.loans.append(content["node"])
                devices = [f"{content['node']}:cpu:{number}" for number in range(content["most"])]
                self._requests.answer(request.id, status=RequestStatus.GRANTED, answer={"devices": devices})
                continue
            if request.kind == RequestKind.NODE:  # it has all nodes that it needs
                continue
            journal = Journal(self._database, batch=content["batch"])
            records = journal.jobs()
            jobs = [job for job in content["jobs"] or records if records[job].status not in ENDED]
            if not jobs:
                answer = {"message": f"nothing of {content['batch']} is left"}
                self._requests.answer(request.id, status=RequestStatus.REFUSED, answer=answer)
                continue
            for job in jobs if request.kind in statuses else ():
                journal.write_job(job, status=statuses[request.kind], message="by hand")
                if request.kind == RequestKind.CANCEL:
                    ended = JobEnded(record=JobRecord(name=job, status=JobStatus.CANCELLED, message="by hand"))
                    self._told.append(content["batch"], ended)
            done = {"message": f"{request.kind}: {', '.join(jobs)}"}
            self._requests.answer(request.id, status=RequestStatus.DONE, answer=done)

    def _train(self, batch, journal):
        if batch.id not in self.planned:
            self.planned.append(batch.id)
            problem = planning_problem(batch.jobs, batch.profiles, cluster(1), name=batch.name)
            self._told.append(batch.id, PlanUpdate(problem=problem, plan=in_a_row(problem), why="submitted"))
        for job in batch.jobs:
            record = journal.jobs()[job.name]
            if record.status == JobStatus.WAITING and job.name not in self.held_back:
                self._train_job(batch, job, journal)
        if all(record.status in ENDED for record in journal.jobs().values()):
            self._submissions.end(batch.id)

    def _train_job(self, batch, job, journal):
        self.num_trained[job.name] = self.num_trained.get(job.name, 0) + 1
        segment = PlannedSegment(
            job=job.name, option=0, devices=(("here", 0),), start_s=0.0, end_s=1.0, last_step=job.total_steps
        )
        spec = SegmentSpec(technique="single", devices=("here:cpu:0",), last_step=job.total_steps)
        number = journal.start_segments([(job.name, spec)])[0]
        events = [
            SegmentStarted(number=number, segment=segment, technique="single", num_devices=1, first_step=0, attempt=1),
        ]
        said = [(0, EvaluationReported(step=1, metrics={"loss": 0.5}, wall_s=1.0))]
        MessageStore(self._database).store(number, "here", events=said)
        why = self.failing.get(job.name, "")
        status = "invalid" if why else "done"
        outcome = Outcome.of(JobResult(status=status, message=why, step=job.total_steps))
        journal.end_segment(number, outcome.result)
        events.append(SegmentEnded(number=number, segment=segment, outcome=outcome, decision="as it is"))
        if why:
            journal.write_job(job.name, status=JobStatus.FAILED, message=why)
            events.append(JobEnded(record=JobRecord(name=job.name, status=JobStatus.FAILED, message=why)))
        else:
            made = {"metrics": {"loss": 0.5}, "model_dir": str(batch.run_folder() / "models" / job.name)}
            record = journal.write_job(job.name, status=JobStatus.DONE, step=job.total_steps, **made)
            events.append(JobEnded(record=record))
        for event in events:
            self._told.append(batch.id, event)


@contextmanager
def played(database, *, held_back=()):
    """Runs a played executor of the pool in a thread; held_back: jobs that it does not train, from its first turn."""
    executor, over = PlayedExecutor(database, held_back=held_back), threading.Event()

    def play():
        while not over.wait(LOOK_EVERY_S):
            executor.turn()

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    try:
        yield executor
    finally:
        over.set()
        thread.join()
