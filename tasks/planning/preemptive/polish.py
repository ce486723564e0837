# Numba infers the types of arguments; annotations would only say "array" again.
# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-defs, allow-untyped-calls
"""Local search over sequences of configurations, for few and cheap switches.

The arrays are those of `packing` and `sequences`.
"""

import numpy as np

from ringmaster.tasks.planning.kernels.compiled import kernel
from ringmaster.tasks.planning.kernels.packing import fits
from ringmaster.tasks.planning.preemptive.config_lp import INFEASIBLE
from ringmaster.tasks.planning.preemptive.sequences import settle


@kernel
def in_order(configs, rate, prices, members):
    """Orders configurations so that most gangs keep their devices.

    Each configuration is followed by the nearest one left, from the best beginning. Configurations with members that
    have a due time come first, those with members that wait for their release last. The configuration that runs already
    comes before all others.
    """
    num, n = configs.shape
    away, first = np.zeros((num, num)), np.zeros(num)
    for b in range(num):
        for i in range(n):
            o = configs[b, i]
            if members.held[i] >= 0 and members.held[i] != o:
                first[b] += prices[i] * rate[members.held[i]] + 0.02
    for a in range(num):
        for b in range(num):
            for i in range(n):
                o = configs[b, i]
                if o >= 0 and configs[a, i] != o:
                    away[a, b] += prices[i] * rate[o] + 0.02
    best, least = np.arange(num), 1e300
    for begin in range(num):
        order, left = np.zeros(num, np.int64), np.ones(num, np.bool_)
        order[0], left[begin], total = begin, False, first[begin]
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
                rank[k] += int(members.release[i] > 0.0) - int(members.due[i] < INFEASIBLE)
    ordered = configs[best[np.argsort(rank * num + np.arange(num))]]
    if members.held.max() < 0:
        return ordered.copy()
    return np.concatenate((members.held.reshape(1, n), ordered))


@kernel
def stay(sequence, num, members, options, layout):
    """Lets running members continue under their option, in all configurations in which they run and it fits."""
    for k in range(num):
        for i in range(sequence.shape[1]):
            before = sequence[k, i]
            if before >= 0 and members.held[i] >= 0 and before != members.held[i]:
                sequence[k, i] = members.held[i]
                if not fits(sequence[k], options, layout):
                    sequence[k, i] = before


@kernel
def neighbour(now, trial, num, move, members, options, layout, most):
    """Applies one move to `now`, writes the result into `trial`, and returns its length.

    Returns -1 where the move is impossible or has no effect. Moves are numbered by kind, configuration k and a second
    index x. The kinds are: drop member x's run that begins at k; drop configuration k; move k to position x; let member
    x continue in k as in the previous or as in the next configuration; give a member any other option in k.
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
            o = options.first[members.job[i]] + x % most
            if o >= options.last[members.job[i]]:
                return -1
        else:
            i, beside = x, k - 1 if kind == 3 else k + 1
            if i >= n or beside < 0 or beside >= num or now[beside, i] < 0:
                return -1
            o = now[beside, i]
        if now[k, i] == o:
            return -1
        trial[k, i] = o
        if not fits(trial[k], options, layout):
            return -1
    return num


@kernel
def polish(begin, members, options, layout, rules, budget, shakes, work):
    """Improves a sequence of configurations by local search, for few switches; each trial solves for its exact times.

    Returns (score, time, sequence, times).

    budget: limit of trials; a trial that is rejected by its prices counts an eighth.
    shakes: how many local optima are left by random moves.
    work: the steps of the loops are added to work[0].
    """
    if shakes > 0:
        np.random.seed(shakes)
    n, rows = begin.shape[1], begin.shape[0]
    now, trial, starts = begin.copy(), begin.copy(), np.zeros((rows, n), np.bool_)
    times, others, worth, known = np.zeros(rows), np.zeros(rows), np.zeros(n), np.zeros(n)
    score, total, num = settle(
        now, rows, members, options, layout, rules, starts, times, worth, known, INFEASIBLE, work
    )
    known[:] = worth
    if members.held.max() >= 0:
        stay(trial, rows, members, options, layout)
        found, took, length = settle(
            trial, rows, members, options, layout, rules, starts, others, worth, known, INFEASIBLE, work
        )
        if found < score:
            score, total, num = found, took, length
            now[:], times[:], known[:] = trial, others, worth
    best, best_score, best_total, best_num, best_times = now.copy(), score, total, num, times.copy()
    most = 1
    for i in range(n):
        most = max(most, options.last[members.job[i]] - options.first[members.job[i]])
    spent, stale, move, shaken = 0, 0, 0, 0
    while spent < 8 * budget:
        per_kind = num * max(n, num)
        num_moves = 5 * per_kind + num * n * most
        if stale >= num_moves:
            if shakes == 0:
                break
            # A local optimum: continue from the best sequence, after a few random moves that are always accepted.
            shakes -= 1
            shaken = 2 + np.random.randint(3)
            now[:], score, num, stale = best, best_score, best_num, 0
            continue
        stale += 1
        work[0] += 100
        move = np.random.randint(num_moves) if shaken else (move + 1) % num_moves
        length = neighbour(now, trial, num, move, members, options, layout, most)
        if length < 0:
            continue
        enough = INFEASIBLE if shaken > 0 else score - 1e-9
        worth[:] = -1.0
        found, took, length = settle(
            trial, length, members, options, layout, rules, starts, times, worth, known, enough, work
        )
        spent += 8 if worth[0] >= 0.0 else 1
        if found < score - 1e-9 or (shaken > 0 and found < INFEASIBLE):
            shaken = max(0, shaken - 1)
            score, num, stale = found, length, 0
            known[:] = worth
            now[:num] = trial[:num]
            if score < best_score - 1e-9:
                best_score, best_total, best_num = score, took, num
                best[:num] = now[:num]
                best_times[:num] = times[:num]
    return best_score, best_total, best[:best_num].copy(), best_times[:best_num].copy()
