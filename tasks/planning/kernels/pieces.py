# Numba infers the types of arguments; annotations would only say "array" again.
# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-defs, allow-untyped-calls
"""Kernels of planning under constraints: annealing over the lists that `piece_listing` places."""

import numpy as np

from ringmaster.tasks.planning.kernels.compiled import kernel
from ringmaster.tasks.planning.with_rules.piece_listing import NEVER, List, is_allowed, listed


@kernel
def copy_list(a, b):
    """Copies list a into list b."""
    b.order[:], b.length[:], b.count[:] = a.order, a.length, a.count
    b.option[:], b.share[:] = a.option, a.share


@kernel
def place_of(now, j, i):
    """Returns the position in the list of the i-th piece of job j, or -1."""
    seen = 0
    for p in range(now.length[0]):
        if now.order[p] == j:
            if seen == i:
                return p
            seen += 1
    return -1


@kernel
def reinsert(order, a, b):
    """Moves the entry at position a to position b."""
    j = order[a]
    if a < b:
        for p in range(a, b):
            order[p] = order[p + 1]
    else:
        for p in range(a, b, -1):
            order[p] = order[p - 1]
    order[b] = j


@kernel
def move(now, options, at, most_pieces):
    """Changes a list at random, in place, and returns the job whose pieces changed.

    The function returns -1 if only the order changed, and -2 if nothing did. The changes are: move a piece, swap two
    pieces, change an option, cut a piece in two, join two pieces, shift work from one piece to the next. Half of the
    pieces are chosen among those that end late.
    """
    length = now.length[0]
    a = np.random.randint(length)
    if np.random.random() < 0.5:
        for _ in range(3):
            other = np.random.randint(length)
            if at[other] > at[a]:
                a = other
    j, i = now.order[a], 0
    for p in range(a):
        i += int(now.order[p] == j)
    kind = np.random.random()
    if kind < 0.25:
        if np.random.random() < 0.5:
            b = np.random.randint(length)
        else:
            b = min(length - 1, max(0, a + np.random.randint(-4, 5)))
        if a == b:
            return -2
        reinsert(now.order, a, b)
        return -1
    if kind < 0.35:
        b = np.random.randint(length)
        if now.order[a] == now.order[b]:
            return -2
        now.order[a], now.order[b] = now.order[b], now.order[a]
        return -1
    count = now.count[j]
    if kind < 0.65 or most_pieces == 1:
        o = np.random.randint(options.first[j], options.last[j])
        if o == now.option[j, i]:
            return -2
        now.option[j, i] = o
        return j
    if kind < 0.75:
        if count >= most_pieces:
            return -2
        for k in range(count, i + 1, -1):
            now.option[j, k], now.share[j, k] = now.option[j, k - 1], now.share[j, k - 1]
        part = now.share[j, i] * np.random.uniform(0.1, 0.9)
        now.share[j, i + 1] = now.share[j, i] - part
        now.share[j, i] = part
        now.option[j, i + 1] = now.option[j, i]
        changed = i + np.random.randint(2)
        now.option[j, changed] = np.random.randint(options.first[j], options.last[j])
        now.count[j] += 1
        now.order[length] = j
        now.length[0] += 1
        behind = place_of(now, j, i + 2)
        low, high = a + 1, behind if behind >= 0 else length
        reinsert(now.order, length, low + np.random.randint(max(1, high - low + 1)))
        return j
    if count == 1:
        return -2
    if kind < 0.83:
        into = i - 1 if i > 0 and np.random.random() < 0.5 else i + 1
        if into >= count:
            into = i - 1
        now.share[j, into] += now.share[j, i]
        for k in range(i, count - 1):
            now.option[j, k], now.share[j, k] = now.option[j, k + 1], now.share[j, k + 1]
        now.count[j] -= 1
        reinsert(now.order, a, length - 1)
        now.length[0] -= 1
        return j
    other = i + 1 if i + 1 < count else i - 1
    width = 10.0 ** np.random.uniform(-2.5, 0.0)
    part = min(width * np.random.random(), 0.9) * now.share[j, i]
    now.share[j, i] -= part
    now.share[j, other] += part
    return j


@kernel
def anneal_pieces(now, best, clock, energies, options, jobs, nodes, rules, heat, cool, steps, until, enough, seed):
    """Runs simulated annealing on a list, from temperature `heat` to `heat` x `cool` over `steps` trials.

    The search continues from `now` at trial clock[0] and stops at trial `until`. It changes clock, now, best and
    energies (of now and best) in place. Returns whether the energy of the best list is at most `enough`, which ends the
    search.
    """
    np.random.seed(seed)
    m, n = nodes.size.size, jobs.release.size
    widest = 0
    for v in range(m):
        widest = max(widest, nodes.size[v])
    free, held, num_held = np.zeros((m, widest)), np.zeros((m, now.order.size + n, 3)), np.zeros(m, np.int64)
    placed, ends, at = np.zeros(n, np.int64), np.zeros(n), np.zeros(now.order.size)
    trial_at = np.zeros(now.order.size)
    trial = List(now.order.copy(), now.length.copy(), now.count.copy(), now.option.copy(), now.share.copy())
    energies[0] = listed(now, options, jobs, nodes, rules, free, held, num_held, placed, ends, at)
    if clock[0] == 0:
        energies[1] = energies[0]
        copy_list(now, best)
    while clock[0] < until:
        if energies[1] <= enough:
            return True
        clock[0] += 1
        copy_list(now, trial)
        j = move(trial, options, at, rules.most_pieces)
        if j == -2 or (j >= 0 and not is_allowed(j, trial, options, jobs, rules)):
            continue
        energy = listed(trial, options, jobs, nodes, rules, free, held, num_held, placed, ends, trial_at)
        temperature = heat * cool ** (clock[0] / steps) * energies[1]
        if energy >= NEVER or (
            energy > energies[0] and np.random.random() >= np.exp((energies[0] - energy) / temperature)
        ):
            continue
        copy_list(trial, now)
        at[:] = trial_at
        energies[0] = energy
        if energy < energies[1]:
            energies[1] = energy
            copy_list(trial, best)
    return False
