# Numba infers the types of arguments; annotations would only say "array" again.
# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-defs, allow-untyped-calls
"""The compiled inner loops of plans without preemption: annealing over sequences of jobs with their
options."""

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def fill_node(sequence, count, option, need, length, size, free):
    """Places a node's jobs in their order, each where it can start first; free[:size] are when its devices
    end.

    Returns when the node ends. Of the devices that are free, a gang takes those that became free last.
    """
    free[:size] = 0.0
    for x in range(count):
        o = option[sequence[x]]
        s = need[o]
        start = free[s - 1]
        top = s  # free[:size] is sorted: those up to `top` are free at `start`
        while top < size and free[top] <= start:
            top += 1
        # The last s of free[:top] are taken; what stays closes up, and s equal ends are merged in behind.
        end = start + length[o]
        for v in range(top, size):
            if free[v] >= end:
                break
            free[v - s] = free[v]
            top += 1
        for v in range(top - s, top):
            free[v] = end
    return free[size - 1]


@njit(cache=True, nogil=True)
def anneal_nodes(
    first,
    last,
    need,
    length,
    size,
    sequences,
    counts,
    option,
    heat,
    cool,
    sharpness,
    spread_weight,
    steps,
    target,
    seed,
):
    """Anneals (sequence of jobs a node, option a job); sequences, counts and option are changed to the best
    found.

    Options of job j are first[j] .. last[j] - 1: need[o] devices of one node for length[o]. size[v]: a
    node's devices. What is minimised is log(sum_v exp(sharpness * end_v)) / sharpness, nearly the last end,
    plus `spread_weight` times the mean time at which devices become free. Half of the moves touch the node
    that ends last. Stops at `target`. Returns the makespan. Times are in units of a bound on it.
    """
    np.random.seed(seed)
    num_nodes, width = size.size, sequences.shape[1]
    total_devices = size.sum()
    free = np.zeros(size.max() + 1)
    end, idle = np.zeros(num_nodes), np.zeros(num_nodes)
    for v in range(num_nodes):
        end[v] = fill_node(sequences[v], counts[v], option, need, length, size[v], free)
        idle[v] = free[: size[v]].sum()
    crowd = np.exp(sharpness * np.minimum(end - 1.0, 2.0))
    cost = np.log(crowd.sum()) / sharpness + spread_weight * idle.sum() / total_devices
    best, best_end = cost, end.max()
    best_sequences, best_counts, best_option = sequences.copy(), counts.copy(), option.copy()
    row_a, row_b = np.zeros(width, np.int32), np.zeros(width, np.int32)
    worst = np.argmax(end)
    for step in range(steps):
        temperature = heat * cool ** (step / steps)
        a = worst if np.random.random() < 0.5 else np.random.randint(num_nodes)
        if counts[a] == 0:
            continue
        x = np.random.randint(counts[a])
        j = sequences[a, x]
        old_j, k, old_k, b = option[j], -1, 0, -1
        kind = np.random.random()
        if kind < 0.3:  # another option
            if last[j] - first[j] < 2:
                continue
            o = first[j] + np.random.randint(last[j] - first[j])
            if o == old_j or need[o] > size[a]:
                continue
            option[j] = o
            row_a[: counts[a]] = sequences[a, : counts[a]]
            count_a, count_b = counts[a], 0
        elif kind < 0.5 or num_nodes == 1:  # elsewhere in the sequence
            y = np.random.randint(counts[a])
            if x == y:
                continue
            row_a[: counts[a]] = sequences[a, : counts[a]]
            if x < y:
                row_a[x:y] = sequences[a, x + 1 : y + 1]
            else:
                row_a[y + 1 : x + 1] = sequences[a, y:x]
            row_a[y] = j
            count_a, count_b = counts[a], 0
        else:
            b = np.random.randint(num_nodes)
            if a == b:
                continue
            if kind < 0.75:  # to another node, at times under another option
                if counts[b] >= width:
                    continue
                if np.random.random() < 0.3 or need[old_j] > size[b]:
                    o = first[j] + np.random.randint(last[j] - first[j])
                    if need[o] > size[b]:
                        continue
                    option[j] = o
                y = np.random.randint(counts[b] + 1)
                row_a[:x], row_a[x : counts[a] - 1] = sequences[a, :x], sequences[a, x + 1 : counts[a]]
                row_b[:y], row_b[y + 1 : counts[b] + 1] = sequences[b, :y], sequences[b, y : counts[b]]
                row_b[y] = j
                count_a, count_b = counts[a] - 1, counts[b] + 1
            else:  # swapped with a job of another node
                if counts[b] == 0:
                    continue
                y = np.random.randint(counts[b])
                k = sequences[b, y]
                old_k = option[k]
                if need[old_j] > size[b] or need[old_k] > size[a]:
                    continue
                row_a[: counts[a]], row_b[: counts[b]] = sequences[a, : counts[a]], sequences[b, : counts[b]]
                row_a[x], row_b[y] = k, j
                count_a, count_b = counts[a], counts[b]
        end_a = fill_node(row_a, count_a, option, need, length, size[a], free)
        idle_a = free[: size[a]].sum()
        end_b, idle_b = 0.0, 0.0
        if b >= 0:
            end_b = fill_node(row_b, count_b, option, need, length, size[b], free)
            idle_b = free[: size[b]].sum()
        crowd_a, crowd_b = np.exp(sharpness * min(end_a - 1.0, 2.0)), 0.0
        more, crowded = idle_a - idle[a], crowd.sum() + crowd_a - crowd[a]
        if b >= 0:
            crowd_b = np.exp(sharpness * min(end_b - 1.0, 2.0))
            more += idle_b - idle[b]
            crowded += crowd_b - crowd[b]
        new = np.log(crowded) / sharpness + spread_weight * (idle.sum() + more) / total_devices
        if new > cost and np.random.random() >= np.exp((cost - new) / temperature):
            option[j] = old_j
            continue
        cost, end[a], idle[a], counts[a], crowd[a] = new, end_a, idle_a, count_a, crowd_a
        sequences[a, :count_a] = row_a[:count_a]
        if b >= 0:
            end[b], idle[b], counts[b], crowd[b] = end_b, idle_b, count_b, crowd_b
            sequences[b, :count_b] = row_b[:count_b]
        worst = np.argmax(end)
        if end[worst] < best_end - 1e-12 or (end[worst] <= best_end and cost < best):
            best, best_end = cost, end[worst]
            best_sequences[:], best_counts[:], best_option[:] = sequences, counts, option
            if best_end <= target:
                break
    sequences[:], counts[:], option[:] = best_sequences, best_counts, best_option
    return best_end
