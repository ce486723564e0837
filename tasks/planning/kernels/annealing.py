# Numba infers the types of arguments; annotations would only repeat "array".
# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-defs, allow-untyped-calls
"""Kernels of plans without preemption: annealing over the sequence of jobs on each node and the option of each job."""

import numpy as np

from ringmaster.tasks.planning.kernels import kernel

LATE = 0.1  # cost of a device that is in use beyond the target, in device time
PER_STEP = 70  # work of a trial in addition to that of placing jobs
OPTION, ORDER, MOVE = 0.3, 0.5, 0.75  # upper limits of the random number for each kind of move; above: a swap


@kernel
def fill_node(sequence, count, option, need, length, size, head, free):
    """Places a node's jobs in their order, each where it can start first; free[:size] are the ends of its devices.

    Of the free devices, a gang takes those that became free last.

    head: head[:size] are the times at which the devices become free at first, sorted.
    """
    free[:size] = head[:size]
    for x in range(count):
        o = option[sequence[x]]
        s = need[o]
        start = free[s - 1]
        top = s  # free[:size] is sorted: those up to `top` are free at `start`
        while top < size and free[top] <= start:
            top += 1
        # The last s of free[:top] are taken: the later entries shift down, and s equal ends are merged in after them.
        end = start + length[o]
        for v in range(top, size):
            if free[v] >= end:
                break
            free[v - s] = free[v]
            top += 1
        for v in range(top - s, top):
            free[v] = end


@kernel
def cost_of(free, size, target, spread):
    """Returns the device time of a node beyond the target, plus `spread` times its total device time.

    Each device that is in use beyond the target also costs `LATE`. Otherwise, a job whose option is a little longer
    than the target would keep it, since its other options cost more device time than they save beyond the target.
    """
    beyond, used = 0.0, 0.0
    for d in range(size):
        used += free[d]
        if free[d] > target:
            beyond += free[d] - target + LATE
    return beyond + spread * used


@kernel
def work_of(count, size):
    """Returns the work of placing a node's jobs: steps of the loops in `fill_node` and `cost_of`, about."""
    return 20 + count * (4 + size // 2) + size


@kernel
def shift(row, x, y):
    """Moves the entry at position x of a row to position y."""
    j = row[x]
    if x < y:
        row[x:y] = row[x + 1 : y + 1].copy()
    else:
        row[y + 1 : x + 1] = row[y:x].copy()
    row[y] = j


@kernel
def shorten(sequence, count, option, first, last, need, length, size, limit):
    """Replaces the options of a node's jobs that are longer than the limit by those of least area that are not."""
    for x in range(count):
        j = sequence[x]
        if length[option[j]] > limit:
            least = np.inf
            for o in range(first[j], last[j]):
                if need[o] <= size and length[o] <= limit and need[o] * length[o] < least:
                    option[j], least = o, need[o] * length[o]


@kernel
def limit_of(state, is_strict):
    """Returns the length up to which options may be taken: the target, or just less than the best makespan."""
    return state[1] if is_strict else state[0] - 1e-12


@kernel
def anneal(
    first, last, need, length, kind, size, heads, sequences, counts, option, best_sequences, best_counts, best_option,
    state, settings, begin, stop, steps, bound, seed,
):  # fmt: skip
    """Runs steps begin .. stop - 1 of `steps` of simulated annealing over (sequence of jobs per node, option per job).

    The search minimizes the device time beyond a target, which itself stays just below the best makespan found. No
    job takes an option that lasts until that makespan. Times are in units of the lower bound on the makespan.

    first, last: the options of job j are first[j] .. last[j] - 1.
    need, length: option o takes need[kind[v], o] devices of node v for length[o].
    size, heads: size[v] devices of node v become free at heads[v] at first.
    state: state[0] is the best makespan, which ends the search at `bound`; state[1] is the target; state[2] is the work
        done, in `work_of`, which ends the search at state[3].
    settings: the initial temperature, the share of it that is left at the end, the weight of the device time used, the
        distance of the target below the makespan, and whether no job may take an option longer than the target.
    """
    heat, cool, spread, below, is_strict = settings
    longest = limit_of(state, is_strict)
    np.random.seed(seed + begin)
    num_nodes, width = size.size, sequences.shape[1]
    free, end, cost = np.zeros(size.max()), np.zeros(num_nodes), np.zeros(num_nodes)
    row_a, row_b = np.zeros(width, np.int32), np.zeros(width, np.int32)
    for v in range(num_nodes):
        fill_node(sequences[v], counts[v], option, need[kind[v]], length, size[v], heads[v], free)
        end[v], cost[v] = free[size[v] - 1], cost_of(free, size[v], state[1], spread)
    worst, temperature = np.argmax(end), 0.0
    for step in range(begin, stop):
        if step % 1000 == 0 or step == begin:
            if state[2] >= state[3]:
                break
            temperature = heat * cool ** max(step / steps, state[2] / state[3])
        state[2] += PER_STEP
        a = worst if np.random.random() < 0.3 else np.random.randint(num_nodes)
        if counts[a] == 0:
            continue
        x = np.random.randint(counts[a])
        j, k, b, draw = sequences[a, x], -1, -1, np.random.random()
        old_j, old_k, count_a, count_b = option[j], 0, counts[a], 0
        new_j, new_k = old_j, 0
        if draw < OPTION:
            new_j = first[j] + np.random.randint(last[j] - first[j])
            if new_j == old_j or need[kind[a], new_j] > size[a] or length[new_j] > longest:
                continue
            row_a[:count_a] = sequences[a, :count_a]
            if np.random.random() < 0.5:
                shift(row_a, x, np.random.randint(count_a))
        elif draw < ORDER or num_nodes == 1:
            y = np.random.randint(count_a)
            if x == y:
                continue
            row_a[:count_a] = sequences[a, :count_a]
            if np.random.random() < 0.5:
                row_a[x], row_a[y] = row_a[y], j
            else:
                shift(row_a, x, y)
        else:
            b = np.random.randint(num_nodes)
            count_b = counts[b]
            if a == b:
                continue
            is_free = np.random.random() < 0.3  # whether options change as well
            if is_free or need[kind[b], old_j] > size[b]:
                new_j = first[j] + np.random.randint(last[j] - first[j])
            if need[kind[b], new_j] > size[b] or (new_j != old_j and length[new_j] > longest):
                continue
            if draw < MOVE:
                if count_b >= width:
                    continue
                row_a[:x], row_a[x : count_a - 1] = sequences[a, :x], sequences[a, x + 1 : count_a]
                row_b[:count_b] = sequences[b, :count_b]
                row_b[count_b] = j
                count_a, count_b = count_a - 1, count_b + 1
                shift(row_b, count_b - 1, np.random.randint(count_b))
            else:  # swapped with a job of another node
                if count_b == 0:
                    continue
                y = np.random.randint(count_b)
                k = sequences[b, y]
                old_k = new_k = option[k]
                if is_free or need[kind[a], old_k] > size[a]:
                    new_k = first[k] + np.random.randint(last[k] - first[k])
                if need[kind[a], new_k] > size[a] or (new_k != old_k and length[new_k] > longest):
                    continue
                row_a[:count_a], row_b[:count_b] = sequences[a, :count_a], sequences[b, :count_b]
                row_a[x], row_b[y] = k, j
        option[j] = new_j
        if k >= 0:
            option[k] = new_k
        fill_node(row_a, count_a, option, need[kind[a]], length, size[a], heads[a], free)
        end_a, cost_a, end_b, cost_b = free[size[a] - 1], cost_of(free, size[a], state[1], spread), 0.0, 0.0
        more = cost_a - cost[a]
        state[2] += work_of(count_a, size[a])
        if b >= 0:
            state[2] += work_of(count_b, size[b])
            fill_node(row_b, count_b, option, need[kind[b]], length, size[b], heads[b], free)
            end_b, cost_b = free[size[b] - 1], cost_of(free, size[b], state[1], spread)
            more += cost_b - cost[b]
        if more > 0 and np.random.random() >= np.exp(-more / temperature):
            option[j] = old_j
            if k >= 0:
                option[k] = old_k
            continue
        end[a], cost[a], counts[a] = end_a, cost_a, count_a
        sequences[a, :count_a] = row_a[:count_a]
        if b >= 0:
            end[b], cost[b], counts[b] = end_b, cost_b, count_b
            sequences[b, :count_b] = row_b[:count_b]
        worst = np.argmax(end)
        if end[worst] < state[0] - 1e-12:
            state[0] = end[worst]
            best_sequences[:], best_counts[:], best_option[:] = sequences, counts, option
            if state[0] <= bound:
                break
            if state[0] - below < state[1]:
                state[1] = state[0] - below
            longest = limit_of(state, is_strict)
            for v in range(num_nodes):
                shorten(sequences[v], counts[v], option, first, last, need[kind[v]], length, size[v], longest)
                fill_node(sequences[v], counts[v], option, need[kind[v]], length, size[v], heads[v], free)
                end[v], cost[v] = free[size[v] - 1], cost_of(free, size[v], state[1], spread)
            worst = np.argmax(end)


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
    bits = np.uint64(0)
    for lane in range(8):
        d = lane if size <= 8 else lane * size // 8
        if d < size:
            bits |= np.uint64(min(127, state[d] >> shift)) << np.uint64(8 * lane)
    return bits


@kernel
def is_worth(mask, placed, size, limit, step, length, first, last, need, excess, cheapest, worth, floor, must):
    """Whether the finished jobs and the time left can still reach the worth of a wanted set.

    Jobs that must still be done take the cheapest option for which there is time; `excess` is its additional cost above
    the cheapest option.
    """
    left = worth[mask] - floor[mask]
    for d in range(size):
        left += step[d] * (limit - placed[d])
    if left < 0:
        return False
    rest, j = must[mask] & ~mask, 0
    while rest:
        if rest & 1:
            o = cheapest[j]
            if placed[need[o] - 1] + length[o] > limit:
                least = np.inf
                for o in range(first[j], last[j]):
                    if excess[o] < least and placed[need[o] - 1] + length[o] <= limit:
                        least = excess[o]
                left -= least
                if left < 0:
                    return False
        rest >>= 1
        j += 1
    return True


@kernel
def undominated(states, num_states, size, sketches, most):
    """Returns which of the states found[:num_found] no other state dominates, and the number of comparisons.

    The states are in the order of their sums. The function stops after `most` comparisons; the returned number is then
    larger than `most`.
    """
    total = np.zeros(num_states, np.int64)
    for i in range(num_states):
        for d in range(size):
            total[i] += states[i, d]
    order = np.argsort(total)
    kept = np.empty(num_states, np.int64)
    marks = np.empty(num_states, np.uint64)
    num_kept, compared = 0, 0
    for i in order:
        mark, is_beaten = sketches[i] | LANES, False
        for k in range(num_kept):
            if ((mark - marks[k]) & LANES) == LANES:
                d, other = 0, kept[k]
                while d < size and states[other, d] <= states[i, d]:
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
    first, last, need, length, excess, cheapest, size, limit, shift, step, worth, floor, wanted, must,
    states, parent, how, begin, count, progress, work, max_work,
):  # fmt: skip
    """Extends the sets in the order of their masks until `work` steps are done, or `max_work` in all.

    Options of job j are first[j] .. last[j] - 1: need[o] devices for length[o].
    At the prices, worth[mask] is that of a set of jobs, step[i] that of the i-th device to become free, excess[o] that
    of option o above the cheapest of its job (cheapest[j]), and floor[mask] that of the least wanted set that includes
    all of these jobs.
    must[mask] are the jobs that all such sets have in common, and wanted[mask] is whether there are any. The states of
    a set are states[begin[mask]:][:count[mask]]; how[s] is the option that led to s from state parent[s].
    progress: the next mask, the number of states in use, the number of steps so far.
    """
    buffers, sketches = np.empty((1024, size), np.int32), np.empty(1024, np.uint64)
    origin, option = np.empty(1024, np.int32), np.empty(1024, np.int32)
    stop = progress[2] + work
    for mask in range(max(1, progress[0]), count.size):
        if progress[2] >= stop:
            progress[0] = mask
            return ROOM
        if not wanted[mask]:
            continue
        num_states = 0
        for j in range(first.size):
            before = mask & ~(1 << j)
            if before == mask:
                continue
            for s in range(begin[before], begin[before] + count[before]):
                for o in range(first[j], last[j]):
                    if states[s, need[o] - 1] + length[o] > limit:
                        continue
                    if num_states == origin.size:
                        buffers, sketches = np.concatenate((buffers, buffers)), np.concatenate((sketches, sketches))
                        origin, option = np.concatenate((origin, origin)), np.concatenate((option, option))
                    placed = buffers[num_states]
                    place(states[s], size, need[o], length[o], placed)
                    progress[2] += 10
                    if is_worth(
                        mask, placed, size, limit, step, length, first, last, need, excess, cheapest, worth, floor, must
                    ):
                        sketches[num_states] = sketch(placed, size, shift)
                        origin[num_states], option[num_states] = s, o
                        num_states += 1
        kept, compared = undominated(buffers, num_states, size, sketches, max_work - progress[2])
        progress[2] += compared
        if progress[2] > max_work or progress[1] + kept.size > parent.size:
            return OVER
        begin[mask], count[mask] = progress[1], kept.size
        for i in kept:
            here = progress[1]
            states[here] = buffers[i]
            parent[here], how[here] = origin[i], option[i]
            progress[1] += 1
    progress[0] = count.size
    return DONE


@kernel
def look_ahead(wanted, floor, must):
    """Extends `wanted`, `floor` and `must` from the wanted sets to all sets, in place.

    wanted[mask] becomes whether any wanted set includes all jobs of the mask, floor[mask] the least worth among those
    sets, and must[mask] the jobs that all of them have in common.
    """
    bit = 1
    while bit < wanted.size:
        for mask in range(wanted.size):
            if mask & bit and wanted[mask]:
                less = mask ^ bit
                floor[less] = min(floor[less], floor[mask])
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
