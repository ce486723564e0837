"""A pool in one thread: the real executor, runner and controller, on a simulated clock and with fake gangs."""

from collections import deque

from ringmaster.tasks.cluster import Cluster
from ringmaster.tasks.control.requests import Requests
from ringmaster.tasks.execution.executor import Executor
from ringmaster.tasks.execution.job_table import JobTable
from ringmaster.tasks.execution.replan_policy import ReplanPolicy
from ringmaster.tasks.execution.replanner import Replanner
from ringmaster.tasks.planning import Plan, Segment
from ringmaster.tasks.planning.objectives import PlanningTerms
from ringmaster.tasks.pool.controller import HOLDER_OF_SEGMENTS, PoolController
from ringmaster.tasks.pool.event_log import BatchEvents, LogPosition
from ringmaster.tasks.pool.nodes import PoolLeases, Timeouts
from ringmaster.tasks.pool.pool_engine import PoolEngine
from ringmaster.tasks.pool.submissions import Submission, Submissions
from ringmaster.tasks.storage.database import BatchingDatabase, file_url
from ringmaster.tasks.storage.journal import Journal
from ringmaster.techniques.processes.reporter import STOP
from tests.fake_engine import FakeEngine
from tests.unit.execution.fakes import at_once, job, profile
from tests.unit.pool.workers import Worker

CALM = ReplanPolicy(every=10.0, surprise=10.0)  # re-plans only where it must
EPOCH_S = 1_000_000.0


def set_pool(monkeypatch, folder):
    """Makes commands find a pool whose database is in a folder, and whose servers do not answer."""
    for name, value in {
        "RINGMASTER_DATABASE": file_url(folder / "pool.db"),
        "PREFECT_API_URL": "http://127.0.0.1:1/api",
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:1",
        "RINGMASTER_HOME": str(folder),
    }.items():
        monkeypatch.setenv(name, value)


def submission(id="b1", jobs=("a", "b"), *, name=None, terms=None, profiles=None, bases=None, num_steps=10):
    made = tuple(job(each, base=(bases or {}).get(each), num_steps=num_steps) for each in jobs)
    return Submission(
        id=id,
        name=name or f"nightly-{id}",
        jobs=made,
        profiles={each.name: (profile(),) for each in made} if profiles is None else profiles,
        folder=f"/runs/{id}",
        cache_dir="/cache",
        terms=terms or PlanningTerms(),
        started_s=EPOCH_S,
    )


def plan_in_a_row(problem):
    """Plans jobs one after another, each on those devices of a node that are free first, or on which it runs."""
    free_s = {(node.id, i): 0.0 for node in problem.nodes for i in range(node.num_devices)}
    ended_s, segments, left = {}, [], list(problem.jobs)
    while left:
        row = next(r for r in left if all(other in ended_s for other in r.after))
        left.remove(row)
        option = row.options[0]
        gang = row.running.gang if row.running is not None else ()
        if len(gang) != option.num_devices:
            gang = min(_gangs(problem, free_s, option.num_devices), key=lambda g: (max(free_s[d] for d in g), g))
        start_s = max([*(free_s[device] for device in gang), *(ended_s[other] for other in row.after)])
        ended_s[row.id] = start_s + option.runtime_s
        free_s |= dict.fromkeys(gang, ended_s[row.id])
        ((node, ids),) = {node: tuple(sorted(i for _, i in gang)) for node, _ in gang}.items()
        segments.append(Segment(row.id, 0, start_s, ended_s[row.id], 1.0, 0.0, ((node, ids),)))
    return Plan(problem.name, tuple(segments))


def _gangs(problem, free_s, size):
    """Yields for each node that is large enough its `size` devices that are free first."""
    for node in problem.nodes:
        mine = sorted(
            (device for device in free_s if device[0] == node.id), key=lambda device: (free_s[device], device)
        )
        if len(mine) >= size:
            yield tuple(sorted(mine[:size]))


class Inbox:
    """An executor's inbox that records when the executor would wait."""

    def __init__(self):
        self.messages, self.is_empty = deque(), False

    def put(self, message):
        self.messages.append(message)

    def empty(self):
        return not self.messages

    def get(self, timeout=None):
        self.is_empty = not self.messages
        return (0, None) if self.is_empty else self.messages.popleft()


class Clock:
    """A simulated clock for everything in the bench that measures time."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def told(database, batch):
    """Returns all events of a batch, as a follower reads them."""
    return list(BatchEvents(database, batch).follow(LogPosition(), until=lambda: True))


class PoolBench:
    """An executor process on a database. A second instance on the same database is the next controller.

    led: the database through which this executor writes, by default `database`.
    engine: a fake engine instead of that of process workers.
    elasticity: the limits of the nodes that the engine lends.
    batch_clock: the clock by which the times of batches are counted, by default one that follows `clock`.
    """

    def __init__(
        self, database, clock, *, led=None, make_plan=plan_in_a_row, engine=None, elasticity=None, batch_clock=None
    ):
        self.database, self.clock = database, clock
        led, wall_clock = BatchingDatabase(led or database), lambda: EPOCH_S + clock() - 100.0
        self.plans = []
        self.engine = engine or PoolEngine(led, timeouts=Timeouts(), clock=clock)
        self.controller = PoolController(
            led,
            engine=self.engine,
            timeouts=Timeouts(),
            elasticity=elasticity,
            clock=clock,
            wall_clock=wall_clock,
        )

        def plan(problem):
            self.plans.append(problem)
            return make_plan(problem)

        replanner = Replanner(
            name="pool",
            make_plan=plan,
            add_terms=self.controller.add_terms,
            policy=CALM,
            clock=clock,
            background=at_once,
        )
        self.objectives = []
        self.controller.on_objective, self.controller.on_speed = self.objectives.append, replanner.handle_event
        self.executor = Executor(
            cluster=Cluster(nodes=()),
            leases=PoolLeases(led),
            holder=HOLDER_OF_SEGMENTS,
            job_table=JobTable(Journal(led, batch=None, clock=batch_clock or wall_clock)),
            engine=self.engine,
            listeners=[self.controller.listen],
            replanner=replanner,
            clock=clock,
        )
        self.executor._inbox = self.inbox = Inbox()
        self.controller.take_over(self.executor)

    def step(self, *, seconds=0.0, looks=True):
        """Advances the clock, and lets the executor do all that is due. looks: whether the engine polls before."""
        self.clock.now_s += seconds
        if isinstance(self.engine, FakeEngine):
            self.engine.advance(self.clock.now_s)
        elif looks:
            self.engine.catch_up()
        self.executor.call(self.controller.tick)
        self.inbox.is_empty = False
        while not self.inbox.is_empty:
            self.executor.serve(num_turns=1)
        assert not self.executor.listener_faults

    def pass_seconds(self, seconds, *workers):
        """Runs `step` each second; the given workers send heartbeats."""
        for _ in range(int(seconds)):
            for worker in workers:
                worker.beat()
            self.step(seconds=1.0)

    # -- state that tests inspect ------------------------------------------------------------------------------------

    def statuses(self, batch="b1"):
        return {name: record.status for name, record in Journal(self.database, batch=batch).jobs().items()}

    def told(self, kind, batch="b1"):
        return [event for event in told(self.database, batch) if isinstance(event, kind)]

    def held(self):
        return PoolLeases(self.database).held()

    def is_standing(self, batch="b1"):
        return Submissions(self.database).status(batch) == "submitted"

    def submit(self, *submissions, **options):
        for each in submissions:
            Submissions(self.database).submit(each, **options)
        self.step()

    def ask(self, kind, **content):
        """Makes a request, and returns it with its answer."""
        requests = Requests(self.database)
        number = requests.ask(kind, content)
        self.step()
        return requests.read(number)


class Gangs:
    """Fake gangs on some workers. Each makes three moves: ready, a checkpoint halfway, the end. `steps` persists."""

    def __init__(self, *workers):
        self.workers = list(workers)
        self.steps, self.shares, self.said = {}, {}, {}
        self.trained = []  # (job, first step, last step) of each stretch

    def move(self):
        """Lets every worker take its orders, and each of its gangs make one move."""
        for worker in self.workers:
            for segment, share in worker.take_all().items():
                self.shares[worker.incarnation, segment] = share
            for segment in worker.running():
                self._move(worker, segment, self.shares[worker.incarnation, segment].order)

    def _move(self, worker, segment, order):
        key = (order.checkpoint_dir, order.job.name)
        moves = self.said[segment] = self.said.get(segment, 0) + 1
        step = self.steps.get(key, 0)
        if moves == 1:
            worker.say(segment, "ready", step=step)
        elif STOP in worker.told(segment):
            worker.end(segment, "preempted", step=step)
        elif moves == 2:
            half = (step + order.last_step) // 2
            self.trained.append((key, step, half))
            self.steps[key] = half
            worker.say(segment, "checkpoint", step=half)
        else:
            self.trained.append((key, step, order.last_step))
            self.steps[key] = order.last_step
            worker.end(segment, step=order.last_step, first_step=0, metrics={"loss": 1.0})


def worker_of(database, name="n1", **options):
    return Worker(database, name, **options)


def run(pool, gangs, *, moves=30):
    """Lets gangs and executor take turns until no batch is active."""
    for _ in range(moves):
        pool.step(seconds=0.1)
        if not Submissions(pool.database).unended():
            return
        gangs.move()
    raise AssertionError(f"it did not end: {pool.statuses()}")
