"""Independent verifier of plans and certificates, which uses no solver.

Apart from the arithmetic of `bounds.bounds` and the objectives' values and bounds, it shares
no code with the planner, so that it finds the planner's mistakes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from ringmaster.tasks.planning.bounds.bounds import COUNTING, Bound, certified_bound, counted_bound_s, plain_bound_s
from ringmaster.tasks.planning.objectives import objective_by_name, objective_names
from ringmaster.tasks.planning.plans.plan import Plan, Segment
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.problems.problem_parts import Option, PlanningJob


def verify(plan: Plan, problem: Problem) -> list[str]:
    """Returns the faults of a plan as messages; an empty list means a valid plan whose bound and certificate hold.

    The segments of a job are those that do its work, including segments of other jobs whose option trains it.

    1. Work: a segment does (end - start - overhead) / runtime of its job and of all others that its option trains; a
       job's segments do all of it, exactly once.
    2. Overhead: a segment that does not continue the previous one (no pause, same option, same devices) pays its
       option's start-up, and the switch cost unless it is the job's first. A segment that is not continued pays a save,
       and the job's last segment an evaluation. The first segment of a job that has started also pays the switch cost;
       if it continues at time 0 what its job is running, it pays neither switch cost nor start-up. A pinned job
       continues unchanged until its pin ends or it is done.
    3. Gangs: a gang has the option's size, number of nodes and device type, on devices that exist and are still
       available. No device serves two segments at a time, and the host memory of a node suffices for all gangs on it.
       The gangs of a user's jobs hold no more devices at a time than its quota.
    4. Order: a job's segments do not overlap, start after its release and after the end of every job that it waits for,
       and end by its deadline.
    5. Bounds: the lower bound is not above the makespan, and the certificate proves it, or counting, or arithmetic
       without prices; likewise for the objective, with rules that it adds, such as budgets. What a solver
       claims is not above the makespan, and is not checked.
    """
    jobs = {job.id: job for job in problem.jobs}
    tolerance_s = min(0.01, 1e-6 * abs(plan.makespan_s) + 1e-9) if math.isfinite(plan.makespan_s) else 0.0
    faults: list[str] = []
    by_job: dict[str, list[Segment]] = {job_id: [] for job_id in jobs}
    by_device: dict[tuple[str, int], list[Segment]] = {}
    for i, segment in enumerate(plan.segments):
        place = f"segment {i} (job {segment.job})"
        fault = _unreadable(segment, jobs)
        if fault:
            faults.append(f"{place}: {fault}")
            continue
        option = jobs[segment.job].options[segment.option]
        faults += [f"{place}: {fault}" for fault in _segment_faults(segment, option, problem, tolerance_s)]
        for job_id in (segment.job, *option.jobs):
            by_job[job_id].append(segment)
        for node, ids in segment.devices:
            for device in ids:
                by_device.setdefault((node, device), []).append(segment)
    for (node, device), uses in by_device.items():
        for a, b in _overlaps(sorted(uses, key=lambda s: (s.start_s, s.end_s)), tolerance_s):
            faults.append(f"device {node}:{device} serves {a.job} and {b.job} at {b.start_s}")
    for job in problem.jobs:
        faults += _job_faults(job, by_job, jobs, problem.switch_cost_s, tolerance_s)
    faults += _shared_faults(plan, problem, tolerance_s) if not faults else []
    is_readable = all(_unreadable(segment, jobs) is None for segment in plan.segments)
    return faults + list(_bound_faults(plan, problem, is_readable=is_readable))


def _unreadable(segment: Segment, jobs: Mapping[str, PlanningJob]) -> str | None:
    if segment.job not in jobs:
        return "no such job"
    if not isinstance(segment.option, int) or not 0 <= segment.option < len(jobs[segment.job].options):
        return f"no such option: {segment.option!r}"
    numbers = (segment.start_s, segment.end_s, segment.work, segment.overhead_s)
    if not all(math.isfinite(number) for number in numbers):
        return "a number is not finite"
    return None


def _overlaps(segments: Sequence[Segment], tolerance_s: float) -> list[tuple[Segment, Segment]]:
    """Returns the pairs of segments, in the order of their starts, that overlap, if they do so for too long together.

    Each of many pairs may overlap for less than the tolerance.
    """
    pairs = [(a, b) for a, b in pairwise(segments) if b.start_s < a.end_s]
    overlap_s = math.fsum(a.end_s - b.start_s for a, b in pairs)
    if overlap_s <= tolerance_s:
        return []
    return [(a, b) for a, b in pairs if b.start_s < a.end_s - tolerance_s] or pairs[:1]


def _segment_faults(segment: Segment, option: Option, problem: Problem, tolerance_s: float) -> Iterator[str]:
    if segment.start_s < -tolerance_s or segment.end_s < segment.start_s - tolerance_s:
        yield f"impossible times {segment.start_s} to {segment.end_s}"
    if segment.overhead_s < 0 or segment.work < -1e-9:
        yield "negative overhead or work"
    work = _work(segment, option)
    if abs(work - segment.work) * option.runtime_s > tolerance_s:
        yield f"claims work {segment.work}, its time gives {work}"
    nodes = {node.id: node for node in problem.nodes}
    if len({node for node, _ in segment.devices}) != len(segment.devices):
        yield "names a node twice"
    if len(segment.devices) != option.num_nodes:
        yield f"is on {len(segment.devices)} nodes, its option requires {option.num_nodes}"
    for node, ids in segment.devices:
        if len(ids) != option.slot or len(set(ids)) != len(ids):
            yield f"has devices {ids} on node {node}, its option takes {option.slot} there"
        if node not in nodes or not all(0 <= device < nodes[node].num_devices for device in ids):
            yield f"is on a device that does not exist: {node}:{ids}"
            continue
        if option.device_type not in ("", nodes[node].device_type):
            yield f"is on {node}, whose devices are {nodes[node].device_type!r}, not {option.device_type!r}"
        until_s = nodes[node].available_until_s
        if until_s is not None and segment.end_s > until_s + tolerance_s:
            yield f"ends at {segment.end_s}, but node {node} goes away at {until_s}"


def _work(segment: Segment, option: Option) -> float:
    """Returns the share of a job that a segment has the time for."""
    return (segment.end_s - segment.start_s - segment.overhead_s) / option.runtime_s


def _shared_faults(plan: Plan, problem: Problem, tolerance_s: float) -> Iterator[str]:
    """Yields faults of what gangs share: the host memory of a node, and the quota of a user."""
    rows = [(segment, problem.job(segment.job)) for segment in plan.segments]
    for node in problem.nodes:
        if node.host_memory_bytes is not None:
            here = [(s, job) for s, job in rows if any(name == node.id for name, _ in s.devices)]
            uses = [(s, job.options[s.option].host_memory_bytes) for s, job in here]
            for now_s, used in _overuse(uses, node.host_memory_bytes, tolerance_s):
                yield f"node {node.id}: gangs take {used} bytes of {node.host_memory_bytes} at {now_s}"
    for user, most in problem.quotas.items():
        uses = [(s, sum(len(ids) for _, ids in s.devices)) for s, job in rows if job.user == user]
        for now_s, used in _overuse(uses, most, tolerance_s):
            yield f"{user}: its jobs hold {used} devices at {now_s}, its quota is {most}"


def _overuse(uses: Sequence[tuple[Segment, int]], most: int, tolerance_s: float) -> Iterator[tuple[float, int]]:
    """Yields when more than `most` is used for too long, all such times together, and how much; at most once."""
    used, over_s = 0, 0.0
    changes = sorted(pair for s, amount in uses for pair in ((s.start_s, amount), (s.end_s, -amount)))
    for (now_s, change), (next_s, _) in pairwise(changes):
        used += change
        over_s += next_s - now_s if used > most else 0.0
        if over_s > tolerance_s:
            yield now_s, used
            return


def _job_faults(
    job: PlanningJob,
    by_job: Mapping[str, list[Segment]],
    jobs: Mapping[str, PlanningJob],
    switch_cost_s: float,
    tolerance_s: float,
) -> Iterator[str]:
    """Yields faults of the segments that do a job's work: its own, and those of options that train it too."""
    own_segments = sorted(by_job[job.id], key=lambda s: (s.start_s, s.end_s))
    claimed = math.fsum(segment.work for segment in own_segments)
    # Each of many segments may have less time than its work takes, by up to the tolerance.
    used = [jobs[segment.job].options[segment.option] for segment in own_segments]
    done = math.fsum(_work(segment, option) for segment, option in zip(own_segments, used, strict=True))
    rounding = math.fsum(4 * math.ulp(s.end_s) / option.runtime_s for s, option in zip(own_segments, used, strict=True))
    if abs(claimed - 1) > 1e-6:
        yield f"job {job.id}: work {claimed:.9f} of 1"
    elif done < 1 - 1e-6 - rounding:
        yield f"job {job.id}: its segments have time for {done:.9f} of its work"
    for _, b in _overlaps(own_segments, tolerance_s):
        yield f"job {job.id}: its segments overlap at {b.start_s}"
    if not own_segments:
        return
    yield from _overhead_faults(job, own_segments, jobs, switch_cost_s, tolerance_s)
    yield from _pin_faults(job, own_segments, tolerance_s)
    if own_segments[0].start_s < job.release_s - tolerance_s:
        yield f"job {job.id}: starts at {own_segments[0].start_s}, before its release at {job.release_s}"
    if job.deadline_s is not None and own_segments[-1].end_s > job.deadline_s + tolerance_s:
        yield f"job {job.id}: ends at {own_segments[-1].end_s}, after its deadline at {job.deadline_s}"
    for other in job.after:
        ended_s = max((segment.end_s for segment in by_job[other]), default=0.0)
        if own_segments[0].start_s < ended_s - tolerance_s:
            yield f"job {job.id}: starts at {own_segments[0].start_s}, but waits for {other}, which ends at {ended_s}"


def _overhead_faults(
    job: PlanningJob,
    own_segments: Sequence[Segment],
    jobs: Mapping[str, PlanningJob],
    switch_cost_s: float,
    tolerance_s: float,
) -> Iterator[str]:
    """Yields a fault for each segment of a job, in order, that pays less than it owes."""
    goes_on = [_is_running(own_segments[0], jobs[own_segments[0].job], tolerance_s)]
    goes_on += [
        (a.job, a.option, _gang(a)) == (b.job, b.option, _gang(b)) and abs(b.start_s - a.end_s) <= tolerance_s
        for a, b in pairwise(own_segments)
    ]
    for k, segment in enumerate(own_segments):
        option, is_last = jobs[segment.job].options[segment.option], k == len(own_segments) - 1
        has_state = k > 0 or job.started
        owed_s = 0.0 if goes_on[k] else option.startup_s + (switch_cost_s if has_state else 0.0)
        owed_s += option.save_s if is_last or not goes_on[k + 1] else 0.0
        owed_s += option.evaluate_s if is_last else 0.0
        if segment.overhead_s < owed_s * (1 - 1e-9):
            verb = "switches" if has_state and not goes_on[k] else "runs"
            yield f"job {job.id}: {verb} at {segment.start_s} but pays {segment.overhead_s} of {owed_s}"


def _pin_faults(job: PlanningJob, own_segments: Sequence[Segment], tolerance_s: float) -> Iterator[str]:
    """Yields a fault if a pinned job does not continue as it ran, or not for long enough."""
    running = job.running
    if running is None or running.pinned_until_s <= tolerance_s:
        return
    if own_segments[0].job != job.id or not _is_running(own_segments[0], job, tolerance_s):
        yield f"job {job.id}: is pinned, but does not continue with what it is running"
        return
    ended_s, done = 0.0, 0.0
    for segment in own_segments:
        same = (segment.job, segment.option, _gang(segment)) == (job.id, running.option, running.gang)
        if not same or segment.start_s > ended_s + tolerance_s:
            break
        ended_s, done = segment.end_s, done + segment.work
    if ended_s < running.pinned_until_s - tolerance_s and done < 1 - 1e-6:
        yield f"job {job.id}: is pinned until {running.pinned_until_s}, but stops at {ended_s}"


def _is_running(segment: Segment, owner: PlanningJob, tolerance_s: float) -> bool:
    """Whether a segment continues at time 0 what its owner is running."""
    running = owner.running
    if running is None or abs(segment.start_s) > tolerance_s:
        return False
    return (segment.option, _gang(segment)) == (running.option, running.gang)


def _gang(segment: Segment) -> frozenset[tuple[str, int]]:
    return frozenset((node, device) for node, ids in segment.devices for device in ids)


def _bound_faults(plan: Plan, problem: Problem, *, is_readable: bool) -> Iterator[str]:
    makespan_s = plan.makespan_s
    for what, bound_s in (("lower bound", plan.lower_bound_s), ("bound of a solver", plan.solver_bound_s)):
        if bound_s is not None and not bound_s <= makespan_s * (1 + 1e-6):
            yield f"{what} {bound_s} above the makespan {makespan_s}"
    claims = {"lower_bound": plan.lower_bound_s, "solver_bound": plan.solver_bound_s, "value_bound": plan.value_bound}
    yield from (f"{key} is {bound}, below 0" for key, bound in claims.items() if bound is not None and bound < 0)
    try:
        proved_s = _proved_s(plan, problem)
    except ValueError as error:
        yield f"certificate: {error}"
        return
    if plan.certificate is not None and not proved_s <= makespan_s * (1 + 1e-6):
        yield f"certificate proves {proved_s}, above the makespan {makespan_s}"
    if plan.lower_bound_s is not None and not plan.lower_bound_s <= proved_s * (1 + 1e-6):
        yield f"lower bound {plan.lower_bound_s} claimed, {_proof_in_words(plan, problem, proved_s)}"
    if plan.objective not in objective_names():
        yield f"the objective {plan.objective!r} is unknown. To fix: install the package that registers it"
    elif is_readable:
        yield from objective_by_name(plan.objective).faults(plan, problem)
        value = objective_by_name(plan.objective).value(plan, problem)
        if plan.value is not None and not abs(value - plan.value) <= 1e-6 * max(1.0, abs(value)):
            yield f"{plan.objective} {plan.value} claimed, {value} found"
        if plan.value_bound is not None:
            yield from _value_bound_faults(plan, plan.value_bound, problem, value=value)


def _proved_s(plan: Plan, problem: Problem) -> float:
    """Returns the seconds before which no plan ends, as far as the plan proves. Raises ValueError on invalid prices."""
    if plan.certificate is not None:
        return certified_bound(plan.certificate, problem)
    plain_s = plain_bound_s(problem)
    return max(plain_s, counted_bound_s(problem)) if _is_counted(plan) else plain_s


def _is_counted(plan: Plan) -> bool:
    """Whether a plan is of the kind that counting bounds: it splits no job."""
    return plan.proof == COUNTING and len({segment.job for segment in plan.segments}) == len(plan.segments)


def _proof_in_words(plan: Plan, problem: Problem, proved_s: float) -> str:
    if plan.certificate is not None:
        return f"the certificate proves {proved_s}"
    if _is_counted(plan):
        return f"{COUNTING} proves {counted_bound_s(problem)}"
    return (
        f"but it has no prices, and without any {proved_s} are proved. To fix: plan again, or remove lower_bound, "
        "as a bound that a solver claims belongs into solver_bound"
    )


def _value_bound_faults(plan: Plan, value_bound: float, problem: Problem, *, value: float) -> Iterator[str]:
    """Yields a fault where the plan's certificates do not prove the bound on the value.

    value: the plan's value.
    """
    if not value_bound <= value * (1 + 1e-6):
        yield f"bound {value_bound} on {plan.objective} above {value}"
    objective = objective_by_name(plan.objective)
    try:
        # What counting proves holds for plans that split no job alone.
        bound_s = plain_bound_s(problem) if plan.certificate is None else certified_bound(plan.certificate, problem)
        proved = max(
            objective.certified_bound(plan.value_certificate, problem, bound_s=bound_s),
            objective.lower_bound(problem, Bound(bound_s, plan.certificate, plan.proof)),
        )
    except ValueError as error:
        yield f"certificate of {plan.objective}: {error}"
        return
    if not value_bound <= proved * (1 + 1e-6):
        yield f"bound {value_bound} on {plan.objective} claimed, its certificate proves {proved}"
