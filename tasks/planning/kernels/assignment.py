# Numba infers the types of arguments; annotations would only repeat "array".
# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-defs, allow-untyped-calls
"""Assigns jobs to groups of nodes: annealing on the exact values of the groups' plans.

The arrays are those of `configurations` and `sequences`.
"""

from collections import namedtuple

import numpy as np

from ringmaster.tasks.planning.kernels import kernel
from ringmaster.tasks.planning.kernels.annealing import shift
from ringmaster.tasks.planning.kernels.configurations import INFEASIBLE, OptionTable, config_lp
from ringmaster.tasks.planning.kernels.sequences import in_order, of_group, polish, score_of, settle

TINY = 1e-9
SLACK = 0.004  # half of the layouts may take longer than the LP, by at most half of this share
RANDOM = 0.3  # share of the orders that are random


MemberRuntimes = namedtuple("MemberRuntimes", "member option length")
"""How long each member of a group runs under each of its options: length[p] of member[p] under option[p]."""


@kernel
def pieces_of(configs, times):
    """Returns the pieces that configurations, which last for `times`, consist of."""
    num, n = configs.shape
    member, option = np.zeros(num * n, np.int64), np.zeros(num * n, np.int32)
    length, count = np.zeros(num * n), 0
    for c in range(num):
        for i in range(n):
            o = configs[c, i]
            if o < 0:
                continue
            p = 0
            while p < count and (member[p] != i or option[p] != o):
                p += 1
            if p == count:
                member[p], option[p] = i, o
                count += 1
            length[p] += times[c]
    return MemberRuntimes(member[:count].copy(), option[:count].copy(), length[:count].copy())


@kernel
def split(marks, free, num, at):
    """Makes `at` a mark of the profile, and returns the number of intervals."""
    k = 0
    while k < num and marks[k + 1] <= at + TINY:
        k += 1
    if k == num or at <= marks[k] + TINY:
        return num
    for q in range(num, k, -1):
        marks[q + 1], free[q] = marks[q], free[q - 1]
    marks[k + 1] = at
    return num + 1


@kernel
def run_from(k, width, left, marks, usable, num):
    """Returns how long, up to `left`, `width` devices are usable from interval k on."""
    fits = 0.0
    while k < num and usable[k] >= width and fits < left - TINY:
        fits += min(marks[k + 1] - marks[k], left - fits)
        k += 1
    return fits


@kernel
def has_room(width, left, marks, usable, num, begin, end):
    """Whether `width` devices are usable for `left` at a stretch before `begin` or after `end`."""
    longest = 0.0
    for k in range(num):
        if usable[k] < width:
            longest = 0.0
            continue
        if marks[k] < begin - TINY:
            longest += min(marks[k + 1], begin) - marks[k]
        elif marks[k + 1] > end + TINY:
            longest = marks[k + 1] - end if marks[k] < end else longest + marks[k + 1] - marks[k]
        if longest >= left - TINY:
            return True
        if marks[k + 1] > begin - TINY and marks[k] < end:
            longest = max(0.0, marks[k + 1] - end)
    return False


@kernel
def layout_of(pieces, order, total, capacity, options):
    """Lays pieces out in an order on `capacity` devices until `total`; returns rows (member, option, begin, end).

    A piece begins at 0, or where another one has ended: as late as possible so that all of it can run at a stretch, or
    a part of it until there are no devices, and the rest elsewhere. So devices are filled until the end before others
    are begun. If there is no such place, it goes where most of it can run. What fits nowhere is left out.
    """
    most = 8 * pieces.member.size + 4
    marks, free, usable = np.zeros(most), np.zeros(most, np.int64), np.zeros(most, np.int64)
    marks[1], free[0], num = total, capacity, 1
    parts, num_parts = np.zeros((most, 4)), 0
    for p in order:
        width, left, i = options.slot[pieces.option[p]], pieces.length[p], pieces.member[p]
        while left > TINY and num + 3 < most and num_parts < most:
            usable[:num] = free[:num]
            for q in range(num_parts):
                if parts[q, 0] == i:
                    for k in range(num):
                        if marks[k] >= parts[q, 2] - TINY and marks[k + 1] <= parts[q, 3] + TINY:
                            usable[k] = 0
            place, is_whole, best_fits = -1, False, 0.0
            for k in range(num):
                if usable[k] < width or (k > 0 and usable[k] <= usable[k - 1]):
                    continue
                fits = run_from(k, width, left, marks, usable, num)
                rest = left - fits
                whole = rest <= TINY or has_room(width, rest, marks, usable, num, marks[k], marks[k] + fits)
                if place < 0 or whole or (not is_whole and fits > best_fits):
                    place, is_whole, best_fits = k, whole, fits
            if place < 0:
                break
            begin, end = marks[place], marks[place] + best_fits
            parts[num_parts, 0], parts[num_parts, 1] = i, pieces.option[p]
            parts[num_parts, 2], parts[num_parts, 3] = begin, end
            num_parts += 1
            left -= best_fits
            num = split(marks, free, num, end)
            for k in range(num):
                if marks[k] >= begin - TINY and marks[k + 1] <= end + TINY:
                    free[k] -= width
    return parts[:num_parts].copy()


@kernel
def sequence_of(parts, pieces, num_members):
    """Returns the configurations that a layout consists of, in the order of time.

    Members that the layout leaves out run alone at the end.
    """
    marks = np.unique(parts[:, 2:].copy().ravel())
    sequence, num = np.full((marks.size + num_members, num_members), -1, np.int32), 0
    for m in range(marks.size - 1):
        if marks[m + 1] - marks[m] <= TINY:
            continue
        middle = 0.5 * (marks[m] + marks[m + 1])
        for q in range(parts.shape[0]):
            if parts[q, 2] < middle < parts[q, 3]:
                sequence[num, int(parts[q, 0])] = int(parts[q, 1])
        num += 1
    for p in range(pieces.member.size):
        if sequence[:num, pieces.member[p]].max() < 0:
            sequence[num, pieces.member[p]] = pieces.option[p]
            num += 1
    return sequence[:num].copy()


@kernel
def draw(state):
    """Returns a random number between 0 and 1 (Park & Miller, 1988), without the generator that annealing uses."""
    state[0] = state[0] * 48271 % 2147483647
    return state[0] / 2147483647.0


@kernel
def wrap_around(configs, times, total, members, options, layout, rules, orders, work):
    """Returns the best sequence that layouts in `orders` different orders of the pieces give, and its score.

    The first order is by size. Of the others, some are random, with wide and long pieces first; most move or swap
    pieces of the best order so far.

    configs, times, total: of the group's configuration LP. The group has one node.
    work: the steps of the loops are added to work[0].
    """
    pieces, n = pieces_of(configs, times), configs.shape[1]
    num = pieces.member.size
    width, state = np.zeros(num), np.ones(1, np.int64)
    for p in range(num):
        width[p] = options.slot[pieces.option[p]] / layout[0]
    best, best_score = np.zeros((0, n), np.int32), INFEASIBLE
    best_order = np.argsort(-(width + pieces.length / total))
    worth, known = np.zeros(n), np.zeros(n)
    for attempt in range(orders):
        order = best_order.copy()
        if attempt > 0 and draw(state) < RANDOM:
            key = np.zeros(num)
            for p in range(num):
                key[p] = -(width[p] * draw(state) + pieces.length[p] / total * draw(state))
            order = np.argsort(key)
        elif attempt > 0:
            a, b = int(draw(state) * num), int(draw(state) * num)
            if draw(state) < 0.5:
                order[a], order[b] = order[b], order[a]
            else:
                shift(order, a, b)
        work[0] += 30 * num * num
        until = total * (1.0 + SLACK * max(0.0, draw(state) - 0.5))
        sequence = sequence_of(layout_of(pieces, order, until, layout[0], options), pieces, n)
        rows = sequence.shape[0]
        starts, took = np.zeros((rows, n), np.bool_), np.zeros(rows)
        score, _, length = settle(
            sequence, rows, members, options, layout, rules, starts, took, worth, known, best_score, work
        )
        if score < best_score:
            best, best_score, best_order = sequence[:length].copy(), score, order
            known[:] = worth
    return best, best_score


MUCH_NEARER = 0.25  # of the distance to the LP: polishing brings no sequence so much nearer
DRAWS = 200  # limit of random draws per trial: most are rejected by their prices


GroupArrays = namedtuple("GroupArrays", "kinds layouts worth cost own")
"""The groups of nodes as arrays.

kinds: kinds[g] is the kind of the group's nodes.
layouts: layouts[g] are the numbers of devices of its nodes, 0 where there is none.
worth: worth[g] is its worth per unit of time at the certificate's prices.
cost: cost[v, j] is what job j costs on nodes of kind v.
own: own[j] is the price of job j's own time.
"""


Assignment = namedtuple("Assignment", "members counts score")
"""The parts that each group does, members[g, :counts[g]], and the time that it takes, score[g]."""


@kernel
def plan_group(chosen, group, parts, sites, options, rules, budget, shakes, orders, enough, work):
    """Solves the configuration LP of a group and polishes its sequence: (score, time, sequence, times, LP's time).

    A group is not polished where the LP's time is at least `enough`, which rejects it, or where the budget is 0; the
    LP's time is then its score.

    chosen: the group's members, as indices into `parts`.
    work: the steps of the loops are added to work[0].
    """
    if chosen.size == 0:
        return 0.0, 0.0, np.zeros((0, 0), np.int32), np.zeros(0), 0.0
    kind, layout = sites.kinds[group], sites.layouts[group][sites.layouts[group] > 0]
    here = OptionTable(
        options.first[kind], options.last[kind], options.need, options.rate, options.liked, options.slot, options.spread
    )
    members = of_group(parts, chosen, group, layout.size)
    lp, configs, times, prices = config_lp(members.job, members.share, members.within, here, layout, work)
    if lp >= enough or budget == 0:
        return lp, lp, configs, times, lp
    begin = in_order(configs, here.rate, prices, members)
    best = INFEASIBLE, INFEASIBLE, begin[:0], times[:0]
    if orders > 0 and layout.size == 1 and members.held.max() < 0:
        laid_out, first = wrap_around(configs, times, lp, members, here, layout, rules, orders, work)
        if first < INFEASIBLE:
            best = polish(laid_out, members, here, layout, rules, budget, shakes, work)
    if best[0] < INFEASIBLE:
        before = score_of(begin, members, here, layout, rules, work)
        if best[0] - lp < MUCH_NEARER * (before - lp):
            return best[0], best[1], best[2], best[3], lp
    other = polish(begin, members, here, layout, rules, budget, shakes, work)
    if other[0] < best[0]:
        best = other
    return best[0], best[1], best[2], best[3], lp


@kernel
def energy(score, sharpness):
    """Returns what a group adds to the sum that `assign` minimizes."""
    return np.exp(sharpness * min(1.0, score - 1.0))


@kernel
def highest(energy_left, sharpness):
    """Returns the score above which a group's energy exceeds `energy_left`."""
    return np.log(max(energy_left, 1e-300)) / sharpness + 1.0


@kernel
def effort(num_members, depth):
    """Returns the number of trials of `polish` within `assign`; the time of each is about the cube of the members."""
    return int(depth * max(20, min(2000, 600_000 // num_members**3)))


@kernel
def has_window(chosen, parts):
    """Whether one of the chosen parts may run only in a part of the plan."""
    return parts.within[chosen].min() < INFEASIBLE if chosen.size else False


@kernel
def assign(now, best, clock, parts, sites, options, rules, depth, sharpness, heat, budget, until, seed, work):
    """Moves and swaps jobs between groups so that the slowest group gets faster; changes `now` and `best` in place.

    The search is simulated annealing, from temperature `heat` down, of log(sum_g exp(sharpness * score_g)) / sharpness,
    which is nearly the largest score. Returns whether the search is finished.

    At the certificate's prices, a group takes at least sum cost / (worth + sum own). This bound rejects most trials in
    no time, and the configuration LP rejects most of the others.
    Pinned parts stay in their group, and parts with a window on their kind of nodes, at most one in a group.

    clock: [trials spent, draws made], changed in place.
    depth: effort of polishing the groups; 0 to use the values of their LPs alone.
    until: the number of trials at which the search pauses; it is continued by a call with the same clock and seed -1.
    budget: the number of trials at which the search ends.
    work: the steps of the loops are added to work[0], from 0 on; the search also ends, cooled down, at work[1].
    """
    if seed >= 0:
        np.random.seed(seed)
    members, counts, score = now
    job, num_groups = parts.job, counts.size
    first, last, kinds, cost, own = options.first, options.last, sites.kinds, sites.cost, sites.own
    priced, owned = np.zeros(num_groups), np.zeros(num_groups)
    total, best_total = 0.0, 0.0
    for g in range(num_groups):
        for a in range(counts[g]):
            p = members[g, a]
            priced[g] += parts.share[p] * cost[kinds[g], job[p]]
            owned[g] += own[job[p]]
        if clock[1] == 0:
            score[g] = plan_group(
                members[g, : counts[g]].copy(),
                g,
                parts,
                sites,
                options,
                rules,
                effort(counts[g] + 1, depth),
                0,
                0,
                INFEASIBLE,
                work,
            )[0]
        total += energy(score[g], sharpness)
    if clock[1] == 0:
        best.members[:], best.counts[:], best.score[:] = members, counts, score
    for g in range(num_groups):
        best_total += energy(best.score[g], sharpness)
    worst = int(np.argmax(score))
    while clock[0] < until:
        if num_groups == 1 or clock[0] >= budget or clock[1] >= DRAWS * budget or score[worst] <= 1.0 + 1e-6:
            return True
        if work[0] >= work[1]:
            return True
        clock[1] += 1
        work[0] += 30
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
        q = members[h, b] if b >= 0 else p
        if parts.pinned[p] > 0.0 or parts.pinned[q] > 0.0:
            continue
        is_p, is_q = parts.within[p] < INFEASIBLE, b >= 0 and parts.within[q] < INFEASIBLE
        if (is_p or is_q) and kinds[g] != kinds[h]:
            continue
        if is_p and not is_q and has_window(members[h, : counts[h]], parts):
            continue
        if is_q and not is_p and has_window(members[g, : counts[g]], parts):
            continue
        j, k = job[p], job[q]
        if first[kinds[h], j] == last[kinds[h], j] or (b >= 0 and first[kinds[g], k] == last[kinds[g], k]):
            continue
        before = energy(score[g], sharpness) + energy(score[h], sharpness)
        spent = max(clock[0] / budget, clock[1] / (DRAWS * budget), work[0] / work[1])
        temperature = heat * 1e-3**spent
        allowed = before + total * (np.random.random() ** (-sharpness * temperature) - 1.0)
        priced_g, owned_g = priced[g] - parts.share[p] * cost[kinds[g], j], owned[g] - own[j]
        priced_h, owned_h = priced[h] + parts.share[p] * cost[kinds[h], j], owned[h] + own[j]
        if b >= 0:
            priced_g += parts.share[q] * cost[kinds[g], k]
            owned_g += own[k]
            priced_h -= parts.share[q] * cost[kinds[h], k]
            owned_h -= own[k]
        least_g = energy(priced_g / (sites.worth[g] + owned_g), sharpness)
        least_h = energy(priced_h / (sites.worth[h] + owned_h), sharpness)
        if least_g + least_h >= allowed:
            continue
        clock[0] += 1
        if b >= 0:
            of_g, of_h = members[g, : counts[g]].copy(), members[h, : counts[h]].copy()
            of_g[a], of_h[b] = q, p
        else:
            of_g, of_h = np.zeros(counts[g] - 1, np.int32), np.zeros(counts[h] + 1, np.int32)
            of_g[:a], of_g[a:] = members[g, :a], members[g, a + 1 : counts[g]]
            of_h[:-1], of_h[-1] = members[h, : counts[h]], p
        enough = highest(allowed - least_h, sharpness)
        score_g = plan_group(of_g, g, parts, sites, options, rules, effort(of_g.size + 1, depth), 0, 0, enough, work)[0]
        if energy(score_g, sharpness) + least_h >= allowed:
            continue
        enough = highest(allowed - energy(score_g, sharpness), sharpness)
        score_h = plan_group(of_h, h, parts, sites, options, rules, effort(of_h.size + 1, depth), 0, 0, enough, work)[0]
        after = energy(score_g, sharpness) + energy(score_h, sharpness)
        if after >= allowed:
            continue
        score[g], score[h] = score_g, score_h
        total = 0.0  # recomputed: adding differences would keep the rounding error of a large energy
        for each in range(num_groups):
            total += energy(score[each], sharpness)
        priced[g], priced[h], owned[g], owned[h] = priced_g, priced_h, owned_g, owned_h
        counts[g], counts[h] = of_g.size, of_h.size
        members[g, : counts[g]] = of_g
        members[h, : counts[h]] = of_h
        worst = int(np.argmax(score))
        if total < best_total * (1 - 1e-9):
            best_total = total
            best.members[:], best.counts[:], best.score[:] = members, counts, score
    return clock[0] >= budget
