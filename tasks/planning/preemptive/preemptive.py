"""Preemptive, malleable plans: jobs are divided among groups of nodes, and a configuration LP plans each group.

A *group* is one node, or as many as the widest gang spans. Within a group, column generation finds configurations (sets
of (job, option) that run together) and how long each runs. Local search orders them so that most gangs keep their
devices, and accounts for the cost of each switch. Between groups, annealing moves and swaps jobs on the exact values of
such plans. The global pattern LP remains the bound for the whole plan.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from ringmaster.tasks.planning.bounds.bounds import Bound
from ringmaster.tasks.planning.bounds.certificates import MAX_STATES, num_states
from ringmaster.tasks.planning.kernels.packing import OptionTable
from ringmaster.tasks.planning.kernels.tables import NEVER, Ints, NodeGroups, Tables
from ringmaster.tasks.planning.plans.plan import Certificate, Segment
from ringmaster.tasks.planning.plans.retiming import retimed
from ringmaster.tasks.planning.preemptive.assignment import Assignment, GroupArrays, assign, plan_group
from ringmaster.tasks.planning.preemptive.config_lp import INFEASIBLE, config_lp
from ringmaster.tasks.planning.preemptive.parts import split_jobs, whole_jobs
from ringmaster.tasks.planning.preemptive.realise import realise
from ringmaster.tasks.planning.preemptive.sequences import Parts, Rules, of_group, runs
from ringmaster.tasks.planning.preemptive.splitting import Division, divided
from ringmaster.tasks.planning.problems.problem import Problem
from ringmaster.tasks.planning.work import CORES, WorkBudget

PER_SWITCH = 5e-4  # minimum gain of a switch, beside its own seconds, as a share of the makespan
# Stages of annealing between groups: depth of polishing, sharpness, initial temperature for 4 groups, and trials. The
# first stage uses the values of configuration LPs alone, which is a hundred times as fast as with polishing.
STAGES = ((0.0, 1000.0, 2e-3, 3.0), (1.0, 1000.0, 2e-4, 0.15))
STAGES_OF_MANY = ((0.0, 1000.0, 2e-3, 1.0), (1.0, 1000.0, 8e-4, 0.5))  # where LPs predict less: many jobs per group
MANY = 10
STAGES_OF_TYPES = ((0.0, 1000.0, 1.5e-2, 10.0), (1.0, 1000.0, 2e-4, 0.15))
AGAIN = 0.3  # share of these trials, and of the last local search's, where jobs run at time 0
SHARES = (0.5, 0.8)  # of the work that is left, at most, for each stage; the rest is for the last local search
STEP_S = 2.5e-9  # work of a step of the kernels' loops
SLICE = 200  # trials of annealing between checks of the time limit, for ten members of a group or fewer
TRIALS = 20_000  # trials of the last local search of each group, for ten members or fewer

OTHER_TYPE = 1e3  # penalty, in units of the bound, on devices of a type that was not chosen for the job
WRONG_TYPE = 0.3  # penalty, in units of the bound, on devices where a job costs twice as much
MAX_JOBS_AS_ONE, MAX_NODES_AS_ONE = 20, 8
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
    """Returns the segments of a preemptive plan; None where some job fits no group. Ignores `after`.

    Nodes are planned in groups that are as small as the widest gang allows. A small cluster is also planned as one
    group.

    least_run_s: minimum run of a job that has several; None for five switch costs.
    work: limits the annealing between groups; None for no limit.
    effort: factor of the usual number of trials of the last local search.
    """
    work = work or WorkBudget()
    tables = Tables.of(problem, bound, least_run_s=least_run_s)
    found: list[tuple[Segment, ...] | None] = []
    for nodes in _groupings(problem):
        groups = NodeGroups.of(tables, nodes)
        if not (found and work.is_over()):
            found.append(_divided_plan(tables, groups, bound, seed, work, effort))
    # Exact pricing finds configurations that placing the largest gangs first cannot place.
    plans = [plan for plan in found if plan is not None and all(_is_placed(s, problem) for s in plan)]
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
    found = _plan_of(tables, groups, divided, kinds, seed, work, effort)
    if found is None:
        return _plan_of(tables, groups, parts, kinds[: parts.job.size], seed, work, effort)
    if not division.splits:
        return found
    # The windows of parts were given; together, parts and windows may fit better.
    return retimed(tables.problem, found, least_s=tables.least_run_s) or retimed(tables.problem, found)


def _division(tables: Tables, groups: NodeGroups, parts: Parts, bound: Bound, work: WorkBudget) -> Division | None:
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
    parts: Parts,
    kinds: Ints | None,
    seed: int,
    work: WorkBudget,
    effort: float,
) -> tuple[Segment, ...] | None:
    """Returns the segments of a plan of the parts; None where a part fits no group."""
    guess = _longest_first(tables, groups, parts, kinds)
    if guess is None:
        return None
    members = _annealed(tables, groups, parts, guess, seed, work)
    return _planned(tables, groups, parts, members, work, effort)


def _is_placed(segment: Segment, problem: Problem) -> bool:
    """Whether a segment has all nodes that its option needs."""
    return len(segment.devices) == problem.job(segment.job).options[segment.option].num_nodes


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


def _groupings(problem: Problem) -> list[list[list[int]]]:
    """Returns divisions of the nodes: groups just wide enough for any gang, and one group where it is affordable."""
    narrow = _grouped(problem)
    if (
        len(problem.device_types) == 1 < len(narrow)
        and len(problem.nodes) <= MAX_NODES_AS_ONE
        and len(problem.jobs) <= MAX_JOBS_AS_ONE
    ):
        return [narrow, [list(range(len(problem.nodes)))]]
    return [narrow]


def _planned(
    tables: Tables, groups: NodeGroups, parts: Parts, members: Sequence[Ints], work: WorkBudget, effort: float
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


def _grouped(problem: Problem) -> list[list[int]]:
    """Returns groups of nodes of one type, as small as the widest gang allows, with similar sizes together.

    The nodes of a running gang stay in one group.
    """
    span = max(option.num_nodes for job in problem.jobs for option in job.options)
    tied = _tied(problem)
    grouped = []
    for kind in problem.device_types:
        of_kind = [v for v, node in enumerate(problem.nodes) if node.device_type == kind]
        of_kind.sort(key=lambda v: (-problem.nodes[v].num_devices, v))
        num_groups = max(1, len(of_kind) // span)
        ends = [g * len(of_kind) // num_groups for g in range(num_groups + 1)]
        chunks = [set(of_kind[a:b]) for a, b in pairwise(ends)]
        for together in tied:
            touched = [chunk for chunk in chunks if chunk & together]
            if len(touched) > 1:
                chunks = [chunk for chunk in chunks if not chunk & together] + [set().union(*touched)]
        grouped += sorted(sorted(chunk) for chunk in chunks) if tied else [sorted(chunk) for chunk in chunks]
    return grouped


def _with_liking(tables: Tables, parts: Parts) -> OptionTable:
    """Returns the options, with a higher rate for those that are running, by the switch that continuing saves."""
    rules, options = _rules(tables), tables.options
    liked, held = options.rate.copy(), parts.held[parts.held >= 0]
    liked[held] *= 1.0 + (rules.switch + rules.per_switch) * liked[held]
    return options._replace(liked=liked)


def _tied(problem: Problem) -> list[set[int]]:
    """Returns the indices of the nodes of each running gang over several nodes."""
    place = {node.id: v for v, node in enumerate(problem.nodes)}
    gangs = [job.running.devices for job in problem.jobs if job.running]
    return [{place[node] for node, _ in devices} for devices in gangs if len(devices) > 1]


def _longest_first(tables: Tables, groups: NodeGroups, parts: Parts, kinds: Ints | None) -> list[list[int]] | None:
    """Assigns parts to groups, the most costly first, each where it ends first at the certificate's prices.

    Running parts come before all others, and stay in their group. A group gets at most one part with a window. Returns
    None where a part fits no group.

    kinds: the kind of nodes of each part; None for any.
    """
    num_groups = len(groups.nodes)
    members: list[list[int]] = [[] for _ in range(num_groups)]
    load, own = np.zeros(num_groups), np.zeros(num_groups)
    able = np.array([[_fits(tables, groups, g, j) for j in range(tables.own.size)] for g in range(num_groups)])
    cost, has_window = tables.cost[:, parts.job] * parts.share, np.zeros(num_groups, np.bool_)
    for p in np.lexsort((-cost.min(axis=0), parts.within >= NEVER, parts.home < 0)):
        j, is_window = parts.job[p], parts.within[p] < NEVER
        ends = (load + cost[groups.kinds, p]) / (groups.worth + own + tables.own[j])
        # At the prices, a job belongs where it costs least; elsewhere, `ends` underestimates its time.
        ends += WRONG_TYPE * (cost[groups.kinds, p] / cost[:, p].min() - 1.0)
        ends[~able[:, j]] = np.inf
        ends[has_window & is_window] = np.inf
        ends += np.where(groups.kinds == kinds[p], 0.0, OTHER_TYPE) if kinds is not None else 0.0
        home = int(parts.home[p])
        stays = home >= 0 and (kinds is None or groups.kinds[home] == kinds[p] or parts.pinned[p] > 0.0)
        g = home if stays else int(np.argmin(ends))
        if not np.isfinite(ends[g]):
            return None
        members[g].append(int(p))
        load[g] += cost[groups.kinds[g], p]
        own[g] += tables.own[j]
        has_window[g] |= is_window
    return members


def _fits(tables: Tables, groups: NodeGroups, group: int, job: int) -> bool:
    """Whether some option of the job fits the group's nodes."""
    kind, layout = groups.kinds[group], groups.layout(group)
    return any(
        (layout >= tables.slot[o]).sum() >= tables.spread[o]
        for o in range(tables.first[kind, job], tables.last[kind, job])
    )


def _annealed(
    tables: Tables,
    groups: NodeGroups,
    parts: Parts,
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
    stages = (
        STAGES_OF_TYPES if len(tables.problem.device_types) > 1 else STAGES if per_group <= MANY else STAGES_OF_MANY
    )
    sites, options = _sites(tables, groups), _with_liking(tables, parts)
    budget = int(budget * _again(parts))
    cooler = min(1.0, max(0.25, 4 / num_groups))
    between = max(5, int(SLICE * min(1.0, (10 / per_group) ** 2)))

    def search(own_seed: int, own: WorkBudget) -> Assignment:
        now = Assignment(np.zeros((num_groups, width), np.int32), np.zeros(num_groups, np.int32), np.zeros(num_groups))
        for g, jobs in enumerate(members):
            now.members[g, : len(jobs)], now.counts[g] = jobs, len(jobs)
        for (depth, sharpness, heat, times), share in zip(stages, SHARES, strict=True):
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
        found = min(pool.map(search, [2 * seed, 2 * seed + 1], works), key=lambda now: float(now.score.max()))
    return [found.members[g, : found.counts[g]].copy() for g in range(num_groups)]


def _again(parts: Parts) -> float:
    """Returns the share of the usual trials that a plan takes: fewer where running jobs are already well placed."""
    return AGAIN if (parts.home >= 0).any() else 1.0


def _sites(tables: Tables, groups: NodeGroups) -> GroupArrays:
    """Returns the groups as arrays for kernels."""
    return GroupArrays(groups.kinds, groups.layouts, groups.worth, tables.cost, tables.own)


def _rules(tables: Tables) -> Rules:
    """Returns the cost of switches, in units of the bound."""
    switch = tables.problem.switch_cost_s / tables.unit_s
    return Rules(switch, tables.least_run_s / tables.unit_s, PER_SWITCH)


def _group_segments(
    tables: Tables, groups: NodeGroups, parts: Parts, group: int, members: Ints, work: WorkBudget, effort: float
) -> list[Segment] | None:
    """Returns the segments of one group; None where a job fits none of its nodes."""
    if members.size == 0:
        return []
    layout = groups.layout(group)
    per_group = min(1.0, 24.0 / len(groups.nodes)) * min(1.0, (10.0 / members.size) ** 2)
    # With no trial at all, the sequence would not account for switches.
    trials = max(1, int(effort * np.clip(TRIALS * per_group * _again(parts), 500, TRIALS)))
    sites, steps = _sites(tables, groups), np.zeros(1)
    score, _, sequence, times, _ = plan_group(
        members, group, parts, sites, _with_liking(tables, parts), _rules(tables), trials, 1_000, INFEASIBLE, steps
    )
    work.charge(STEP_S * steps[0])
    if score >= INFEASIBLE:
        return None
    here = of_group(parts, members, group, layout.size)
    starts = np.zeros(sequence.shape, np.bool_)
    located = np.zeros((*sequence.shape, layout.size), np.bool_)
    runs(sequence, len(sequence), here, tables.options_of(int(groups.kinds[group])), layout, starts, located)
    return realise(tables, groups.nodes[group], parts, members, sequence, times, starts, located)
