# Numba infers the types of arguments; annotations would only say "array" again.
# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-defs, allow-untyped-calls
"""Kernels of planning under constraints: places lists of pieces of jobs, and anneals over such lists.

A list names a job once for each of its pieces: the i-th entry of job j is its i-th piece, of which option[j, i] does
share[j, i]. `listed` places the pieces in order, each where it can start first, as `list_scheduling.schedule_pieces`
does. Times are in units of a lower bound.
"""

from collections import namedtuple

import numpy as np

from ringmaster.tasks.planning.kernels.compiled import kernel

NEVER = 1e18
MAX_PIECES = 4
LATE = 20.0  # weight of lateness


Options = namedtuple("Options", "first last slot spread runtime startup save evaluate memory runs_on")
"""Options of all jobs in one row.

first, last: the options of job j are first[j] .. last[j] - 1.
runs_on: runs_on[o, v] is whether option o runs on node v.
"""


Jobs = namedtuple("Jobs", "release due weight latest started running runs_at pinned waits_from waits")
"""Attributes of each job.

weight: what each unit of time adds to the objective by which job j ends later; `Rules.scale` divides it.
latest: the factor of the end of job j in the last end.
running, runs_at: running[j] is the option under which job j runs at time 0, or -1, on the nodes v with runs_at[j,
    v].
waits_from, waits: job j waits for the jobs waits[waits_from[j] : waits_from[j + 1]].
"""


Nodes = namedtuple("Nodes", "size until price memory")
"""Attributes of each node: number of devices, end of availability, price of a device, and host memory.

price: what a device adds to the objective in each unit of time, divided by `Rules.scale`.
"""


Rules = namedtuple("Rules", "scale per_last per_end switch least per_switch cheaply most_pieces")
"""Rules of a search.

scale: the value of the objective that counts as one unit of time.
per_last: weight of the last end.
per_end: weight of early ends beside the last one; 0 if not only the last end counts.
switch: the cost of a switch.
least: minimum length of a piece of a job in several.
per_switch: minimum gain of a further piece.
cheaply: prefer cheap nodes.
most_pieces: maximum number of pieces per job.
"""


List = namedtuple("List", "order length count option share")
"""The order of jobs, order[:length[0]], and of each job j count[j] pieces, each with its option and share."""


@kernel
def piece_length(j, i, now, options, jobs, rules):
    """Returns the time of the i-th piece of job j, including its overhead."""
    o, is_last = now.option[j, i], i == now.count[j] - 1
    length = now.share[j, i] * options.runtime[o] + options.save[o]
    if is_last:
        length += options.evaluate[o]
    if i > 0 or jobs.running[j] != o:
        length += options.startup[o]
        if i > 0 or jobs.started[j]:
            length += rules.switch
    return length


@kernel
def is_allowed(j, now, options, jobs, rules):
    """Whether the pieces of a job are long enough, and a pinned job continues."""
    several = now.count[j] > 1
    for i in range(now.count[j]):
        if several and piece_length(j, i, now, options, jobs, rules) < rules.least:
            return False
    if jobs.pinned[j] > 0.0:
        if now.option[j, 0] != jobs.running[j]:
            return False
        if several and piece_length(j, 0, now, options, jobs, rules) < jobs.pinned[j]:
            return False
    return True


@kernel
def hold(v, slot, top, end, free):
    """Reserves the `slot` devices of node v below position `top`, in the order of their free times, until `end`."""
    size = free.shape[1]
    for d in range(top - slot, top):
        free[v, d] = end
    # The row is sorted except for these equal times: move them after the smaller ones.
    for d in range(top, size):
        if free[v, d] >= end:
            break
        free[v, d - slot] = free[v, d]
        free[v, d] = end


@kernel
def with_memory(v, need, start, length, limit, held, num_held):
    """Returns the first time from `start` at which node v has `need` memory for `length`.

    held: held[v, :num_held[v]] are the (start, end, size) of the memory that is in use.
    """
    if need <= 0.0 or limit >= NEVER:
        return start
    candidate = start
    while True:
        used, soonest = 0.0, NEVER
        for r in range(num_held[v]):
            if held[v, r, 1] > candidate and held[v, r, 0] < candidate + length:
                used += held[v, r, 2]
            if held[v, r, 1] > candidate:
                soonest = min(soonest, held[v, r, 1])
        if used + need <= limit * (1 + 1e-12):
            return candidate
        if soonest >= NEVER:
            return NEVER
        candidate = soonest


@kernel
def listed(now, options, jobs, nodes, rules, free, held, num_held, placed, ends, at):
    """Returns the energy of a list, lower is better; NEVER where the list is infeasible.

    ends: ends[j] is set to the end of job j.
    at: at[p] is set to the end of the piece at position p of the list.
    free, held, num_held, placed: scratch arrays.
    """
    m, n = nodes.size.size, jobs.release.size
    for v in range(m):
        for d in range(free.shape[1]):
            free[v, d] = 0.0 if d < nodes.size[v] else NEVER
        num_held[v] = 0
    placed[:] = 0
    paid = 0.0
    starts, taken = np.empty(m), np.zeros(m, np.bool_)
    for j in range(n):
        o = now.option[j, 0]
        if jobs.running[j] >= 0 and jobs.running[j] == o:
            length = piece_length(j, 0, now, options, jobs, rules)
            for v in range(m):
                if jobs.runs_at[j, v]:
                    if length > nodes.until[v]:
                        return NEVER
                    slot = options.slot[o]
                    hold(v, slot, slot, length, free)
                    paid += length * slot * nodes.price[v]
                    if options.memory[o] > 0.0 and nodes.memory[v] < NEVER:
                        held[v, num_held[v], 0], held[v, num_held[v], 1] = 0.0, length
                        held[v, num_held[v], 2] = options.memory[o]
                        num_held[v] += 1
            ends[j] = length
    for p in range(now.length[0]):
        j = now.order[p]
        i = placed[j]
        placed[j] += 1
        o = now.option[j, i]
        if i == 0:
            for w in range(jobs.waits_from[j], jobs.waits_from[j + 1]):
                if placed[jobs.waits[w]] < now.count[jobs.waits[w]]:
                    return NEVER
            if jobs.running[j] >= 0 and jobs.running[j] == o:
                at[p] = ends[j]
                continue
            ready = jobs.release[j]
            for w in range(jobs.waits_from[j], jobs.waits_from[j + 1]):
                ready = max(ready, ends[jobs.waits[w]])
        else:
            ready = max(ends[j], jobs.release[j])
        length = piece_length(j, i, now, options, jobs, rules)
        slot, need = options.slot[o], options.memory[o]
        for v in range(m):
            starts[v] = NEVER
            if options.runs_on[o, v]:
                s = max(ready, free[v, slot - 1])
                s = with_memory(v, need, s, length, nodes.memory[v], held, num_held)
                if s + length <= nodes.until[v]:
                    starts[v] = s
        start = 0.0
        taken[:] = False
        for _ in range(options.spread[o]):
            pick = -1
            for v in range(m):
                if taken[v] or starts[v] >= NEVER:
                    continue
                if pick < 0:
                    pick = v
                elif rules.cheaply:
                    late_v, late_p = starts[v] + length > jobs.due[j], starts[pick] + length > jobs.due[j]
                    if late_v != late_p:
                        pick = v if late_p else pick
                    elif not late_v and nodes.price[v] != nodes.price[pick]:
                        pick = v if nodes.price[v] < nodes.price[pick] else pick
                    elif starts[v] < starts[pick]:
                        pick = v
                elif starts[v] < starts[pick]:
                    pick = v
                elif starts[v] == starts[pick] and options.spread[o] == 1:
                    waste_v, waste_p = 0.0, 0.0
                    for d in range(free.shape[1]):
                        waste_v += max(0.0, starts[v] - free[v, d])
                        waste_p += max(0.0, starts[v] - free[pick, d])
                    if waste_v < waste_p:
                        pick = v
            if pick < 0:
                return NEVER
            taken[pick] = True
            start = max(start, starts[pick])
        end = start + length
        for v in range(m):
            if not taken[v]:
                continue
            if options.spread[o] > 1 and (
                end > nodes.until[v] or with_memory(v, need, start, length, nodes.memory[v], held, num_held) > start
            ):
                return NEVER
            top = slot
            while top < free.shape[1] and free[v, top] <= start:
                top += 1
            hold(v, slot, top, end, free)
            paid += length * slot * nodes.price[v]
            if need > 0.0 and nodes.memory[v] < NEVER:
                held[v, num_held[v], 0], held[v, num_held[v], 1], held[v, num_held[v], 2] = start, end, need
                num_held[v] += 1
        ends[j] = end
        at[p] = end
    late, last, weighted, extra = 0.0, 0.0, 0.0, 0
    for j in range(n):
        last = max(last, jobs.latest[j] * ends[j])
        late += max(0.0, ends[j] - jobs.due[j])
        weighted += jobs.weight[j] * ends[j]
        extra += now.count[j] - 1
    energy = LATE * late + (0.01 if late > 1e-9 else 0.0) + rules.per_switch * extra
    energy += weighted / rules.scale + paid
    energy += rules.per_last * last
    if rules.per_end > 0.0:
        whole, num = 0.0, 0
        for v in range(m):
            for d in range(nodes.size[v]):
                whole += min(last, free[v, d])
                num += 1
        energy += rules.per_end * whole / num
    return energy


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
