# Numba infers the types of arguments; annotations would only say "array" again.
# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-defs, allow-untyped-calls
"""Kernels that fit gangs on the nodes of a group: the innermost loops of preemptive planning.

The modules `packing`, `config_lp`, `sequences`, `polish` and `assignment`, each of which uses the previous ones, work
on one *group* of nodes (usually one node) and its *members*, the jobs that it serves. `layout` holds the number of
devices of each node of the group. A *configuration* gives each member an option, or -1 if it does not run: an array of
option indices, one per member. Times are in units of the problem's lower bound, so that 1e-9 means the same everywhere.
"""

from typing import Any, NamedTuple

import numpy as np

from ringmaster.tasks.planning.kernels.compiled import kernel


class OptionTable(NamedTuple):
    """Options of all jobs in flat arrays.

    first, last: the options of job j are first[j] .. last[j] - 1; for a kind of nodes v, first[v, j] and last[v, j].
    slot, spread, need: option o takes slot[o] devices on each of spread[o] nodes, need[o] in all.
    rate: the option does rate[o] of its job in one unit of time.
    liked: the rate for the configuration LP, a little higher for what runs already, since continuing it saves a switch.
    """

    first: Any
    last: Any
    need: Any
    rate: Any
    liked: Any
    slot: Any
    spread: Any


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
