# Numba infers the types of arguments; annotations would only say "array" again.
# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-defs, allow-untyped-calls
"""The configuration LP of a group of nodes, solved by column generation: how long which jobs run together.

The arrays are those of `packing`.
"""

import numpy as np

from ringmaster.tasks.planning.kernels.compiled import kernel
from ringmaster.tasks.planning.kernels.packing import fits, repair

INFEASIBLE = 1e18
MAX_STATES = 1_000  # states of a group's free devices up to which configurations are priced exactly


@kernel
def price(members, prices, options, capacity, best, choice, config):
    """Writes the configuration with the highest worth at the members' `prices` into `config`, and returns its worth.

    It is a multiple-choice knapsack, solved by dynamic programming over free devices: best[c] is the most that c
    devices earn.
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
                    worth = best[c - need[o]] + prices[i] * rate[o]
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
def price_exactly(members, prices, options, layout, config):
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
                gain, slot = prices[i] * options.liked[o], options.slot[o]
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
def config_lp(members, share, options, layout, work):
    """Returns the least time in which configurations can do all of the members' work, each job once at a time.

        min sum_c t_c   with   sum_c t_c rate[c(j)] >= share[j]  for each member j,   t >= 0

    The LP is solved by the revised simplex method. `price` finds columns; on few nodes, `price_exactly` does where the
    result of `price` does not fit and repairing it leaves nothing that improves. Returns (time, configurations, their
    times, prices).

    work: the steps of the loops are added to work[0].
    """
    n, capacity, largest = members.size, layout.sum(), layout.max()
    slot, spread, rate = options.slot, options.spread, options.liked
    inverse = np.zeros((n, n))
    basis = np.full((n, n), -1, np.int32)
    surplus = np.full(n, -1, np.int32)
    level, config = np.zeros(n), np.zeros(n, np.int32)
    for i in range(n):
        top = -1
        for o in range(options.first[members[i]], options.last[members[i]]):
            if slot[o] <= largest and spread[o] <= layout.size and (top < 0 or rate[o] > rate[top]):
                config[:] = -1
                config[i] = o
                if fits(config, options, layout):
                    top = o
        if top < 0:
            return INFEASIBLE, basis[:0], level[:0], level
        basis[i, i] = top
        inverse[i, i] = 1.0 / rate[top]
        level[i] = share[i] / rate[top]
    prices, step = np.zeros(n), np.zeros(n)
    best, choice = np.zeros(capacity + 1), np.zeros((n, capacity + 1), np.int32)
    column = np.zeros(n)
    states = 1
    for size in layout:
        states *= size + 1
    can_be_exact = layout.size > 1 and states <= MAX_STATES
    num_options = 0
    for i in range(n):
        num_options += options.last[members[i]] - options.first[members[i]]
    for _ in range(60 * n + 200):
        work[0] += 3 * n * n + capacity * num_options
        for i in range(n):
            total = 0.0
            for b in range(n):
                if surplus[b] < 0:
                    total += inverse[b, i]
            prices[i] = total
        lowest = 0
        for i in range(n):
            if prices[i] < prices[lowest]:
                lowest = i
        if prices[lowest] < -1e-9:
            enters = lowest
            config[:] = -1
            column[:] = 0.0
            column[lowest] = -1.0
        else:
            enters = -1
            worth = price(members, prices, options, capacity, best, choice, config)
            if worth > 1.0 + 1e-7 and layout.size > 1 and not fits(config, options, layout):
                worth = repair(config, members, prices, options, layout)
                if worth <= 1.0 + 1e-7 and can_be_exact:
                    work[0] += (states * num_options * layout.size) << layout.size
                    worth = price_exactly(members, prices, options, layout, config)
            if worth <= 1.0 + 1e-7:
                break
            for i in range(n):
                column[i] = rate[config[i]] if config[i] >= 0 else 0.0
        leaves, least = -1, 1e300
        for b in range(n):
            total = 0.0
            for i in range(n):
                total += inverse[b, i] * column[i]
            step[b] = total
            if total > 1e-10:
                ratio = level[b] / total
                if ratio < least - 1e-13 or (ratio < least + 1e-13 and total > step[leaves]):
                    leaves, least = b, ratio
        if leaves < 0:
            break
        pivot = step[leaves]
        for i in range(n):
            inverse[leaves, i] /= pivot
        level[leaves] /= pivot
        for b in range(n):
            if b != leaves and step[b] != 0.0:
                for i in range(n):
                    inverse[b, i] -= step[b] * inverse[leaves, i]
                level[b] -= step[b] * level[leaves]
                if level[b] < 0.0:
                    level[b] = 0.0
        surplus[leaves] = enters
        basis[leaves, :] = config
    configs, times = np.full((n, n), -1, np.int32), np.zeros(n)
    num, total = 0, 0.0
    for b in range(n):
        if surplus[b] < 0:
            total += level[b]
            if level[b] > 1e-9:
                configs[num] = basis[b]
                times[num] = level[b]
                num += 1
    return total, configs[:num].copy(), times[:num].copy(), prices
