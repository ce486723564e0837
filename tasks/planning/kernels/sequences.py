# Numba infers the types of arguments; annotations would only repeat "array".
# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-defs, allow-untyped-calls
"""Sequences of configurations: what a group of nodes runs over time, including the cost of every switch.

A *sequence* is an array of configurations: sequence[k, i] is the option of member i in configuration k, or -1, and
`times` holds how long each lasts. A *run* is a series of consecutive configurations in which a member has one option on
the same devices. Every run but the job's first pays a switch, unless it continues what ran before the sequence began.
"""

from collections import namedtuple

import numpy as np

from ringmaster.tasks.planning.kernels import kernel
from ringmaster.tasks.planning.kernels.configurations import INFEASIBLE, fits, place

JobShares = namedtuple("JobShares", "job share release due within moved held home at pinned")
"""Shares of jobs, each done by one group: share[p] of job[p], between release[p] and due[p].

within: the most time that the part may run, where its window is not the whole plan; NEVER otherwise.
moved: the part pays a switch at its start, unless it continues under option held[p].
held: the option under which the part runs at time 0; -1 if it does not run.
home, at: the group in which it runs, on the nodes v with at[p, v].
pinned: the time for which it must continue unchanged; 0 where it need not.
"""


SwitchCosts = namedtuple("SwitchCosts", "switch least_run per_switch")
"""The cost of switches.

switch: time at the start of a run.
least_run: minimum run; shorter runs are penalized.
per_switch: penalty in the score.
"""


@kernel
def of_group(parts, chosen, group, width):
    """Returns the chosen parts as members of a group of `width` nodes; parts that run elsewhere do not run here."""
    held = parts.held[chosen]
    for i in range(chosen.size):
        if parts.home[chosen[i]] != group:
            held[i] = -1
    at = np.ascontiguousarray(parts.at[chosen][:, :width])  # another memory layout would compile all kernels again
    return JobShares(
        parts.job[chosen], parts.share[chosen], parts.release[chosen], parts.due[chosen], parts.within[chosen],
        parts.moved[chosen], held, parts.home[chosen], at, parts.pinned[chosen],
    )  # fmt: skip


@kernel
def runs(sequence, num, members, options, layout, starts, located):
    """Writes into starts[k, i] where runs begin; a run that continues what ran before does not begin at k = 0.

    On one node, a gang can always keep its devices. On several nodes, all gangs are placed again where the new ones do
    not fit. The nodes of each gang are written into located[k, i, node], unless that is empty.
    """
    n, m = sequence.shape[1], layout.size
    if m == 1:
        for k in range(num):
            for i in range(n):
                o = sequence[k, i]
                starts[k, i] = o >= 0 and o != (sequence[k - 1, i] if k > 0 else members.held[i])
                if located.size:
                    located[k, i, 0] = o >= 0
        return
    where, kept = members.at.copy(), np.zeros(n, np.bool_)
    for k in range(num):
        for i in range(n):
            before_it = sequence[k - 1, i] if k > 0 else members.held[i]
            kept[i] = sequence[k, i] >= 0 and before_it == sequence[k, i]
        before = where.copy()
        if not place(sequence[k], kept, options, layout.copy(), where):
            place(sequence[k], np.zeros(n, np.bool_), options, layout.copy(), where)
        for i in range(n):
            starts[k, i] = sequence[k, i] >= 0
            if kept[i]:
                starts[k, i] = False
                for v in range(m):
                    if where[i, v] != before[i, v]:
                        starts[k, i] = True
        if located.size:
            located[k] = where


@kernel
def durations(sequence, num, starts, members, rate, switch, times, worth, work):
    """Computes the least time of a sequence of `num` configurations in the given order, including switches.

        min sum_k d_k + 20 sum_w late_w   with
        work     sum_k d_k rate[k(j)] >= share[j] + switch * sum of the rates of j's runs that pay
        release  sum_{k before j's first run} d_k + late_w >= release[j]      where there is one
        due      -sum_{k to j's last run} d_k + late_w >= -due[j]             where there is one
        pinned   sum_{k of j's first run} d_k + late_w >= pinned time of j    where there is one

    The LP is solved as its dual, whose slack basis is feasible for all right-hand sides. The times of the
    configurations are written into `times`, and the dual prices of the members' work into `worth`. Returns (time,
    lateness); the time is INFEASIBLE if a member never runs, or a pinned one does not continue.

    work: the steps of the loops are added to work[0].
    """
    n = sequence.shape[1]
    windows = 0
    for i in range(n):
        windows += int(members.release[i] > 0.0) + int(members.due[i] < INFEASIBLE) + int(members.pinned[i] > 0.0)
    rows, width = num + windows, n + windows + num + windows + 1
    table = np.zeros((rows + 1, width))
    window = 0
    for i in range(n):
        owed, head, tail = members.share[i], -1, -1
        for k in range(num):
            o = sequence[k, i]
            if o >= 0:
                table[k, i] = rate[o]
                if starts[k, i] and (head >= 0 or members.moved[i]):
                    owed += switch * rate[o]
                if head < 0:
                    head = k
                tail = k
        if head < 0:
            return INFEASIBLE, 0.0
        table[rows, i] = -owed
        if members.release[i] > 0.0:
            table[:head, n + window] = 1.0
            table[rows, n + window] = -members.release[i]
            window += 1
        if members.due[i] < INFEASIBLE:
            table[: tail + 1, n + window] = -1.0
            table[rows, n + window] = members.due[i]
            window += 1
        if members.pinned[i] > 0.0:
            o = sequence[0, i]
            if o < 0 or starts[0, i]:
                return INFEASIBLE, 0.0
            k = 0
            while k < num and sequence[k, i] == o and not starts[k, i]:
                table[k, n + window] = 1.0
                k += 1
            table[rows, n + window] = -min(members.pinned[i], members.share[i] / rate[o])
            window += 1
    for w in range(windows):
        table[num + w, n + w] = 1.0
    for k in range(rows):
        table[k, n + windows + k] = 1.0
        table[k, width - 1] = 1.0 if k < num else 20.0
    basis = np.full(rows, -1, np.int32)
    for turn in range(20 * (n + rows)):
        work[0] += 0.35 * rows * width
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
        basis[leaves] = enters
        pivot = table[leaves, enters]
        for i in range(width):
            table[leaves, i] /= pivot
        for k in range(rows + 1):
            factor = table[k, enters]
            if k != leaves and factor != 0.0:
                for i in range(width):
                    table[k, i] -= factor * table[leaves, i]
    worth[:] = 0.0
    for k in range(rows):
        if 0 <= basis[k] < n:
            worth[basis[k]] = table[k, width - 1]
    total, late = 0.0, 0.0
    for k in range(num):
        times[k] = max(0.0, table[rows, n + windows + k])
        total += times[k]
    for w in range(windows):
        late += max(0.0, table[rows, n + windows + num + w])
    return total, late


@kernel
def least(sequence, num, starts, members, rate, rules, worth):
    """Returns a lower bound on the score of the sequence, by weak duality with prices of the members' work.

    sum_i worth[i] (share[i] + switch * rates of i's runs that pay) / max_k sum_i worth[i] rate[k(i)]
    """
    n, owed, most = sequence.shape[1], 0.0, 1e-300
    paid = 0
    for i in range(n):
        owed += worth[i] * members.share[i]
    for k in range(num):
        earned = 0.0
        for i in range(n):
            o = sequence[k, i]
            if o >= 0:
                earned += worth[i] * rate[o]
                if starts[k, i]:
                    owed += worth[i] * rules.switch * rate[o]
                    paid += 1
        most = max(most, earned)
    for i in range(n):
        if not members.moved[i]:  # its first run pays nothing
            for k in range(num):
                if starts[k, i]:
                    owed -= worth[i] * rules.switch * rate[sequence[k, i]]
                    paid -= 1
                    break
    return owed / most + rules.per_switch * paid


@kernel
def settle(sequence, num, members, options, layout, rules, starts, times, worth, known, enough, work):
    """Computes the times of a sequence, removes configurations that get none, and returns (score, time, length).

    The score adds `per_switch` for each switch, a large penalty for lateness, and one for each run shorter than
    `least_run` of a job that has several, unless the run continues what ran before. The prices of the members' work are
    written into `worth`. With the prices of another sequence, `known`, a sequence that cannot score less than `enough`
    is rejected at almost no cost.

    work: the steps of the loops are added to work[0].
    """
    n, nowhere = sequence.shape[1], np.zeros((0, 0, 0), np.bool_)
    while True:
        work[0] += 300 + 4 * num * n * layout.size
        runs(sequence, num, members, options, layout, starts, nowhere)
        if least(sequence, num, starts, members, options.rate, rules, known) >= enough:
            return INFEASIBLE, INFEASIBLE, num
        total, late = durations(sequence, num, starts, members, options.rate, rules.switch, times, worth, work)
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
        goes_on = sequence[0, i] >= 0 and not starts[0, i]
        many, short, length = 0, 0, 0.0
        for k in range(num):
            if starts[k, i]:
                short += int(many > 0 and length < rules.least_run)
                many += 1
                length = 0.0
            if sequence[k, i] >= 0:
                length += times[k]
        short += int(many > 0 and length < rules.least_run)
        if many + int(goes_on) > 1 or members.share[i] < 1.0:
            score += 0.01 * short
        score += rules.per_switch * max(0, many - 1 + int(members.moved[i]))
    return score, total, num


@kernel
def score_of(sequence, members, options, layout, rules, work):
    """Returns the score of a sequence, which stays as it is (`settle`)."""
    trial, (rows, n) = sequence.copy(), sequence.shape
    starts, times, worth = np.zeros((rows, n), np.bool_), np.zeros(rows), np.zeros(n)
    score, _, _ = settle(
        trial, rows, members, options, layout, rules, starts, times, worth, np.zeros(n), INFEASIBLE, work
    )
    return score


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
            i, neighbour = x, k - 1 if kind == 3 else k + 1
            if i >= n or neighbour < 0 or neighbour >= num or now[neighbour, i] < 0:
                return -1
            o = now[neighbour, i]
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
        reached, took, length = settle(
            trial, rows, members, options, layout, rules, starts, others, worth, known, INFEASIBLE, work
        )
        if reached < score:
            score, total, num = reached, took, length
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
        reached, took, length = settle(
            trial, length, members, options, layout, rules, starts, times, worth, known, enough, work
        )
        spent += 8 if worth[0] >= 0.0 else 1
        if reached < score - 1e-9 or (shaken > 0 and reached < INFEASIBLE):
            shaken = max(0, shaken - 1)
            score, num, stale = reached, length, 0
            known[:] = worth
            now[:num] = trial[:num]
            if score < best_score - 1e-9:
                best_score, best_total, best_num = score, took, num
                best[:num] = now[:num]
                best_times[:num] = times[:num]
    return best_score, best_total, best[:best_num].copy(), best_times[:best_num].copy()
