# Numba infers the types of arguments; annotations would only say "array" again.
# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-defs, allow-untyped-calls
"""The compiled inner loops of preemptive planning: pricing, configuration LPs and sequences of
configurations.

All of it works on one *group* of nodes (one node, as a rule) and its *members*, the jobs that it serves.
Options of all jobs stand in flat arrays: those of job j are first[j] .. last[j] - 1; option o takes slot[o]
devices on each of spread[o] nodes, need[o] in all, and does rate[o] of its job in one unit of time. `layout`
holds the devices of each node of the group. A *configuration* gives each member an option or -1 (it does not
run): an array of option indices, one a member. A member does share[i] of its job between release[i] and
due[i], and pays a switch at its head where moved[i]. Times are in units of the problem's lower bound, so
that 1e-9 means the same everywhere.
"""

import numpy as np
from numba import njit

INFEASIBLE = 1e18


@njit(cache=True, nogil=True)
def place(config, kept, slot, spread, free, where):
    """Gangs of a configuration onto the nodes of a group; says whether all of them fit.

    kept[i]: member i's gang stays where where[i] has it. free: devices free of each node, changed in place.
    The others are placed largest slot first, each on the fullest nodes that can hold it.
    """
    n, m = config.size, free.size
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


@njit(cache=True, nogil=True)
def fits(config, need, slot, spread, layout):
    """Whether the gangs of a configuration find room on the nodes of a group together."""
    total, capacity = 0, 0
    for i in range(config.size):
        if config[i] >= 0:
            total += need[config[i]]
    for size in layout:
        capacity += size
    if total > capacity or layout.size == 1:
        return total <= capacity
    where = np.zeros((config.size, layout.size), np.bool_)
    return place(config, np.zeros(config.size, np.bool_), slot, spread, layout.copy(), where)


@njit(cache=True, nogil=True)
def repair(config, members, prices, first, last, need, rate, slot, spread, layout):
    """Makes a configuration that does not fit fit: gangs that earn least a device go, what fits in their
    place comes."""
    n = config.size
    while not fits(config, need, slot, spread, layout):
        poorest, least = -1, 1e300
        for i in range(n):
            if config[i] >= 0:
                worth = prices[i] * rate[config[i]] / need[config[i]]
                if worth < least:
                    poorest, least = i, worth
        config[poorest] = -1
    while True:
        richest, pick, most = -1, -1, 1e-9
        for i in range(n):
            before = config[i]
            earned = prices[i] * rate[before] if before >= 0 else 0.0
            for o in range(first[members[i]], last[members[i]]):
                if prices[i] * rate[o] - earned > most:
                    config[i] = o
                    if fits(config, need, slot, spread, layout):
                        richest, pick, most = i, o, prices[i] * rate[o] - earned
            config[i] = before
        if richest < 0:
            break
        config[richest] = pick
    total = 0.0
    for i in range(n):
        if config[i] >= 0:
            total += prices[i] * rate[config[i]]
    return total


@njit(cache=True, nogil=True)
def price(members, prices, first, last, need, rate, capacity, best, choice, config):
    """The configuration worth most at the members' `prices`, into `config`; returns its worth.

    A multiple-choice knapsack by dynamic programming over free devices: best[c] is the most that c devices
    earn.
    """
    num_members = members.size
    best[: capacity + 1] = 0.0
    for i in range(num_members):
        job = members[i]
        if prices[i] <= 0.0:
            choice[i, : capacity + 1] = -1
            continue
        for c in range(capacity, -1, -1):
            top, pick = best[c], -1
            for o in range(first[job], last[job]):
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


@njit(cache=True, nogil=True)
def config_lp(members, share, first, last, need, rate, slot, spread, layout):
    """The least time in which configurations can do all of the members' work, each job once at a time.

        min sum_c t_c   with   sum_c t_c rate[c(j)] >= share[j]  for each member j,   t >= 0

    by the revised simplex method; columns are priced by `price`. Returns (time, configurations, their times,
    prices).
    """
    n, capacity, largest = members.size, layout.sum(), layout.max()
    inverse = np.zeros((n, n))
    basis = np.full((n, n), -1, np.int32)
    surplus = np.full(n, -1, np.int32)
    level, config = np.zeros(n), np.zeros(n, np.int32)
    for i in range(n):
        top = -1
        for o in range(first[members[i]], last[members[i]]):
            if slot[o] <= largest and spread[o] <= layout.size and (top < 0 or rate[o] > rate[top]):
                config[:] = -1
                config[i] = o
                if fits(config, need, slot, spread, layout):
                    top = o
        if top < 0:
            return INFEASIBLE, basis[:0], level[:0], level
        basis[i, i] = top
        inverse[i, i] = 1.0 / rate[top]
        level[i] = share[i] / rate[top]
    prices, step = np.zeros(n), np.zeros(n)
    best, choice = np.zeros(capacity + 1), np.zeros((n, capacity + 1), np.int32)
    column = np.zeros(n)
    for _ in range(60 * n + 200):
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
            worth = price(members, prices, first, last, need, rate, capacity, best, choice, config)
            if worth > 1.0 + 1e-7 and layout.size > 1 and not fits(config, need, slot, spread, layout):
                worth = repair(config, members, prices, first, last, need, rate, slot, spread, layout)
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


@njit(cache=True, nogil=True)
def plan_group(
    parts, job, share, release, due, moved, first, last, need, rate, slot, spread, layout,
    switch, least_run, per_switch, budget, shakes, enough,
):  # fmt: skip
    """The configuration LP of a group and its polished sequence: (score, time, sequence, times, LP's time).

    parts: the group's members, as indices into job, share, release, due and moved. Where the LP's time is
    `enough` to reject the group, it is not polished, and the LP's time is its score.
    """
    members = job[parts]
    if parts.size == 0:
        return 0.0, 0.0, np.zeros((0, 0), np.int32), np.zeros(0), 0.0
    lp, configs, times, prices = config_lp(members, share[parts], first, last, need, rate, slot, spread, layout)
    if lp >= enough:
        return lp, lp, configs, times, lp
    score, total, sequence, took = polish(
        configs, prices, members, share[parts], release[parts], due[parts], moved[parts],
        first, last, need, rate, slot, spread, layout, switch, least_run, per_switch, budget, shakes,
    )  # fmt: skip
    return score, total, sequence, took, lp


@njit(cache=True, nogil=True)
def energy(score, sharpness):
    """What a group adds to the sum that `assign` minimises."""
    return np.exp(sharpness * min(1.0, score - 1.0))


@njit(cache=True, nogil=True)
def highest(energy_left, sharpness):
    """The score above which a group's energy is more than that."""
    return np.log(max(energy_left, 1e-300)) / sharpness + 1.0


@njit(cache=True, nogil=True)
def effort(num_members):
    """Trials of `polish` within `assign`: each costs about the cube of the members."""
    return max(20, min(2000, 600_000 // num_members**3))


@njit(cache=True, nogil=True)
def assign(
    members, counts, kinds, layouts, job, share, release, due, moved, first, last, need, rate, slot, spread,
    cost, own, worth, switch, least_run, per_switch, sharpness, heat, budget, num_draws, seed,
):  # fmt: skip
    """Moves and swaps jobs between groups so that the slowest group gets faster; changes members and counts
    in place.

    members[g, :counts[g]]: the parts that group g does; its nodes are layouts[g] (0 where there is none), of
    kind kinds[g]. Parts that are not a whole job stay where they are.
    cost[kind, j], own[j], worth[g]: with the certificate's prices a group takes at least sum cost / (worth +
    sum own), which rejects most trials in no time; the configuration LP rejects most of the others.
    Simulated annealing, from temperature `heat` down, of log(sum_g exp(sharpness * score_g)) / sharpness,
    nearly the largest score. Returns each group's score.
    """
    np.random.seed(seed)
    num_groups = counts.size
    score, priced, owned = np.zeros(num_groups), np.zeros(num_groups), np.zeros(num_groups)
    for g in range(num_groups):
        for a in range(counts[g]):
            p = members[g, a]
            priced[g] += share[p] * cost[kinds[g], job[p]]
            owned[g] += own[job[p]]
        score[g] = plan_group(
            members[g, : counts[g]].copy(), job, share, release, due, moved, first[kinds[g]], last[kinds[g]],
            need, rate, slot, spread, layouts[g][layouts[g] > 0], switch, least_run, per_switch,
            effort(counts[g] + 1), 0, INFEASIBLE,
        )[0]  # fmt: skip
    if num_groups == 1:
        return score
    total = 0.0
    for g in range(num_groups):
        total += energy(score[g], sharpness)
    best_total, best_members, best_counts, best_score = total, members.copy(), counts.copy(), score.copy()
    spent, worst = 0, int(np.argmax(score))
    for _ in range(num_draws):
        if spent >= budget or score[worst] <= 1.0 + 1e-6:
            break
        g = worst if np.random.random() < 0.6 else np.random.randint(num_groups)
        h = np.random.randint(num_groups)
        if g == h or counts[g] == 0:
            continue
        a, b = np.random.randint(counts[g]), -1
        if counts[h] > 0 and np.random.random() < 0.8:
            b = np.random.randint(counts[h])
        if b < 0 and counts[h] >= members.shape[1]:
            continue
        p = members[g, a]
        q = members[h, b] if b >= 0 else -1
        j, k = job[p], job[q] if q >= 0 else -1
        if share[p] < 1.0 or (q >= 0 and share[q] < 1.0):
            continue
        if first[kinds[h], j] == last[kinds[h], j] or (k >= 0 and first[kinds[g], k] == last[kinds[g], k]):
            continue
        before = energy(score[g], sharpness) + energy(score[h], sharpness)
        temperature = heat * 1e-3 ** (spent / budget)
        allowed = before + total * (np.random.random() ** (-sharpness * temperature) - 1.0)
        priced_g, owned_g = priced[g] - cost[kinds[g], j], owned[g] - own[j]
        priced_h, owned_h = priced[h] + cost[kinds[h], j], owned[h] + own[j]
        if k >= 0:
            priced_g += cost[kinds[g], k]
            owned_g += own[k]
            priced_h -= cost[kinds[h], k]
            owned_h -= own[k]
        least_g = energy(priced_g / (worth[g] + owned_g), sharpness)
        least_h = energy(priced_h / (worth[h] + owned_h), sharpness)
        if least_g + least_h >= allowed:
            continue
        spent += 1
        if b >= 0:
            of_g, of_h = members[g, : counts[g]].copy(), members[h, : counts[h]].copy()
            of_g[a], of_h[b] = q, p
        else:
            of_g, of_h = np.zeros(counts[g] - 1, np.int32), np.zeros(counts[h] + 1, np.int32)
            of_g[:a], of_g[a:] = members[g, :a], members[g, a + 1 : counts[g]]
            of_h[:-1], of_h[-1] = members[h, : counts[h]], p
        score_g = plan_group(
            of_g, job, share, release, due, moved, first[kinds[g]], last[kinds[g]],
            need, rate, slot, spread, layouts[g][layouts[g] > 0], switch, least_run, per_switch,
            effort(of_g.size + 1), 0, highest(allowed - least_h, sharpness),
        )[0]  # fmt: skip
        if energy(score_g, sharpness) + least_h >= allowed:
            continue
        score_h = plan_group(
            of_h, job, share, release, due, moved, first[kinds[h]], last[kinds[h]],
            need, rate, slot, spread, layouts[h][layouts[h] > 0], switch, least_run, per_switch,
            effort(of_h.size + 1), 0, highest(allowed - energy(score_g, sharpness), sharpness),
        )[0]  # fmt: skip
        after = energy(score_g, sharpness) + energy(score_h, sharpness)
        if after >= allowed:
            continue
        total += after - before
        score[g], score[h] = score_g, score_h
        priced[g], priced[h], owned[g], owned[h] = priced_g, priced_h, owned_g, owned_h
        counts[g], counts[h] = of_g.size, of_h.size
        members[g, : counts[g]] = of_g
        members[h, : counts[h]] = of_h
        worst = int(np.argmax(score))
        if total < best_total * (1 - 1e-9):
            best_total = total
            best_members[:], best_counts[:], best_score[:] = members, counts, score
    members[:], counts[:] = best_members, best_counts
    return best_score
