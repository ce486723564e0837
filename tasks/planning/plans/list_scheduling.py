"""List scheduling: places pieces of jobs, each with its option, one after another where they can start first."""

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ringmaster.errors import NoRoomError
from ringmaster.tasks.planning.bounds.job_costs import useful_options
from ringmaster.tasks.planning.plans.plan import Plan, Segment
from ringmaster.tasks.planning.problems.problem import Problem, overhead_s
from ringmaster.tasks.planning.problems.problem_parts import Option, PlanningJob

Gang = tuple[tuple[str, tuple[int, ...]], ...]
Choice = tuple[str, int]  # a job's id and the index of its option
Piece = tuple[str, int, float]  # a choice, and the share of the job that it does


class SharedAmount:
    """Records how much of something that gangs share is used when: host memory, or the devices that users may hold."""

    def __init__(self, most: float) -> None:
        self._most, self._times_s, self._used = most, [0.0], [0.0]

    def earliest(self, amount: float, start_s: float, length_s: float) -> float:
        """Returns the earliest time from `start_s` at which there is enough for `length_s`; infinite for too much."""
        if amount > self._most:
            return math.inf
        i = bisect_right(self._times_s, start_s) - 1
        while i < len(self._times_s) and self._times_s[i] < start_s + length_s:
            if self._used[i] + amount > self._most:
                start_s = self._times_s[i + 1]  # nothing is used after the last time
            i += 1
        return start_s

    def take(self, amount: float, start_s: float, end_s: float) -> None:
        """Uses an amount from `start_s` to `end_s`."""
        first, last = self._split_at(start_s), self._split_at(end_s)
        for i in range(first, last):
            self._used[i] += amount

    def _split_at(self, at_s: float) -> int:
        i = bisect_left(self._times_s, at_s)
        if i == len(self._times_s) or self._times_s[i] != at_s:
            self._times_s.insert(i, at_s)
            self._used.insert(i, self._used[i - 1])
        return i


class DeviceTimeline:
    """Records until when each device is in use; gangs are only added after the existing ones."""

    def __init__(self, problem: Problem, prices: Mapping[str, float] | None = None) -> None:
        sizes = [node.num_devices for node in problem.nodes]
        self._nodes = problem.nodes
        # Each row is sorted by time; a device that does not exist is never free.
        self._free_s = np.full((len(sizes), max(sizes)), np.inf)
        self._device = np.tile(np.arange(max(sizes)), (len(sizes), 1))
        for v, size in enumerate(sizes):
            self._free_s[v, :size] = 0.0
        never = [node.available_until_s for node in problem.nodes]
        self._until_s = np.array([np.inf if until_s is None else until_s for until_s in never])
        self._price = np.array([(prices or {}).get(node.id, 0.0) for node in problem.nodes])
        # By kind of option, the nodes that it cannot use.
        self._unfit: dict[tuple[str, int, int], NDArray[np.bool_]] = {}
        self._memory = [
            SharedAmount(math.inf if node.host_memory_bytes is None else node.host_memory_bytes)
            for node in problem.nodes
        ]
        self._limited = {user: SharedAmount(most) for user, most in problem.limits.items()}

    def earliest(
        self,
        option: Option,
        ready_s: float = 0.0,
        *,
        length_s: float | None = None,
        cheaply_by_s: float | None = None,
        user: str = "",
        node: int | None = None,
    ) -> tuple[float, list[int]]:
        """Returns the earliest start from `ready_s` at which the gang fits, and its nodes.

        Of several nodes, the one that idles least before the start is taken.

        length_s: seconds for which the gang must fit; None for those of the whole job.
        cheaply_by_s: take the cheapest nodes instead, where the job then still ends by that time.
        user: within whose limit the gang must fit.
        node: the index of the only node that it may use; None for any.

        Raises NoRoomError where the gang fits nowhere.
        """
        whole_s = option.whole_s if length_s is None else length_s
        limited = self._limited.get(user)
        while True:
            start_s, nodes = self._earliest(option, ready_s, whole_s, cheaply_by_s=cheaply_by_s, node=node)
            ready_s = start_s if limited is None else limited.earliest(option.num_devices, start_s, whole_s)
            if ready_s <= start_s:
                return start_s, nodes
            if ready_s == math.inf:
                raise NoRoomError(f"the limit of {user} is less than {option.num_devices} devices")

    def _earliest(
        self, option: Option, ready_s: float, whole_s: float, *, cheaply_by_s: float | None, node: int | None
    ) -> tuple[float, list[int]]:
        starts = np.maximum(self._free_s[:, option.slot - 1], ready_s)
        kind = (option.device_type, option.slot, option.host_memory_bytes)
        if kind not in self._unfit:
            self._unfit[kind] = np.array([not option.runs_on(node) for node in self._nodes])
        starts[self._unfit[kind] | (node is not None and np.arange(starts.size) != node)] = np.inf
        if option.host_memory_bytes:
            for v in np.flatnonzero(np.isfinite(starts)):
                starts[v] = self._with_memory(option, int(v), starts[v], whole_s)
        starts[starts + whole_s > self._until_s] = np.inf
        if option.num_nodes > 1 or cheaply_by_s is not None:
            keys = (np.arange(len(starts)), starts)
            if cheaply_by_s is not None:
                too_late = (starts + whole_s > cheaply_by_s) | np.isinf(starts)  # infinite start: the node is too small
                keys = (starts, np.where(too_late, np.inf, self._price), too_late)  # type: ignore[assignment]
            chosen = np.lexsort(keys)[: option.num_nodes]
            start_s = float(starts[chosen].max())
            if not np.isfinite(start_s) or any(
                self._with_memory(option, int(v), start_s, whole_s) > start_s or start_s + whole_s > self._until_s[v]
                for v in chosen
            ):
                raise NoRoomError(f"no {option.num_nodes} node(s) hold {option.slot} devices for {whole_s} s")
            return start_s, [int(v) for v in chosen]
        start_s = float(starts.min())
        if not np.isfinite(start_s):
            raise NoRoomError(f"no node holds {option.slot} devices for {whole_s} s")
        ties = np.flatnonzero(starts == start_s)
        if len(ties) > 1:
            idle_s = np.maximum(start_s - self._free_s[ties], 0.0).sum(axis=1)
            return start_s, [int(ties[idle_s.argmin()])]
        return start_s, [int(ties[0])]

    def take(
        self, option: Option, start_s: float, nodes: Sequence[int], length_s: float | None = None, *, user: str = ""
    ) -> Gang:
        """Reserves a gang from `start_s` for `length_s` seconds, on the devices that became free last.

        length_s: None for all of the option's seconds.
        user: whose gang it is.
        """
        gang, end_s = [], start_s + (option.whole_s if length_s is None else length_s)
        if user in self._limited:
            self._limited[user].take(option.num_devices, start_s, end_s)
        for v in nodes:
            free_s, device = self._free_s[v], self._device[v]
            top = int(np.searchsorted(free_s, start_s, side="right"))
            ids = tuple(sorted(int(d) for d in device[top - option.slot : top]))
            free_s[top - option.slot : top] = end_s
            gang.append(self._held(option, v, start_s, end_s, ids))
        return tuple(gang)

    def hold(self, option: Option, devices: Gang, length_s: float, *, user: str = "") -> None:
        """Reserves given devices from time 0, for a job that runs there already. Nothing else may be on them yet.

        Raises NoRoomError where the devices become unavailable before the end.
        """
        index = {node.id: v for v, node in enumerate(self._nodes)}
        if user in self._limited:
            if self._limited[user].earliest(option.num_devices, 0.0, length_s) > 0.0:
                raise NoRoomError(f"what runs of {user} exceeds its limit")
            self._limited[user].take(option.num_devices, 0.0, length_s)
        for name, ids in devices:
            v = index[name]
            if length_s > self._until_s[v]:
                raise NoRoomError(f"what runs on node {name} for {length_s} s cannot continue there")
            self._free_s[v][np.isin(self._device[v], ids)] = length_s
            self._held(option, v, 0.0, length_s, ids)

    def fill(self, nodes: Sequence[str], until_s: float) -> None:
        """Reserves all devices of nodes until a time."""
        for v, node in enumerate(self._nodes):
            if node.id in nodes:
                free_s = self._free_s[v, : node.num_devices]
                np.maximum(free_s, until_s, out=free_s)

    def _held(
        self, option: Option, v: int, start_s: float, end_s: float, ids: tuple[int, ...]
    ) -> tuple[str, tuple[int, ...]]:
        order = np.argsort(self._free_s[v], kind="stable")
        self._free_s[v], self._device[v] = self._free_s[v][order], self._device[v][order]
        if option.host_memory_bytes:
            self._memory[v].take(option.host_memory_bytes, start_s, end_s)
        return self._nodes[v].id, ids

    def _with_memory(self, option: Option, v: int, start_s: float, length_s: float) -> float:
        """Returns the earliest start from `start_s` at which the node has host memory for the option's run."""
        return self._memory[v].earliest(option.host_memory_bytes, start_s, length_s)


def schedule(
    problem: Problem,
    choices: Sequence[Choice],
    *,
    prices: Mapping[str, float] | None = None,
    one_a_node: bool = False,
) -> tuple[Segment, ...]:
    """Schedules one segment per job, in the order of `choices`.

    A job that waits for others is placed after them. A job that is pinned under another option than the chosen one
    first continues under its own.

    prices: by node, of its devices; if given, cheap nodes are preferred to an early start, as far as deadlines allow.
    one_a_node: whether a node runs one job at a time, whatever the number of its devices.

    Raises NoRoomError where a job fits nowhere.
    """
    jobs = {job.id: job for job in problem.jobs}
    pieces = (
        piece for job_id, k in after_respected(choices, jobs) for piece in _pinned_first(problem, jobs[job_id], k)
    )
    return schedule_pieces(problem, list(pieces), prices=prices, one_a_node=one_a_node)


def schedule_pieces(
    problem: Problem,
    pieces: Sequence[Piece],
    *,
    prices: Mapping[str, float] | None = None,
    one_a_node: bool = False,
    nodes: Mapping[str, int] | None = None,
) -> tuple[Segment, ...]:
    """Schedules one segment per piece, in the given order.

    A job's pieces run one after another, after the jobs that it waits for. A job whose first piece has the option that
    the job is running continues on its devices. Raises NoRoomError where a piece fits nowhere.

    prices, one_a_node: as in `schedule`.
    nodes: by job, the index of the only node that it may start on; its option is for one node.
    """
    jobs, timeline, segments = {job.id: job for job in problem.jobs}, DeviceTimeline(problem, prices), []
    firsts, lasts = dict[str, int](), dict[str, int]()
    for i, (job_id, _, _) in enumerate(pieces):
        firsts.setdefault(job_id, i)
        lasts[job_id] = i
    going_on = [i for i in firsts.values() if _goes_on(jobs[pieces[i][0]], pieces[i][1])]
    ends: dict[str, float] = {}
    for i in [*going_on, *(i for i in range(len(pieces)) if i not in set(going_on))]:
        job_id, k, share = pieces[i]
        job = jobs[job_id]
        option, is_first = job.options[k], firsts[job_id] == i
        paid_s = overhead_s(
            problem, job, option, is_first=is_first, is_last=lasts[job_id] == i, continues=is_first and _goes_on(job, k)
        )
        length_s = paid_s + share * option.runtime_s
        if is_first and job.running is not None and k == job.running.option:
            start_s, gang = 0.0, job.running.devices
            timeline.hold(option, gang, length_s, user=job.user)
        else:
            waits = (ends[other] for other in job.after) if is_first else (ends[job_id],)
            by_s = (np.inf if job.deadline_s is None else job.deadline_s) if prices else None
            start_s, chosen = timeline.earliest(
                option,
                max([job.release_s, *waits]),
                length_s=length_s,
                cheaply_by_s=by_s,
                user=job.user,
                node=(nodes or {}).get(job_id),
            )
            gang = timeline.take(option, start_s, chosen, length_s, user=job.user)
        ends[job_id] = start_s + length_s
        if one_a_node:
            timeline.fill([node for node, _ in gang], ends[job_id])
        segments.append(Segment(job_id, k, start_s, ends[job_id], share, paid_s, gang))
    return tuple(sorted(segments, key=lambda s: (s.start_s, s.job)))


def _goes_on(job: PlanningJob, option: int) -> bool:
    return job.running is not None and option == job.running.option


def _pinned_first(problem: Problem, job: PlanningJob, option: int) -> Iterable[Piece]:
    """Returns a job as one piece under an option, after the piece that a pinned job must still run where it is."""
    if job.running is None or option == job.running.option or not job.running.pinned_until_s:
        return [(job.id, option, 1.0)]
    now = job.options[job.running.option]
    share = (job.running.pinned_until_s - now.save_s) / now.runtime_s
    if share >= 1.0:
        return [(job.id, job.running.option, 1.0)]
    share = max(0.0, share)
    return [(job.id, job.running.option, share), (job.id, option, 1.0 - share)]


def after_respected(choices: Sequence[Choice], jobs: Mapping[str, PlanningJob]) -> list[Choice]:
    """Returns the choices in the same order, except that each job is after those that it waits for."""
    option_of, placed = dict(choices), dict[str, int]()

    def place(job_id: str) -> None:
        waiting = [job_id]
        while waiting:
            missing = [other for other in jobs[waiting[-1]].after if other not in placed]
            if missing:
                waiting.extend(missing)
            else:
                last = waiting.pop()
                placed.setdefault(last, option_of[last])

    for job_id, _ in choices:
        place(job_id)
    return list(placed.items())


Order = tuple[Choice, ...]  # (job's id, index of its option), in the order of their starts on one node


def segments_of(problem: Problem, orders: Sequence[Order]) -> tuple[Segment, ...]:
    """Returns the plan in which node v starts the jobs of orders[v] in that order, each as early as it can.

    Jobs that run at time 0 are in no order: they continue on their devices. Gangs are on one node.
    """
    running = [(job.id, job.running.option, 1.0) for job in problem.jobs if job.running is not None]
    pieces = [*running, *((job_id, k, 1.0) for order in orders for job_id, k in order)]
    nodes = {job_id: v for v, order in enumerate(orders) for job_id, _ in order}
    return schedule_pieces(problem, pieces, nodes=nodes)


def current_practice(problem: Problem) -> Plan:
    """Runs one job after another on each node, every job with its largest gang on one node.

    Of the options of that size, the fastest is taken. A job that cannot use all devices of its node leaves the others
    idle: a script that trains one model after another starts no second one meanwhile. Jobs are placed in the order of
    the problem, each on the node that is free first.
    """
    limits = problem.limits
    choices = [(job.id, _largest(job, most=limits.get(job.user, problem.num_devices))) for job in problem.jobs]
    return Plan(problem.name, schedule(problem, choices, one_a_node=True), method="current practice")


def even_split(problem: Problem) -> Plan:
    """Divides the devices evenly: each job gets its largest gang of at most its share, at least one device."""
    share = max(1, problem.num_devices // len(problem.jobs))
    choices = [(job.id, _within(job, share)) for job in problem.jobs]
    return Plan(problem.name, schedule(problem, choices), method="even split")


def optimus_greedy(problem: Problem) -> Plan:
    """Gives the next devices to the job whose runtime they shorten most, as Optimus does (Peng et al., EuroSys 2018).

    Every job starts with its smallest gang. While devices are left, the step to a larger gang with the largest gain per
    device is taken. The gangs are then list-scheduled, longest first.
    """
    size_of = {job.id: _smallest(job) for job in problem.jobs}
    left = problem.num_devices - sum(job.options[size_of[job.id]].num_devices for job in problem.jobs)
    steps = [(-gain, i, k) for i, job in enumerate(problem.jobs) for gain, k in _best_step(job, size_of[job.id])]
    heapq.heapify(steps)
    while steps and left > 0:
        _, i, k = heapq.heappop(steps)
        job = problem.jobs[i]
        more = job.options[k].num_devices - job.options[size_of[job.id]].num_devices
        if more <= left:
            size_of[job.id], left = k, left - more
            for gain, following in _best_step(job, k):
                heapq.heappush(steps, (-gain, i, following))
    longest_first = sorted(problem.jobs, key=lambda job: (-job.options[size_of[job.id]].runtime_s, job.id))
    choices = [(job.id, size_of[job.id]) for job in longest_first]
    return Plan(problem.name, schedule(problem, choices), method="optimus-style greedy")


def longest_first_by_area(problem: Problem) -> Plan:
    """Schedules each job under the option with the fewest device-seconds, longest first."""
    return _by(problem, lambda job, k: job.options[k].runtime_s * job.options[k].num_devices, "least area")


def longest_first_by_speed(problem: Problem) -> Plan:
    """Schedules each job under its fastest option, longest first."""
    return _by(problem, lambda job, k: job.options[k].runtime_s, "fastest option")


BASELINES: tuple[Callable[[Problem], Plan], ...] = (
    current_practice,
    even_split,
    optimus_greedy,
    longest_first_by_area,
    longest_first_by_speed,
)


def _by(problem: Problem, cost: Callable[[PlanningJob, int], float], method: str) -> Plan:
    best = {job.id: min(useful_options(job), key=lambda k, job=job: cost(job, k)) for job in problem.jobs}  # type: ignore[misc]
    jobs = sorted(problem.jobs, key=lambda job: (-job.options[best[job.id]].runtime_s, job.id))
    choices: list[Choice] = [(job.id, best[job.id]) for job in jobs]
    return Plan(problem.name, schedule(problem, choices), method=method)


def _largest(job: PlanningJob, *, most: int) -> int:
    """Returns the fastest of a job's largest options on one node.

    Where no option fits one node, these are the options on the fewest nodes. most: the devices that the job may hold.
    """
    alone = [k for k, option in enumerate(job.options) if not option.jobs and option.num_devices <= most]
    fewest = min(job.options[k].num_nodes for k in alone)
    return max(
        (k for k in alone if job.options[k].num_nodes == fewest),
        key=lambda k: (job.options[k].num_devices, -job.options[k].runtime_s),
    )


def _smallest(job: PlanningJob) -> int:
    return min(useful_options(job), key=lambda k: (job.options[k].num_devices, job.options[k].runtime_s))


def _within(job: PlanningJob, share: int) -> int:
    fits = [k for k, option in enumerate(job.options) if option.num_devices <= share and not option.jobs]
    if not fits:
        return _smallest(job)
    return max(fits, key=lambda k: (job.options[k].num_devices, -job.options[k].runtime_s))


def _best_step(job: PlanningJob, k: int) -> list[tuple[float, int]]:
    """Returns the step from option `k` to the larger gang that gains most, as [(seconds gained per device, option)].

    The list is empty where no step gains.
    """
    now = job.options[k]
    gains = [
        ((now.runtime_s - job.options[i].runtime_s) / (job.options[i].num_devices - now.num_devices), i)
        for i in useful_options(job)
        if job.options[i].num_devices > now.num_devices and job.options[i].runtime_s < now.runtime_s
    ]
    return [max(gains, key=lambda gain: (gain[0], -gain[1]))] if gains else []
