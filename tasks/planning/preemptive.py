"""Preemptive, malleable plans: jobs are divided among groups of nodes, and a configuration LP plans each group.

A *group* is one node, or as many as the widest gang spans. Within a group, column generation finds configurations (sets
of (job, option) that run together) and how long each runs. Local search orders them so that most gangs keep their
devices, and accounts for the cost of each switch. Between groups, annealing moves and swaps jobs on the exact values of
such plans. The global pattern LP remains the bound for the whole plan.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ringmaster.tasks.planning.bounds.bounds import MAX_STATES, Bound, num_states
from ringmaster.tasks.planning.kernels.assignment import Assignment, GroupArrays, assign, plan_group
from ringmaster.tasks.planning.kernels.configurations import INFEASIBLE, OptionTable, config_lp
from ringmaster.tasks.planning.kernels.sequences import JobShares, SwitchCosts, of_group, runs
from ringmaster.tasks.planning.node_groups import (
    NEVER,
    Floats,
    Ints,
    NodeGroups,
    Tables,
    TypeDivision,
    divided,
    groupings_of,
    longest_first,
    split_jobs,
    whole_jobs,
)
from ringmaster.tasks.planning.plans.plan import Certificate, Segment
from ringmaster.tasks.planning.plans.retiming import exactly
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.work import CORES, WorkBudget

PER_SWITCH = 5e-4  # minimum gain of a switch, in addition to its own seconds, as a share of the makespan
# Stages of annealing between groups: depth of polishing, sharpness, initial temperature for 4 groups, trials, and the
# largest share of the work that is left. The first stage uses the values of configuration LPs alone, which is a hundred
# times as fast as with polishing. Where there are many jobs per node, it suffices: their plans are hardly longer.
STAGES = ((0.0, 1000.0, 2e-3, 3.0, 0.5), (1.0, 1000.0, 2e-4, 0.15, 0.8))
STAGES_OF_MANY = ((0.0, 3000.0, 1e-4, 1.0, 0.5),)
STAGES_OF_WIDE = ((0.0, 1000.0, 2e-3, 1.0, 0.5), (1.0, 1000.0, 8e-4, 0.5, 0.8))  # the same, groups of several nodes
MANY = 10
STAGES_OF_TYPES = ((0.0, 1000.0, 1.5e-2, 10.0, 0.5), (1.0, 1000.0, 2e-4, 0.15, 0.8))
AGAIN = 0.3  # share of these trials, and of the last local search's, where jobs run at time 0
STEP_S = 2.5e-9  # work of a step of the kernels' loops
SLICE = 200  # trials of annealing between checks of the time limit, for ten members of a group or fewer
ORDERS = 1_000  # in which the pieces of a group of one node are laid out
MAX_MOVES = 20_000  # moves of the last local search of each group, for ten members or fewer

# The plan of a group takes about so much, times the cube of its members. A group of hundreds would take minutes, and
# list scheduling is next to optimal there.
PER_CUBED_MEMBER_S, MIN_WORK_S = 1e-6, 0.5
MAX_PRICING = 12_000  # limit of states x jobs in the check of work prices: half a second


def plan_preemptive(
    problem: Problem,
    bound: Bound,
    *,
    seed: int = 0,
    least_run_s: float | None = None,
    work: WorkBudget | None = None,
    effort: float = 1.0,
) -> tuple[Segment, ...] | None:
    """Returns the segments of a preemptive plan; None where some job fits no group, or where a group has so many jobs
    that its plan would take more than the work that is left. Ignores `after`.

    Nodes are planned in groups that are as small as the widest gang allows. A small cluster is also planned as one
    group.

    least_run_s: minimum run of a job that has several; None for five switch costs.
    work: limits the annealing between groups; None for no limit.
    effort: factor of the usual number of layouts and trials of the last local search.
    """
    work = work or WorkBudget()
    tables = Tables.of(problem, bound, least_run_s=least_run_s)
    attempts: list[tuple[Segment, ...] | None] = []
    groupings = groupings_of(problem)
    for i, nodes in enumerate(groupings):
        if attempts and work.is_over():
            break
        groups = NodeGroups.of(tables, nodes)
        with work.part(1 / (len(groupings) - i)) as own:
            attempts.append(_divided_plan(tables, groups, bound, seed, own, effort))
    # Exact pricing finds configurations that placing the largest gangs first cannot place.
    plans = [
        plan
        for plan in attempts
        if plan and all(len(s.devices) == problem.job(s.job).options[s.option].num_nodes for s in plan)
    ]
    return min(plans, key=lambda segments: max(s.end_s for s in segments), default=None)


def _divided_plan(
    tables: Tables, groups: NodeGroups, bound: Bound, seed: int, work: WorkBudget, effort: float
) -> tuple[Segment, ...] | None:
    """Returns the segments of a plan with given groups; on several types of devices, some jobs change between them."""
    parts = whole_jobs(tables, groups)
    division = _division(tables, groups, parts, bound, work)
    if division is None:
        return _plan_of(tables, groups, parts, None, seed, work, effort)
    divided, kinds = split_jobs(tables, parts, division)
    planned = _plan_of(tables, groups, divided, kinds, seed, work, effort)
    if planned is None:
        return _plan_of(tables, groups, parts, kinds[: parts.job.size], seed, work, effort)
    if not division.splits:
        return planned
    # The windows of parts were given; together, parts and windows may fit better.
    return exactly(tables.problem, planned, least_s=tables.least_run_s)


def _division(
    tables: Tables, groups: NodeGroups, parts: JobShares, bound: Bound, work: WorkBudget
) -> TypeDivision | None:
    problem = tables.problem
    if len(problem.device_types) == 1:
        return None
    return divided(
        problem,
        bound,
        costs=[float(cost) for cost in tables.cost.min(axis=0)],
        most=[int((groups.kinds == kind).sum()) for kind in range(len(problem.device_types))],
        homes={j: (int(g), int(groups.kinds[g])) for j, g in enumerate(parts.home) if g >= 0},
        least_s=tables.least_run_s,
        work=work,
    )


def _plan_of(
    tables: Tables,
    groups: NodeGroups,
    parts: JobShares,
    kinds: Ints | None,
    seed: int,
    work: WorkBudget,
    effort: float,
) -> tuple[Segment, ...] | None:
    """Returns the segments of a plan of the parts; None where a part fits no group."""
    guess = longest_first(tables, groups, parts, kinds)
    if guess is None or PER_CUBED_MEMBER_S * max(map(len, guess)) ** 3 > max(MIN_WORK_S, work.left_s):
        return None
    members = _annealed(tables, groups, parts, guess, seed, work)
    return _planned(tables, groups, parts, members, work, effort)


def work_prices(problem: Problem, bound: Bound) -> Certificate | None:
    """Returns prices of the jobs' work from the configuration LP of all nodes.

    They may prove a higher bound than the pattern LP. Returns None where there are several device types, or where the
    check of the prices would take too long.
    """
    if (
        len(problem.device_types) > 1
        or num_states(problem) > MAX_STATES
        or num_states(problem) * len(problem.jobs) > MAX_PRICING
    ):
        return None
    tables = Tables.of(problem, bound)
    everything = np.arange(len(problem.jobs), dtype=np.int32)
    layout = np.array(sorted((node.num_devices for node in problem.nodes), reverse=True), np.int32)
    ones, never = np.ones(everything.size), np.full(everything.size, NEVER)
    *_, prices = config_lp(everything, ones, never, tables.options_of(0), layout, np.zeros(1))
    return Certificate(work_prices={job.id: max(0.0, float(p)) for job, p in zip(problem.jobs, prices, strict=True)})


def _planned(
    tables: Tables, groups: NodeGroups, parts: JobShares, members: Sequence[Ints], work: WorkBudget, effort: float
) -> tuple[Segment, ...] | None:
    """Returns the plans of all groups together; groups are planned in parallel on two cores."""
    segments: list[Segment] = []
    every = range(len(groups.nodes))
    with ThreadPoolExecutor(CORES) as pool, work.parallel(len(every)) as works:
        planned = pool.map(lambda g: _group_segments(tables, groups, parts, g, members[g], works[g], effort), every)
        for plan in planned:
            if plan is None:
                return None
            segments += plan
    return tuple(sorted(segments, key=lambda s: (s.start_s, s.job)))


def _with_liking(tables: Tables, parts: JobShares) -> OptionTable:
    """Returns the options, with a higher rate for those that are running, by the switch that continuing saves."""
    rules, options = _rules(tables), tables.options
    liked, held = options.rate.copy(), parts.held[parts.held >= 0]
    liked[held] *= 1.0 + (rules.switch + rules.per_switch) * liked[held]
    with_liking: OptionTable = options._replace(liked=liked)
    return with_liking


def _annealed(
    tables: Tables,
    groups: NodeGroups,
    parts: JobShares,
    members: Sequence[Sequence[int]],
    seed: int,
    work: WorkBudget,
) -> list[Ints]:
    """Returns jobs by group after annealing: the better of two searches with different seeds, which run in parallel."""
    num_groups, num_jobs = len(members), parts.job.size
    if num_groups == 1:
        return [np.array(members[0], np.int32)]
    width = min(num_jobs, max(map(len, members)) + 8)
    per_group = num_jobs / num_groups
    budget = int(np.clip(60_000 / per_group**1.5, 400, 4_000) * min(3.0, 1.0 + num_groups / 32))
    stages = _stages(tables, groups, per_group)
    sites, options = _sites(tables, groups), _with_liking(tables, parts)
    budget = int(budget * _again(parts))
    cooler = min(1.0, max(0.25, 4 / num_groups))
    between = max(5, int(SLICE * min(1.0, (10 / per_group) ** 2)))

    def search(own_seed: int, own: WorkBudget) -> Assignment:
        now = Assignment(np.zeros((num_groups, width), np.int32), np.zeros(num_groups, np.int32), np.zeros(num_groups))
        for g, jobs in enumerate(members):
            now.members[g, : len(jobs)], now.counts[g] = jobs, len(jobs)
        for depth, sharpness, heat, times, share in stages:
            trials = int(times * budget)
            best = Assignment(*(array.copy() for array in now))
            clock, is_done, begins = np.zeros(2, np.int64), False, own_seed
            steps = np.array([0.0, max(1.0, share * own.left_s / STEP_S)])
            while not is_done and not (begins < 0 and own.is_late()):
                is_done = assign(
                    now, best, clock, parts, sites, options, _rules(tables),
                    depth, sharpness, heat * cooler, trials, clock[0] + between, begins, steps,
                )  # fmt: skip
                begins = -1
            own.charge(STEP_S * steps[0])
            now = best
        return now

    with ThreadPoolExecutor(CORES) as pool, work.parallel(2) as works:
        assigned = min(pool.map(search, [2 * seed, 2 * seed + 1], works), key=lambda now: float(now.score.max()))
    return [assigned.members[g, : assigned.counts[g]].copy() for g in range(num_groups)]


def _stages(tables: Tables, groups: NodeGroups, per_group: float) -> tuple[tuple[float, ...], ...]:
    """Returns the stages of annealing between groups of so many jobs each."""
    if len(tables.problem.device_types) > 1:
        return STAGES_OF_TYPES
    if per_group <= MANY:
        return STAGES
    return STAGES_OF_MANY if groups.layouts.shape[1] == 1 else STAGES_OF_WIDE


def _again(parts: JobShares) -> float:
    """Returns the share of the usual trials that a plan takes: fewer where running jobs are already well placed."""
    return AGAIN if (parts.home >= 0).any() else 1.0


def _sites(tables: Tables, groups: NodeGroups) -> GroupArrays:
    """Returns the groups as arrays for kernels."""
    return GroupArrays(groups.kinds, groups.layouts, groups.worth, tables.cost, tables.own)


def _rules(tables: Tables) -> SwitchCosts:
    """Returns the cost of switches, in units of the bound."""
    switch = tables.problem.switch_cost_s / tables.unit_s
    return SwitchCosts(switch, tables.least_run_s / tables.unit_s, PER_SWITCH)


def _group_segments(
    tables: Tables, groups: NodeGroups, parts: JobShares, group: int, members: Ints, work: WorkBudget, effort: float
) -> list[Segment] | None:
    """Returns the segments of one group; None where a job fits none of its nodes."""
    if members.size == 0:
        return []
    layout = groups.layout(group)
    per_group = min(1.0, 24.0 / len(groups.nodes)) * min(1.0, (10.0 / members.size) ** 2)
    # With no trial at all, the sequence would not account for switches.
    trials = max(1, int(effort * np.clip(MAX_MOVES * per_group * _again(parts), 500, MAX_MOVES)))
    sites, steps = _sites(tables, groups), np.zeros(1)
    score, _, sequence, times, _ = plan_group(
        members,
        group,
        parts,
        sites,
        _with_liking(tables, parts),
        _rules(tables),
        trials,
        1_000,
        ORDERS,
        INFEASIBLE,
        steps,
    )
    work.charge(STEP_S * steps[0])
    if score >= INFEASIBLE:
        return None
    here = of_group(parts, members, group, layout.size)
    starts = np.zeros(sequence.shape, np.bool_)
    located = np.zeros((*sequence.shape, layout.size), np.bool_)
    runs(sequence, len(sequence), here, tables.options_of(int(groups.kinds[group])), layout, starts, located)
    return realise(tables, groups.nodes[group], parts, members, sequence, times, starts, located)


Gang = tuple[tuple[int, tuple[int, ...]], ...]


def realise(
    tables: Tables,
    nodes: Sequence[int],
    parts: JobShares,
    members: Ints,
    sequence: Ints,
    times: Floats,
    starts: Any,
    located: Any,
) -> list[Segment]:
    """Returns the segments of a group's sequence.

    A gang that continues keeps its devices, also those from before the plan. A job ends as soon as its work is done.

    sequence, times: sequence[k, i] is the option of member i in configuration k, or -1; the configuration lasts
        times[k].
    starts: starts[k, i] is whether a run begins there.
    located: located[k, i, v] is whether the member is on the group's node v.
    """
    problem, ends = tables.problem, np.concatenate([[0.0], np.cumsum(times)])
    held: dict[int, Gang] = {}
    segments, done, ran = [], np.zeros(members.size), np.zeros(members.size, np.int64)
    for k in range(len(sequence)):
        held = {i: gang for i, gang in held.items() if sequence[k, i] >= 0 and not starts[k, i]}
        if k == 0:
            goes_on = [i for i in range(members.size) if sequence[0, i] >= 0 and not starts[0, i]]
            held = {i: _running(tables, nodes, int(parts.job[members[i]])) for i in goes_on}
        else:
            goes_on = []
        taken = {(v, d) for gang in held.values() for v, ids in gang for d in ids}
        begin = [int(i) for i in np.flatnonzero(starts[k])]
        for i in begin:
            o = int(sequence[k, i])
            held[i] = _gang(problem.nodes, nodes, located[k, i], int(tables.options.slot[o]), taken)
        for i in sorted([*begin, *goes_on]):
            o = int(sequence[k, i])
            stop = k + 1
            while stop < len(sequence) and sequence[stop, i] == o and not starts[stop, i]:
                stop += 1
            part = int(members[i])
            job = problem.jobs[parts.job[part]]
            runtime_s = job.options[tables.index[o]].runtime_s
            pays = i not in goes_on and (ran[i] > 0 or parts.moved[part])
            overhead_s = problem.switch_cost_s if pays else 0.0
            length_s = (ends[stop] - ends[k]) * tables.unit_s
            work = min(parts.share[part] - done[i], (length_s - overhead_s) / runtime_s)
            if work <= 1e-12:
                continue
            done[i] += work
            ran[i] += 1
            start_s = float(ends[k] * tables.unit_s)
            segments.append(
                Segment(
                    job=job.id,
                    option=int(tables.index[o]),
                    start_s=start_s,
                    end_s=start_s + overhead_s + float(work) * runtime_s,
                    work=float(work),
                    overhead_s=overhead_s,
                    devices=tuple((problem.nodes[nodes[v]].id, ids) for v, ids in held[i]),
                )
            )
    return segments


def _running(tables: Tables, nodes: Sequence[int], job: int) -> Gang:
    """Returns the devices on which a job runs at time 0, by index of the group's nodes."""
    running = tables.problem.jobs[job].running
    assert running is not None, "only a job that runs continues"
    place = {tables.problem.nodes[n].id: v for v, n in enumerate(nodes)}
    return tuple((place[node], tuple(ids)) for node, ids in running.devices)


def _gang(every: Sequence[Any], nodes: Sequence[int], on: Any, slot: int, taken: set[tuple[int, int]]) -> Gang:
    """Returns the first free devices on the nodes v with on[v], and adds them to `taken`."""
    gang = []
    for v in map(int, np.flatnonzero(on)):
        free = (d for d in range(every[nodes[v]].num_devices) if (v, d) not in taken)
        ids = tuple(d for d, _ in zip(free, range(slot), strict=False))
        assert len(ids) == slot, "the configuration fits"
        taken |= {(v, d) for d in ids}
        gang.append((v, ids))
    return tuple(gang)
