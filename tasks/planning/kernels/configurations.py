# Numba infers the types of arguments; annotations would only repeat "array".
# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-defs, allow-untyped-calls
"""Kernels that fit gangs on the nodes of a group: the innermost loops of preemptive planning.

The modules `configurations`, `sequences` and `assignment`, each of which uses the previous ones, work
on one *group* of nodes (usually one node) and its *members*, the jobs that it serves. `layout` holds the number of
devices of each node of the group. A *configuration* gives each member an option, or -1 if it does not run: an array of
option indices, one per member. Times are in units of the problem's lower bound, so that 1e-9 means the same everywhere.
"""

from collections import namedtuple

import numpy as np

from ringmaster.tasks.planning.kernels import kernel

OptionTable = namedtuple("OptionTable", "first last need rate liked slot spread")
"""Options of all jobs in flat arrays.

first, last: the options of job j are first[j] .. last[j] - 1; for a kind of nodes v, first[v, j] and last[v, j].
slot, spread, need: option o takes slot[o] devices on each of spread[o] nodes, need[o] in all.
rate: the option does rate[o] of its job in one unit of time.
liked: the rate for the configuration LP, a little higher for what runs already, since continuing it saves a switch.
"""


@kernel
def place(config, kept, options, free, where):
    """Places the gangs of a configuration on the nodes of a group; returns whether all of them fit.

    The gangs are placed largest slot first, each on the fullest nodes that can hold it.

    kept: where kept[i], the gang of member i stays where where[i] has it.
    free: free devices of each node, changed in place.
    where: where[i, v] is whether the gang of member i is on node v, changed in place.
    """
    n, m = config.size, free.size
    slot, spread = options.slot, options.spread
    for i in range(n):
        if kept[i]:
            for v in range(m):
                if where[i, v]:
                    free[v] -= slot[config[i]]
        else:
            where[i, :] = False
    placed = kept.copy()
    while True:
        largest = -1
        for i in range(n):
            if config[i] >= 0 and not placed[i]:
                if largest < 0:
                    largest = i
                else:
                    a, b = slot[config[i]], slot[config[largest]]
                    if a > b or (a == b and spread[config[i]] > spread[config[largest]]):
                        largest = i
        if largest < 0:
            return True
        size = slot[config[largest]]
        for _ in range(spread[config[largest]]):
            tightest = -1
            for v in range(m):
                if not where[largest, v] and free[v] >= size and (tightest < 0 or free[v] < free[tightest]):
                    tightest = v
            if tightest < 0:
                return False
            where[largest, tightest] = True
            free[tightest] -= size
        placed[largest] = True


@kernel
def fits(config, options, layout):
    """Whether the gangs of a configuration fit the nodes of a group together."""
    total, capacity = 0, 0
    for i in range(config.size):
        if config[i] >= 0:
            total += options.need[config[i]]
    for size in layout:
        capacity += size
    if total > capacity or layout.size == 1:
        return total <= capacity
    where = np.zeros((config.size, layout.size), np.bool_)
    return place(config, np.zeros(config.size, np.bool_), options, layout.copy(), where)


@kernel
def repair(config, members, prices, fees, options, layout):
    """Makes an infeasible configuration fit, and returns its worth.

    The gangs with the lowest worth per device are removed until the rest fits, then the most valuable changes that fit
    are made.

    fees: what a member pays for running, under any option.
    """
    n, rate = config.size, options.liked
    while not fits(config, options, layout):
        poorest, least = -1, 1e300
        for i in range(n):
            if config[i] >= 0:
                worth = (prices[i] * rate[config[i]] - fees[i]) / options.need[config[i]]
                if worth < least:
                    poorest, least = i, worth
        config[poorest] = -1
    while True:
        richest, pick, most = -1, -1, 1e-9
        for i in range(n):
            before = config[i]
            earned = prices[i] * rate[before] - fees[i] if before >= 0 else 0.0
            for o in range(options.first[members[i]], options.last[members[i]]):
                if prices[i] * rate[o] - fees[i] - earned > most:
                    config[i] = o
                    if fits(config, options, layout):
                        richest, pick, most = i, o, prices[i] * rate[o] - fees[i] - earned
            config[i] = before
        if richest < 0:
            break
        config[richest] = pick
    total = 0.0
    for i in range(n):
        if config[i] >= 0:
            total += prices[i] * rate[config[i]] - fees[i]
    return total


INFEASIBLE = 1e18
MAX_STATES = 1_000  # states of a group's free devices up to which configurations are priced exactly


@kernel
def price(members, prices, fees, options, capacity, best, choice, config):
    """Writes the configuration with the highest worth at the members' `prices` into `config`, and returns its worth.

    It is a multiple-choice knapsack, solved by dynamic programming over free devices: best[c] is the most that c
    devices earn.

    fees: what a member pays for running, under any option.
    """
    num_members, need, rate = members.size, options.need, options.liked
    best[: capacity + 1] = 0.0
    for i in range(num_members):
        job = members[i]
        if prices[i] <= 0.0:
            choice[i, : capacity + 1] = -1
            continue
        for c in range(capacity, -1, -1):
            top, pick = best[c], -1
            for o in range(options.first[job], options.last[job]):
                if need[o] <= c:
                    worth = best[c - need[o]] + prices[i] * rate[o] - fees[i]
                    if worth > top + 1e-12:
                        top, pick = worth, o
            best[c], choice[i, c] = top, pick
    c = capacity
    for i in range(num_members - 1, -1, -1):
        config[i] = choice[i, c]
        if config[i] >= 0:
            c -= need[config[i]]
    return best[capacity]


@kernel
def price_exactly(members, prices, fees, options, layout, config):
    """Writes the configuration with the highest worth that fits the nodes into `config`, and returns its worth.

    As `price`, but over the free devices of every node: state sum_v free[v] stride[v], with stride[v] = prod_{u < v}
    (layout[u] + 1). Gangs over several nodes try every set of nodes.
    """
    n, m = members.size, layout.size
    stride, num_states = np.ones(m, np.int64), 1
    for v in range(m):
        stride[v] = num_states
        num_states *= layout[v] + 1
    best, choice, nodes = (
        np.zeros(num_states),
        np.full((n, num_states), -1, np.int32),
        np.zeros((n, num_states), np.int32),
    )
    free = np.zeros(m, np.int64)
    for i in range(n):
        if prices[i] <= 0.0:
            continue
        for c in range(num_states - 1, -1, -1):
            for v in range(m):
                free[v] = c // stride[v] % (layout[v] + 1)
            top = best[c]
            for o in range(options.first[members[i]], options.last[members[i]]):
                gain, slot = prices[i] * options.liked[o] - fees[i], options.slot[o]
                for chosen in range(1, 1 << m):
                    used, count = 0, 0
                    for v in range(m):
                        if chosen >> v & 1:
                            used += slot * stride[v]
                            count += 1 if free[v] >= slot else 1 << m
                    if count == options.spread[o] and best[c - used] + gain > top + 1e-12:
                        top, choice[i, c], nodes[i, c] = best[c - used] + gain, o, chosen
            best[c] = top
    c = num_states - 1
    for i in range(n - 1, -1, -1):
        config[i] = choice[i, c]
        if config[i] >= 0:
            for v in range(m):
                if nodes[i, c] >> v & 1:
                    free[v] = options.slot[config[i]] * stride[v]
                else:
                    free[v] = 0
            c -= free.sum()
    return best[num_states - 1]


@kernel
def config_lp(members, share, within, options, layout, work):
    """Returns the least time in which configurations can do all of the members' work, each job once at a time.

        min sum_c t_c   with   sum_c t_c rate[c(j)] >= share[j]           for each member j,   t >= 0
                               sum_{c in which j runs} t_c <= within[j]   for those that may not run all the time

    The LP is solved by the revised simplex method. `price` finds columns; on few nodes, `price_exactly` does where the
    result of `price` does not fit and repairing it leaves nothing that improves. Returns (time, configurations, their
    times, prices of the members' work).

    within: the most time that a member may run; INFEASIBLE for no limit.
    work: the steps of the loops are added to work[0].
    """
    n, capacity, largest = members.size, layout.sum(), layout.max()
    slot, spread, rate = options.slot, options.spread, options.liked
    limit, rows = np.full(n, -1, np.int32), n  # limit[i]: the row of member i's second constraint
    for i in range(n):
        if within[i] < INFEASIBLE:
            limit[i], rows = rows, rows + 1
    inverse = np.zeros((rows, rows))
    basis = np.full((rows, n), -1, np.int32)
    slack = np.full(rows, -1, np.int32)  # slack[b]: the row whose slack is basic; -1 for a configuration
    level, config = np.zeros(rows), np.zeros(n, np.int32)
    for i in range(n):
        top = -1
        for o in range(options.first[members[i]], options.last[members[i]]):
            if slot[o] <= largest and spread[o] <= layout.size and (top < 0 or rate[o] > rate[top]):
                config[:] = -1
                config[i] = o
                if fits(config, options, layout):
                    top = o
        if top < 0 or share[i] / rate[top] > within[i]:
            return INFEASIBLE, basis[:0], level[:0], level[:n]
        basis[i, i] = top
        inverse[i, i] = 1.0 / rate[top]
        level[i] = share[i] / rate[top]
        if limit[i] >= 0:
            r = limit[i]
            slack[r], inverse[r, r], inverse[r, i] = r, 1.0, -1.0 / rate[top]
            level[r] = within[i] - level[i]
    duals, fees, step = np.zeros(rows), np.zeros(n), np.zeros(rows)
    prices = duals[:n]
    best, choice = np.zeros(capacity + 1), np.zeros((n, capacity + 1), np.int32)
    column = np.zeros(rows)
    states = 1
    for size in layout:
        states *= size + 1
    can_be_exact = layout.size > 1 and states <= MAX_STATES
    num_options = 0
    for i in range(n):
        num_options += options.last[members[i]] - options.first[members[i]]
    for _ in range(60 * n + 200):
        work[0] += 3 * rows * rows + capacity * num_options
        for i in range(rows):
            total = 0.0
            for b in range(rows):
                if slack[b] < 0:
                    total += inverse[b, i]
            duals[i] = total
        enters, least = -1, -1e-9
        for i in range(n):
            if duals[i] < least:
                enters, least = i, duals[i]
            if limit[i] >= 0:
                fees[i] = max(0.0, -duals[limit[i]])
                if -duals[limit[i]] < least:
                    enters, least = limit[i], -duals[limit[i]]
        column[:] = 0.0
        if enters >= 0:
            config[:] = -1
            column[enters] = -1.0 if enters < n else 1.0
        else:
            worth = price(members, prices, fees, options, capacity, best, choice, config)
            if worth > 1.0 + 1e-7 and layout.size > 1 and not fits(config, options, layout):
                worth = repair(config, members, prices, fees, options, layout)
                if worth <= 1.0 + 1e-7 and can_be_exact:
                    work[0] += (states * num_options * layout.size) << layout.size
                    worth = price_exactly(members, prices, fees, options, layout, config)
            if worth <= 1.0 + 1e-7:
                break
            for i in range(n):
                if config[i] >= 0:
                    column[i] = rate[config[i]]
                    if limit[i] >= 0:
                        column[limit[i]] = 1.0
        leaves, least = -1, 1e300
        for b in range(rows):
            total = 0.0
            for i in range(rows):
                total += inverse[b, i] * column[i]
            step[b] = total
            if total > 1e-10:
                ratio = level[b] / total
                if ratio < least - 1e-13 or (ratio < least + 1e-13 and total > step[leaves]):
                    leaves, least = b, ratio
        if leaves < 0:
            break
        pivot = step[leaves]
        for i in range(rows):
            inverse[leaves, i] /= pivot
        level[leaves] /= pivot
        for b in range(rows):
            if b != leaves and step[b] != 0.0:
                for i in range(rows):
                    inverse[b, i] -= step[b] * inverse[leaves, i]
                level[b] -= step[b] * level[leaves]
                if level[b] < 0.0:
                    level[b] = 0.0
        slack[leaves] = enters
        basis[leaves, :] = config
    configs, times = np.full((rows, n), -1, np.int32), np.zeros(rows)
    num, total = 0, 0.0
    for b in range(rows):
        if slack[b] < 0:
            total += level[b]
            if level[b] > 1e-9:
                configs[num] = basis[b]
                times[num] = level[b]
                num += 1
    return total, configs[:num].copy(), times[:num].copy(), prices.copy()
