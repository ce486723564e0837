"""Databases of batches that never ran, with plans and segments at times that a test sets."""

from sqlalchemy import insert

from ringmaster.tasks.planning import Option, Plan, PlanningJob, PlanningNode, Problem, Segment
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.tasks.storage.journal import Journal
from ringmaster.tasks.storage.schema import PLANS, SEGMENTS
from ringmaster.tasks.timeline.reader import TimelineReader
from ringmaster.techniques.job import TrainingPhase

ZERO_S = 1_700_000_000.0


def planned(job, start_s, end_s, *devices, node="n0"):
    """A planned segment under the job's only option."""
    return Segment(job, 0, start_s, end_s, 1.0, 0.0, ((node, devices),))


class Story:
    """The database of a batch on a clock that starts at 0. Jobs called BATCH/JOB make it the database of a pool."""

    def __init__(self, folder, *, nodes=(("n0", 2),), series=None):
        self.database = Database(file_url(folder / "journal.db"), synced=False)
        self.journal = Journal(self.database, batch="")
        self.nodes, self.now_s, self.series = nodes, 0.0, series or {}

    def plan(self, *segments, at_s=0.0, why="start", after=None):
        """Writes a plan. Each job has one option: its technique is "single" for one device and "ddp" for more."""
        jobs = []
        for job in dict.fromkeys(segment.job for segment in segments):
            mine = [segment for segment in segments if segment.job == job]
            size = len(mine[0].devices[0][1])
            runtime_s = sum(segment.duration_s for segment in mine)
            option = Option("single" if size == 1 else "ddp", size, runtime_s)
            jobs.append(PlanningJob(job, (option,), after=(after or {}).get(job, ())))
        problem = Problem("p", tuple(PlanningNode(*node, **self.series) for node in self.nodes), tuple(jobs))
        content = {"problem": problem.to_json(), "plan": Plan("p", segments).to_json()}
        self._insert(PLANS, batch="", made_s=ZERO_S + at_s, why=why, content=content)

    def ran(
        self, job, start_s, end_s, *devices, status="done", message="", node="n0", first_step=0, last_step=10, **more
    ):
        """Writes a segment. `end_s` is None while it runs. more: further fields of the segment's record."""
        what = {
            "technique": "single" if len(devices) == 1 else "ddp",
            "config": {},
            "num_devices": len(devices),
            "devices": [f"{node}:gpu:{device}" for device in devices],
            "first_step": first_step,
            "last_step": last_step,
            "planned_s": [0.0, 10.0],
            **more,
        }
        batch, _, name = job.rpartition("/")
        self._insert(
            SEGMENTS,
            key=f"{job}{start_s}",
            batch=batch,
            job=name,
            what=what,
            started_s=ZERO_S + start_s,
            ended_s=None if end_s is None else ZERO_S + end_s,
            outcome=None if end_s is None else {"status": status, "message": message},
        )

    def timeline_reader(self, **options):
        """A timeline reader of the database."""
        return TimelineReader(self.database, name="story", clock=lambda: ZERO_S + self.now_s, **options)

    def _insert(self, table, **row):
        self.database.write(lambda connection: connection.execute(insert(table).values(**row)))


def halfway(story):
    """A batch in progress: a has crashed once and is done, late; b runs; c and d wait."""
    story.plan(planned("a", 0, 10, 0), planned("b", 0, 30, 1), planned("c", 10, 20, 0), planned("d", 30, 50, 0, 1))
    story.ran("a", 0, 4, 0, status="crashed", message="rank 0 was killed")
    story.ran("a", 4, 16, 0)
    story.ran("b", 1, None, 1)
    for name, status in {"a": "done", "b": "running", "c": "waiting", "d": "waiting"}.items():
        story.journal.write_job(name, status=status)
    story.now_s = 18.0


def phase(num_steps):
    """A phase of a job, with which it has that many steps."""
    return TrainingPhase(first_step=0, global_batch_size=8, precision="fp32", lr_factor=1.0, num_steps=num_steps)
