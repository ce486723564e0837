# Numba infers the types of arguments; annotations would only say "array" again.
# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-defs, allow-untyped-calls
"""Which group of nodes does which jobs: annealing on the exact values of the groups' plans.

The arrays are those of `packing` and `sequences`.
"""

import numpy as np
from numba import njit

from tasks.planning.config_lp import INFEASIBLE, config_lp
from tasks.planning.sequences import polish


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
