# Numba infers the types of arguments; annotations would only repeat "array".
# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-defs, allow-untyped-calls
"""Kernels of planning under constraints: places lists of jobs, and anneals over such lists.

A list is an order of the jobs and an option for each job. `listed` places the jobs in that order, each where it can
start first, as `list_scheduling.schedule` does. Times are in units of a lower bound.
"""

from collections import namedtuple

import numpy as np

from ringmaster.tasks.planning.kernels import kernel
from ringmaster.tasks.planning.kernels.annealing import shift

NEVER = 1e18
LATE = 20.0  # weight of lateness

Options = namedtuple("Options", "first last slot spread runtime startup save evaluate memory runs_on")
"""Options of all jobs in one row.

first, last: the options of job j are first[j] .. last[j] - 1.
runs_on: runs_on[o, v] is whether option o runs on node v.
"""

Jobs = namedtuple("Jobs", "release due weight latest started running runs_at waits_from waits quota")
"""Attributes of each job.

weight: what each unit of time adds to the objective by which job j ends later; `Rules.scale` divides it.
latest: the factor of the end of job j in the last end.
running, runs_at: running[j] is the option under which job j runs at time 0, or -1, on the nodes v with runs_at[j, v].
waits_from, waits: job j waits for the jobs waits[waits_from[j] : waits_from[j + 1]].
quota: the index of the quota of its user, or -1.
"""

Nodes = namedtuple("Nodes", "size until price memory")
"""Attributes of each node: number of devices, end of availability, price of a device, and host memory.

price: what a device adds to the objective in each unit of time, divided by `Rules.scale`.
"""

Rules = namedtuple("Rules", "scale per_last per_end switch cheaply quotas")
"""Rules of a search.

scale: the value of the objective that counts as one unit of time.
per_last: weight of the last end.
per_end: weight of early ends relative to that of the last one; 0 if not only the last end counts.
switch: the cost of a switch.
cheaply: prefer cheap nodes.
quotas: the most devices that the jobs of each user may hold at a time.
"""


@kernel
def length_of(j, option, options, jobs, rules):
    """Returns the time of job j under its option, including its overhead."""
    o = option[j]
    length = options.runtime[o] + options.save[o] + options.evaluate[o]
    if jobs.running[j] != o:
        length += options.startup[o]
        if jobs.started[j]:
            length += rules.switch
    return length


@kernel
def hold(v, slot, start, end, free):
    """Reserves `slot` devices of row v from `start`, those that became free last, until `end`."""
    size, top = free.shape[1], slot
    while top < size and free[v, top] <= start:
        top += 1
    for d in range(top - slot, top):
        free[v, d] = end
    # The row is sorted except for these equal times: move them after the smaller ones.
    for d in range(top, size):
        if free[v, d] >= end:
            break
        free[v, d - slot] = free[v, d]
        free[v, d] = end


@kernel
def with_memory(v, need, start, length, limit, held, num_held):
    """Returns the first time from `start` at which node v has `need` memory for `length`.

    held: held[v, :num_held[v]] are the (start, end, size) of the memory that is in use.
    """
    if need <= 0.0 or limit >= NEVER:
        return start
    candidate = start
    while True:
        used, soonest = 0.0, NEVER
        for r in range(num_held[v]):
            if held[v, r, 1] > candidate and held[v, r, 0] < candidate + length:
                used += held[v, r, 2]
            if held[v, r, 1] > candidate:
                soonest = min(soonest, held[v, r, 1])
        if used + need <= limit * (1 + 1e-12):
            return candidate
        if soonest >= NEVER:
            return NEVER
        candidate = soonest


@kernel
def listed(order, option, options, jobs, nodes, rules, free, held, num_held, ends):
    """Returns the energy of a list, lower is better; NEVER where the list is infeasible.

    ends: ends[j] is set to the end of job j.
    free: scratch array with a row for each node, and one for each quota, whose devices are placed in the same way.
    held, num_held: scratch arrays.
    """
    m, n = nodes.size.size, jobs.release.size
    free[:] = NEVER
    for v in range(m):
        free[v, : nodes.size[v]] = 0.0
    for g in range(rules.quotas.size):
        free[m + g, : rules.quotas[g]] = 0.0
    num_held[:] = 0
    paid = 0.0
    starts, taken, placed = np.empty(m), np.zeros(m, np.bool_), np.zeros(n, np.bool_)
    for j in range(n):
        o = option[j]
        if jobs.running[j] == o:
            length = length_of(j, option, options, jobs, rules)
            for v in range(m):
                if jobs.runs_at[j, v]:
                    if length > nodes.until[v]:
                        return NEVER
                    slot = options.slot[o]
                    hold(v, slot, 0.0, length, free)
                    paid += length * slot * nodes.price[v]
                    if options.memory[o] > 0.0 and nodes.memory[v] < NEVER:
                        held[v, num_held[v], 0], held[v, num_held[v], 1] = 0.0, length
                        held[v, num_held[v], 2] = options.memory[o]
                        num_held[v] += 1
            ends[j] = length
            if jobs.quota[j] >= 0:
                if free[m + jobs.quota[j], options.slot[o] * options.spread[o] - 1] > 0.0:
                    return NEVER
                hold(m + jobs.quota[j], options.slot[o] * options.spread[o], 0.0, length, free)
    for j in order:
        o = option[j]
        ready = jobs.release[j]
        for w in range(jobs.waits_from[j], jobs.waits_from[j + 1]):
            if not placed[jobs.waits[w]]:
                return NEVER
            ready = max(ready, ends[jobs.waits[w]])
        placed[j] = True
        if jobs.running[j] == o:
            continue
        length = length_of(j, option, options, jobs, rules)
        slot, need = options.slot[o], options.memory[o]
        if jobs.quota[j] >= 0:
            ready = max(ready, free[m + jobs.quota[j], slot * options.spread[o] - 1])
        for v in range(m):
            starts[v] = NEVER
            if options.runs_on[o, v]:
                s = max(ready, free[v, slot - 1])
                s = with_memory(v, need, s, length, nodes.memory[v], held, num_held)
                if s + length <= nodes.until[v]:
                    starts[v] = s
        start = 0.0
        taken[:] = False
        for _ in range(options.spread[o]):
            pick = -1
            for v in range(m):
                if taken[v] or starts[v] >= NEVER:
                    continue
                if pick < 0:
                    pick = v
                elif rules.cheaply:
                    late_v, late_p = starts[v] + length > jobs.due[j], starts[pick] + length > jobs.due[j]
                    if late_v != late_p:
                        pick = v if late_p else pick
                    elif not late_v and nodes.price[v] != nodes.price[pick]:
                        pick = v if nodes.price[v] < nodes.price[pick] else pick
                    elif starts[v] < starts[pick]:
                        pick = v
                elif starts[v] < starts[pick]:
                    pick = v
                elif starts[v] == starts[pick] and options.spread[o] == 1:
                    waste_v, waste_p = 0.0, 0.0
                    for d in range(free.shape[1]):
                        waste_v += max(0.0, starts[v] - free[v, d])
                        waste_p += max(0.0, starts[v] - free[pick, d])
                    if waste_v < waste_p:
                        pick = v
            if pick < 0:
                return NEVER
            taken[pick] = True
            start = max(start, starts[pick])
        end = start + length
        for v in range(m):
            if not taken[v]:
                continue
            if options.spread[o] > 1 and (
                end > nodes.until[v] or with_memory(v, need, start, length, nodes.memory[v], held, num_held) > start
            ):
                return NEVER
            hold(v, slot, start, end, free)
            paid += length * slot * nodes.price[v]
            if need > 0.0 and nodes.memory[v] < NEVER:
                held[v, num_held[v], 0], held[v, num_held[v], 1], held[v, num_held[v], 2] = start, end, need
                num_held[v] += 1
        ends[j] = end
        if jobs.quota[j] >= 0:
            hold(m + jobs.quota[j], slot * options.spread[o], start, end, free)
    late, last, weighted = 0.0, 0.0, 0.0
    for j in range(n):
        last = max(last, jobs.latest[j] * ends[j])
        late += max(0.0, ends[j] - jobs.due[j])
        weighted += jobs.weight[j] * ends[j]
    energy = LATE * late + (0.01 if late > 1e-9 else 0.0)
    energy += weighted / rules.scale + paid
    energy += rules.per_last * last
    if rules.per_end > 0.0:
        whole, num = 0.0, 0
        for v in range(m):
            for d in range(nodes.size[v]):
                whole += min(last, free[v, d])
                num += 1
        energy += rules.per_end * whole / num
    return energy


@kernel
def move(order, option, options, ends):
    """Changes a list at random, in place: moves a job, swaps two jobs, or changes an option. Returns whether it did.

    Half of the jobs are chosen among those that end late.
    """
    length = order.size
    a = np.random.randint(length)
    if np.random.random() < 0.5:
        for _ in range(3):
            other = np.random.randint(length)
            if ends[order[other]] > ends[order[a]]:
                a = other
    j, kind = order[a], np.random.random()
    if kind < 0.25:
        if np.random.random() < 0.5:
            b = np.random.randint(length)
        else:
            b = min(length - 1, max(0, a + np.random.randint(-4, 5)))
        if a != b:
            shift(order, a, b)
        return a != b
    if kind < 0.35:
        b = np.random.randint(length)
        order[a], order[b] = order[b], order[a]
        return a != b
    o = np.random.randint(options.first[j], options.last[j])
    is_other = o != option[j]
    option[j] = o
    return is_other


@kernel
def anneal_lists(
    order, option, best_order, best_option, clock, energies, options, jobs, nodes, rules,
    heat, cool, steps, until, enough, seed,
):  # fmt: skip
    """Runs simulated annealing on a list, from temperature `heat` to `heat` x `cool` over `steps` trials.

    The search continues from the list (order, option) at trial clock[0] and stops at trial `until`. It changes clock,
    both lists and energies (of the list and of the best one) in place. Returns whether the energy of the best list is
    at most `enough`, which ends the search.
    """
    np.random.seed(seed)
    m, n = nodes.size.size, jobs.release.size
    width = max(nodes.size.max(), rules.quotas.max() if rules.quotas.size else 0)
    free, held, num_held = np.zeros((m + rules.quotas.size, width)), np.zeros((m, 2 * n, 3)), np.zeros(m, np.int64)
    ends, trial_ends = np.zeros(n), np.zeros(n)
    trial_order, trial_option = order.copy(), option.copy()
    energies[0] = listed(order, option, options, jobs, nodes, rules, free, held, num_held, ends)
    if clock[0] == 0:
        energies[1] = energies[0]
        best_order[:], best_option[:] = order, option
    while clock[0] < until:
        if energies[1] <= enough:
            return True
        clock[0] += 1
        trial_order[:], trial_option[:] = order, option
        if not move(trial_order, trial_option, options, ends):
            continue
        energy = listed(trial_order, trial_option, options, jobs, nodes, rules, free, held, num_held, trial_ends)
        temperature = heat * cool ** (clock[0] / steps) * energies[1]
        if energy >= NEVER or (
            energy > energies[0] and np.random.random() >= np.exp((energies[0] - energy) / temperature)
        ):
            continue
        order[:], option[:], ends[:] = trial_order, trial_option, trial_ends
        energies[0] = energy
        if energy < energies[1]:
            energies[1] = energy
            best_order[:], best_option[:] = trial_order, trial_option
    return False
