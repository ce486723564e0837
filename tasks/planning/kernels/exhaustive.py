# Numba infers the types of arguments; annotations would only say "array" again.
# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-defs, allow-untyped-calls
"""Kernels of the exhaustive search: a dynamic program over the sets of jobs that one node can finish by a given time.

Sets of jobs are bit masks. A *state* of a set is the sorted list of times at which a node's devices become free once
these jobs are placed. Only states of a set that no other state dominates on every device are stored.
"""

import numpy as np

from ringmaster.tasks.planning.kernels.compiled import kernel

ROOM, DONE, OVER = 0, 1, 2  # results of `extend`: call again; every set is done; the budget is spent
LANES = np.uint64(0x8080808080808080)  # the highest bit of each of eight bytes


@kernel
def place(free, size, slot, length, placed):
    """Places a gang of `slot` devices where it can start first; free[:size] is sorted, and so is the result, `placed`.

    Gangs are placed in the order of their starts, so devices left idle before this one starts count as free from its
    start on.
    """
    start = free[slot - 1]
    top = slot
    while top < size and free[top] <= start:
        top += 1
    for d in range(top - slot):
        placed[d] = start
    end, at, left = start + length, top - slot, slot
    for d in range(top, size):
        while left > 0 and end < free[d]:
            placed[at] = end
            at, left = at + 1, left - 1
        placed[at] = free[d]
        at += 1
    while left > 0:
        placed[at] = end
        at, left = at + 1, left - 1


@kernel
def sketch(state, size, shift):
    """Packs a state into eight bytes of seven bits each; a larger byte than another state's proves a later time."""
    found = np.uint64(0)
    for lane in range(8):
        d = lane if size <= 8 else lane * size // 8
        if d < size:
            found |= np.uint64(min(127, state[d] >> shift)) << np.uint64(8 * lane)
    return found


@kernel
def is_worth(mask, placed, size, limit, step, latest, first, last, need, excess, cheapest, worth, floor, must):
    """Whether the finished jobs and the time left can still reach the worth of a wanted set, at all prices.

    Jobs that must still be done take the cheapest option for which there is time; `excess` is its additional cost above
    the cheapest option.
    """
    for p in range(worth.shape[0]):
        left = worth[p, mask] - floor[p, mask]
        for d in range(size):
            left += step[p, d] * (limit - placed[d])
        if left < 0:
            return False
        rest, j = must[mask] & ~mask, 0
        while rest:
            if rest & 1:
                o = cheapest[p, j]
                if placed[need[o] - 1] > latest[o]:
                    least = np.inf
                    for o in range(first[j], last[j]):
                        if excess[p, o] < least and placed[need[o] - 1] <= latest[o]:
                            least = excess[p, o]
                    left -= least
                    if left < 0:
                        return False
            rest >>= 1
            j += 1
    return True


@kernel
def undominated(found, num_found, size, sketches, most):
    """Returns which of the states found[:num_found] no other state dominates, and the number of comparisons.

    The states are in the order of their sums. The function stops after `most` comparisons; the returned number is then
    larger than `most`.
    """
    total = np.zeros(num_found, np.int64)
    for i in range(num_found):
        for d in range(size):
            total[i] += found[i, d]
    order = np.argsort(total)
    kept = np.empty(num_found, np.int64)
    marks = np.empty(num_found, np.uint64)
    num_kept, compared = 0, 0
    for i in order:
        mark, is_beaten = sketches[i] | LANES, False
        for k in range(num_kept):
            if ((mark - marks[k]) & LANES) == LANES:
                d, other = 0, kept[k]
                while d < size and found[other, d] <= found[i, d]:
                    d += 1
                if d == size:
                    is_beaten = True
                    compared += k
                    break
        if not is_beaten:
            compared += num_kept
            kept[num_kept], marks[num_kept] = i, sketches[i]
            num_kept += 1
        if compared > most:
            break
    return kept[:num_kept], compared


@kernel
def extend(
    first, last, need, length, latest, excess, cheapest, size, limit, shift, step, worth, floor, wanted, must,
    states, parent, how, begin, count, progress, work, max_work,
):  # fmt: skip
    """Extends the sets in the order of their masks until `work` steps are done, or `max_work` in all.

    Options of job j are first[j] .. last[j] - 1: need[o] devices for length[o], starting by latest[o].
    At prices p, worth[p, mask] is that of a set of jobs, step[p, i] that of the i-th device to become free, excess[p,
    o] that of option o above the cheapest of its job (cheapest[p, j]), and floor[p, mask] that of the least wanted set
    that includes all of these jobs.
    must[mask] are the jobs that all such sets have in common, and wanted[mask] is whether there are any. The states of
    a set are states[begin[mask]:][:count[mask]]; how[s] is the option that led to s from state parent[s].
    progress: the next mask, the number of states in use, the number of steps so far.
    """
    found, sketches = np.empty((1024, size), np.int32), np.empty(1024, np.uint64)
    origin, option = np.empty(1024, np.int32), np.empty(1024, np.int32)
    stop = progress[2] + work
    for mask in range(max(1, progress[0]), count.size):
        if progress[2] >= stop:
            progress[0] = mask
            return ROOM
        if not wanted[mask]:
            continue
        num_found = 0
        for j in range(first.size):
            before = mask & ~(1 << j)
            if before == mask:
                continue
            for s in range(begin[before], begin[before] + count[before]):
                for o in range(first[j], last[j]):
                    if states[s, need[o] - 1] > latest[o]:
                        continue
                    if num_found == origin.size:
                        found, sketches = np.concatenate((found, found)), np.concatenate((sketches, sketches))
                        origin, option = np.concatenate((origin, origin)), np.concatenate((option, option))
                    placed = found[num_found]
                    place(states[s], size, need[o], length[o], placed)
                    progress[2] += 10
                    if is_worth(
                        mask, placed, size, limit, step, latest, first, last, need, excess, cheapest, worth, floor, must
                    ):
                        sketches[num_found] = sketch(placed, size, shift)
                        origin[num_found], option[num_found] = s, o
                        num_found += 1
        kept, compared = undominated(found, num_found, size, sketches, max_work - progress[2])
        progress[2] += compared
        if progress[2] > max_work or progress[1] + kept.size > parent.size:
            return OVER
        begin[mask], count[mask] = progress[1], kept.size
        for i in kept:
            here = progress[1]
            states[here] = found[i]
            parent[here], how[here] = origin[i], option[i]
            progress[1] += 1
    progress[0] = count.size
    return DONE


@kernel
def look_ahead(wanted, floor, must):
    """Extends `wanted`, `floor` and `must` from the wanted sets to all sets, in place.

    wanted[mask] becomes whether any wanted set includes all jobs of the mask, floor[p, mask] the least worth among
    those sets, and must[mask] the jobs that all of them have in common.
    """
    bit = 1
    while bit < wanted.size:
        for mask in range(wanted.size):
            if mask & bit and wanted[mask]:
                less = mask ^ bit
                for p in range(floor.shape[0]):
                    floor[p, less] = min(floor[p, less], floor[p, mask])
                must[less] &= must[mask]
                wanted[less] = True
        bit <<= 1


@kernel
def first_ends(states, begin, count, size):
    """Returns for each set the state whose last device becomes free first, or -1."""
    best = np.full(count.size, -1, np.int64)
    for mask in range(count.size):
        for s in range(begin[mask], begin[mask] + count[mask]):
            if best[mask] < 0 or states[s, size - 1] < states[best[mask], size - 1]:
                best[mask] = s
    return best


@kernel
def unions(reached, added, never):
    """Joins disjoint sets; `reached` and `added` hold when each set can end, or `never`.

    Returns for each union the earliest end, and the added set of that join.
    """
    end, how = np.full(reached.size, never, reached.dtype), np.zeros(reached.size, np.int32)
    for mask in range(reached.size):
        if reached[mask] == never:
            continue
        rest = (reached.size - 1) & ~mask
        more = rest
        while True:
            later = max(reached[mask], added[more])
            if later < end[mask | more]:
                end[mask | more], how[mask | more] = later, more
            if more == 0:
                break
            more = (more - 1) & rest
    return end, how
