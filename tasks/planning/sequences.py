# Numba infers the types of arguments; annotations would only say "array" again.
# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-defs, allow-untyped-calls
"""Configurations put in order: what a group of nodes does one after the other, with every switch paid.

A *sequence* is an array of configurations, sequence[k, i] the option of member i in the k-th, or -1; `times`
says how long each lasts. A member does share[i] of its job between release[i] and due[i], and pays a switch at
its head where moved[i]. The other arrays are those of `packing`.
"""

import numpy as np
from numba import njit

from tasks.planning.config_lp import INFEASIBLE
from tasks.planning.packing import fits, place


@njit(cache=True, nogil=True)
def runs(sequence, num, slot, spread, layout, starts, located):
    """Where runs begin, into starts[k, i]: a member's stretch of configurations with one option on the same
    devices.

    On one node a gang can always stay; on several, all gangs are placed anew where the new ones find no
    room. Which nodes each gang is on goes into located[k, i, node], unless that is empty.
    """
    n, m = sequence.shape[1], layout.size
    if m == 1:
        for k in range(num):
            for i in range(n):
                o = sequence[k, i]
                starts[k, i] = o >= 0 and (k == 0 or sequence[k - 1, i] != o)
                if located.size:
                    located[k, i, 0] = o >= 0
        return
    where, kept = np.zeros((n, m), np.bool_), np.zeros(n, np.bool_)
    for k in range(num):
        for i in range(n):
            kept[i] = k > 0 and sequence[k, i] >= 0 and sequence[k - 1, i] == sequence[k, i]
        before = where.copy()
        if not place(sequence[k], kept, slot, spread, layout.copy(), where):
            place(sequence[k], np.zeros(n, np.bool_), slot, spread, layout.copy(), where)
        for i in range(n):
            starts[k, i] = sequence[k, i] >= 0
            if kept[i]:
                starts[k, i] = False
                for v in range(m):
                    if where[i, v] != before[i, v]:
                        starts[k, i] = True
        if located.size:
            located[k] = where


@njit(cache=True, nogil=True)
def durations(sequence, num, starts, share, release, due, moved, rate, switch, times):
    """The least time of a sequence of `num` configurations in this order, switches paid; their times into
    `times`.

        min sum_k d_k + 20 sum_w late_w   with
        work     sum_k d_k rate[k(j)] >= share[j] + switch * sum of the rates of j's runs, the first only if
        moved[j] release  sum_{k before j's first run} d_k + late_w >= release[j]      where there is one
        due      -sum_{k to j's last run} d_k + late_w >= -due[j]             where there is one

    Solved as its dual, whose slack basis is feasible whatever the right-hand sides. Returns (time, lateness);
    INFEASIBLE if a member never runs.
    """
    n = sequence.shape[1]
    windows = 0
    for i in range(n):
        windows += int(release[i] > 0.0) + int(due[i] < INFEASIBLE)
    rows, width = num + windows, n + windows + num + windows + 1
    table = np.zeros((rows + 1, width))
    window = 0
    for i in range(n):
        owed, head, tail = share[i], -1, -1
        for k in range(num):
            o = sequence[k, i]
            if o >= 0:
                table[k, i] = rate[o]
                if starts[k, i] and (head >= 0 or moved[i]):
                    owed += switch * rate[o]
                if head < 0:
                    head = k
                tail = k
        if head < 0:
            return INFEASIBLE, 0.0
        table[rows, i] = -owed
        if release[i] > 0.0:
            table[:head, n + window] = 1.0
            table[rows, n + window] = -release[i]
            window += 1
        if due[i] < INFEASIBLE:
            table[: tail + 1, n + window] = -1.0
            table[rows, n + window] = due[i]
            window += 1
    for w in range(windows):
        table[num + w, n + w] = 1.0
    for k in range(rows):
        table[k, n + windows + k] = 1.0
        table[k, width - 1] = 1.0 if k < num else 20.0
    for turn in range(20 * (n + rows)):
        enters = -1
        if turn < 10 * (n + rows):
            least = -1e-10
            for i in range(width - 1):
                if table[rows, i] < least:
                    least, enters = table[rows, i], i
        else:  # Bland's rule, which cannot cycle
            for i in range(width - 1):
                if table[rows, i] < -1e-10:
                    enters = i
                    break
        if enters < 0:
            break
        leaves, least = -1, 1e300
        for k in range(rows):
            if table[k, enters] > 1e-11:
                ratio = table[k, width - 1] / table[k, enters]
                if ratio < least:
                    leaves, least = k, ratio
        if leaves < 0:
            return INFEASIBLE, 0.0
        pivot = table[leaves, enters]
        for i in range(width):
            table[leaves, i] /= pivot
        for k in range(rows + 1):
            factor = table[k, enters]
            if k != leaves and factor != 0.0:
                for i in range(width):
                    table[k, i] -= factor * table[leaves, i]
    total, late = 0.0, 0.0
    for k in range(num):
        times[k] = max(0.0, table[rows, n + windows + k])
        total += times[k]
    for w in range(windows):
        late += max(0.0, table[rows, n + windows + num + w])
    return total, late


@njit(cache=True, nogil=True)
def settle(
    sequence, num, share, release, due, moved, rate, slot, spread, layout, switch, least_run, per_switch, starts, times
):
    """Times of a sequence, without the configurations that get none; returns (its score, its time, its
    length).

    The score adds `per_switch` for each switch, and much for lateness and for a run shorter than `least_run`
    of a job that has others.
    """
    n, nowhere = sequence.shape[1], np.zeros((0, 0, 0), np.bool_)
    while True:
        runs(sequence, num, slot, spread, layout, starts, nowhere)
        total, late = durations(sequence, num, starts, share, release, due, moved, rate, switch, times)
        if total >= INFEASIBLE:
            return INFEASIBLE, INFEASIBLE, num
        kept = 0
        for k in range(num):
            if times[k] > 1e-9:
                if kept < k:
                    sequence[kept] = sequence[k]
                    times[kept] = times[k]
                kept += 1
        if kept == num:
            break
        num = kept
    score = total + 20.0 * late + (0.01 if late > 1e-9 else 0.0)
    for i in range(n):
        many, short, length = 0, 0, 0.0
        for k in range(num):
            if starts[k, i]:
                if many > 0 and length < least_run:
                    short += 1
                many += 1
                length = 0.0
            if sequence[k, i] >= 0:
                length += times[k]
        if length < least_run:
            short += 1
        many += int(moved[i])
        if many > 1 or moved[i] or due[i] < INFEASIBLE:
            score += per_switch * (many - 1) + 0.01 * short
    return score, total, num


@njit(cache=True, nogil=True)
def in_order(configs, rate, prices, release, due):
    """Configurations in an order in which most gangs stay: always the nearest to the last, from the best
    beginning.

    Those with members that are due come first, those with members that wait for their release last.
    """
    num, n = configs.shape
    away = np.zeros((num, num))
    for a in range(num):
        for b in range(num):
            for i in range(n):
                o = configs[b, i]
                if o >= 0 and configs[a, i] != o:
                    away[a, b] += prices[i] * rate[o] + 0.02
    best, least = np.arange(num), 1e300
    for begin in range(num):
        order, left = np.zeros(num, np.int64), np.ones(num, np.bool_)
        order[0], left[begin], total = begin, False, 0.0
        for k in range(1, num):
            nearest = -1
            for c in range(num):
                if left[c] and (nearest < 0 or away[order[k - 1], c] < away[order[k - 1], nearest]):
                    nearest = c
            total += away[order[k - 1], nearest]
            order[k], left[nearest] = nearest, False
        if total < least:
            best, least = order, total
    rank = np.zeros(num, np.int64)
    for k in range(num):
        for i in range(n):
            if configs[best[k], i] >= 0:
                rank[k] += int(release[i] > 0.0) - int(due[i] < INFEASIBLE)
    return configs[best[np.argsort(rank * num + np.arange(num))]].copy()


@njit(cache=True, nogil=True)
def neighbour(now, trial, num, move, members, first, last, need, slot, spread, layout, most):
    """The sequence that one move makes of `now`, into `trial`; returns its length, or -1 where the move is
    none.

    Moves are numbered by kind, configuration k and a second index x: drop member x's run that begins at k,
    drop k, put k at place x, let member x go on in k as before or as behind it, give a member any other
    option in k.
    """
    n = now.shape[1]
    wide = max(n, num)
    if move < 5 * num * wide:
        kind, k, x = move // (num * wide), (move // wide) % num, move % wide
    else:
        kind, k, x = 5, (move - 5 * num * wide) // (n * most), (move - 5 * num * wide) % (n * most)
    trial[:num] = now[:num]
    if kind == 0:
        if x >= n or now[k, x] < 0 or (k > 0 and now[k - 1, x] == now[k, x]):
            return -1
        at = k
        while at < num and now[at, x] == now[k, x]:
            trial[at, x] = -1
            at += 1
    elif kind == 1:
        if x > 0 or num == 1:
            return -1
        trial[k : num - 1] = now[k + 1 : num]
        return num - 1
    elif kind == 2:
        if x >= num or x == k:
            return -1
        if x > k:
            trial[k:x] = now[k + 1 : x + 1]
        else:
            trial[x + 1 : k + 1] = now[x:k]
        trial[x] = now[k]
    else:
        if kind == 5:
            i = x // most
            o = first[members[i]] + x % most
            if o >= last[members[i]]:
                return -1
        else:
            i, beside = x, k - 1 if kind == 3 else k + 1
            if i >= n or beside < 0 or beside >= num or now[beside, i] < 0:
                return -1
            o = now[beside, i]
        if now[k, i] == o:
            return -1
        trial[k, i] = o
        if not fits(trial[k], need, slot, spread, layout):
            return -1
    return num


@njit(cache=True, nogil=True)
def polish(
    configs, prices, members, share, release, due, moved, first, last, need, rate, slot, spread, layout,
    switch, least_run, per_switch, budget, shakes,
):  # fmt: skip
    """Configurations as a sequence that switches little, by local search; each trial solves for its exact
    times.

    At most `budget` trials; `shakes` is how many local optima are left by random moves. Returns (score,
    time, sequence, times).
    """
    if shakes > 0:
        np.random.seed(shakes)
    n, rows = configs.shape[1], configs.shape[0]
    now = in_order(configs, rate, prices, release, due)
    trial, starts, times = np.zeros((rows, n), np.int32), np.zeros((rows, n), np.bool_), np.zeros(rows)
    score, total, num = settle(
        now, rows, share, release, due, moved, rate, slot, spread, layout, switch, least_run, per_switch, starts, times
    )
    best, best_score, best_total, best_num, best_times = now.copy(), score, total, num, times.copy()
    most = 1
    for i in range(n):
        most = max(most, last[members[i]] - first[members[i]])
    spent, stale, move, shaken = 0, 0, 0, 0
    while spent < budget:
        per_kind = num * max(n, num)
        num_moves = 5 * per_kind + num * n * most
        if stale >= num_moves:
            if shakes == 0:
                break
            # A local optimum: go on from the best one, after a few random moves that are taken as they come.
            shakes -= 1
            shaken = 2 + np.random.randint(3)
            now[:], score, num, stale = best, best_score, best_num, 0
            continue
        stale += 1
        move = np.random.randint(num_moves) if shaken else (move + 1) % num_moves
        length = neighbour(now, trial, num, move, members, first, last, need, slot, spread, layout, most)
        if length < 0:
            continue
        spent += 1
        found, took, length = settle(
            trial, length, share, release, due, moved, rate, slot, spread, layout,
            switch, least_run, per_switch, starts, times,
        )  # fmt: skip
        if found < score - 1e-9 or (shaken > 0 and found < INFEASIBLE):
            shaken = max(0, shaken - 1)
            score, num, stale = found, length, 0
            now[:num] = trial[:num]
            if score < best_score - 1e-9:
                best_score, best_total, best_num = score, took, num
                best[:num] = now[:num]
                best_times[:num] = times[:num]
    return best_score, best_total, best[:best_num].copy(), best_times[:best_num].copy()
