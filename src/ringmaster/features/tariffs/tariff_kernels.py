# Numba infers the types of arguments; annotations would only repeat "array".
# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-defs, allow-untyped-calls
"""Kernel that places one job at the least cost beside all others, in one piece or with pauses.

Time is divided into pieces, within which prices and free devices are constant. At a reward of `reward` for the whole
job, a dynamic program over the pieces finds where the job runs such that reward x work - cost is largest. The least
reward at which it does all its work is found by bisection, and what it does too much is cut where that saves most.
"""

from typing import Any, NamedTuple

import numpy as np

from ringmaster.tasks.planning.kernels import kernel

NEVER = -1e300
MAX_RUNS = 12  # of a job in a plan
BISECTIONS = 24
CLOSE = 1e-2  # relative difference of rewards at which the bisection ends


class Rules(NamedTuple):
    """What does not change during a search. Seconds; worth per second.

    points[q] begins a window of constant prices; plain[kind, q] + power x energy[kind, q] is the worth of a
    device-second there, and scarce[kind, q, s] a further worth of a slot of s devices.
    place_option[p], place_nodes[p, :]: the options and nodes of places; -1 after the last node. Those of job j are
    first_place[j] to first_place[j + 1]. held[p] is whether the job runs there at time 0.
    power[o, kind], and what an option pays: head at a job's first start, again at each further one, save and evaluate.
    """

    points: Any
    plain: Any
    energy: Any
    scarce: Any
    kind: Any
    size: Any
    memory: Any
    until: Any
    place_option: Any
    place_nodes: Any
    held: Any
    first_place: Any
    slot: Any
    devices: Any
    runtime: Any
    head: Any
    again: Any
    save: Any
    evaluate: Any
    host_memory: Any
    power: Any
    group: Any
    limit: Any


class Runs(NamedTuple):
    """A plan: counts[j] runs of job j, at places[j, i] from starts[j, i] to ends[j, i]."""

    counts: Any
    places: Any
    starts: Any
    ends: Any


@kernel
def concerns(rules, job, other, place, tried):
    """Whether a run of another job at a place takes what the job could have: devices that are tried, or a quota."""
    is_shared = rules.limit[job] >= 0 and rules.group[other] == rules.group[job]
    for v in rules.place_nodes[place]:
        is_shared = is_shared or (v >= 0 and tried[v])
    return is_shared


@kernel
def tried_places(rules, job, tried):
    """Returns the places of a job of which all nodes are tried."""
    first = rules.first_place[job]
    places, size = np.empty(rules.first_place[job + 1] - first, np.int64), 0
    for p in range(first, rules.first_place[job + 1]):
        if is_tried(rules, p, tried):
            places[size] = p
            size += 1
    return places[:size]


@kernel
def grid_of(rules, runs, job, low, high, tried):
    """Returns the times from low to high at which a price, a free device or a node's presence changes."""
    num = rules.points.size + rules.until.size + 2
    for j in range(runs.counts.size):
        num += 2 * runs.counts[j]
    times = np.empty(num)
    times[0], times[1] = low, high
    size = 2
    for time in rules.points:
        if low < time < high:
            times[size] = time
            size += 1
    for time in rules.until:
        if low < time < high:
            times[size] = time
            size += 1
    for j in range(runs.counts.size):
        if j == job:
            continue
        for i in range(runs.counts[j]):
            if runs.ends[j, i] <= low or runs.starts[j, i] >= high:
                continue
            if not concerns(rules, job, j, runs.places[j, i], tried):
                continue
            for time in (runs.starts[j, i], runs.ends[j, i]):
                if low < time < high:
                    times[size] = time
                    size += 1
    times = np.sort(times[:size])
    kept = 1
    for i in range(1, size):
        if times[i] > times[kept - 1]:
            times[kept] = times[i]
            kept += 1
    return times[:kept]


@kernel
def capacity_of(rules, runs, job, grid, tried):
    """Returns the free devices and free host memory of each node in each piece, and those that the group may take."""
    num = grid.size - 1
    devices = np.zeros((rules.size.size, num), np.int64)
    memory = np.zeros((rules.size.size, num))
    group = np.full(num, 1 << 40)
    for v in range(rules.size.size):
        for k in range(num):
            if grid[k + 1] <= rules.until[v]:
                devices[v, k], memory[v, k] = rules.size[v], rules.memory[v]
    if rules.limit[job] >= 0:
        group[:] = rules.limit[job]
    for j in range(runs.counts.size):
        if j == job:
            continue
        for i in range(runs.counts[j]):
            if runs.ends[j, i] <= grid[0] or runs.starts[j, i] >= grid[num]:
                continue
            if not concerns(rules, job, j, runs.places[j, i], tried):
                continue
            first = max(0, np.searchsorted(grid, runs.starts[j, i]))
            last = min(num, np.searchsorted(grid, runs.ends[j, i]))
            p = runs.places[j, i]
            o = rules.place_option[p]
            for k in range(first, last):
                for v in rules.place_nodes[p]:
                    if v >= 0:
                        devices[v, k] -= rules.slot[o]
                        memory[v, k] -= rules.host_memory[o]
                if rules.group[j] == rules.group[job]:
                    group[k] -= rules.devices[o]
    return devices, memory, group


@kernel
def rates_of(rules, places, grid, scarcity):
    """Returns the worth of a second at each of some places in each piece."""
    num = grid.size - 1
    rates = np.zeros((places.size, num))
    for p in range(places.size):
        o = rules.place_option[places[p]]
        q = 0
        for k in range(num):
            while q + 1 < rules.points.size and rules.points[q + 1] <= grid[k]:
                q += 1
            total = 0.0
            for v in rules.place_nodes[places[p]]:
                if v >= 0:
                    kind = rules.kind[v]
                    per_device = rules.plain[kind, q] + rules.power[o, kind] * rules.energy[kind, q]
                    total += rules.slot[o] * per_device + scarcity * rules.scarce[kind, q, rules.slot[o]]
            rates[p, k] = total
    return rates


@kernel
def is_tried(rules, place, tried):
    """Whether all nodes of a place are tried."""
    is_left_out = False
    for v in rules.place_nodes[place]:
        is_left_out = is_left_out or (v >= 0 and not tried[v])
    return not is_left_out


@kernel
def fits_of(rules, places, grid, devices, memory, group):
    """Returns whether a job fits its places in each piece."""
    num = grid.size - 1
    fits = np.zeros((places.size, num), np.bool_)
    for p in range(places.size):
        o = rules.place_option[places[p]]
        for k in range(num):
            fits[p, k] = group[k] >= rules.devices[o]
            for v in rules.place_nodes[places[p]]:
                if v >= 0 and (devices[v, k] < rules.slot[o] or memory[v, k] < rules.host_memory[o]):
                    fits[p, k] = False
                    break
    return fits


@kernel
def worth_between(grid, rates, start, end):
    """Returns the integral of a row of rates between two times."""
    total = 0.0
    k = max(0, np.searchsorted(grid, start, side="right") - 1)
    while k < grid.size - 1 and grid[k] < end:
        total += rates[k] * (min(grid[k + 1], end) - max(grid[k], start))
        k += 1
    return total


@kernel
def paid_by(rules, place, is_first, is_last, at_start):
    """Returns the seconds of a run that do no work; `at_start` is whether it begins at time 0."""
    o = rules.place_option[place]
    paid = rules.save[o] + (rules.evaluate[o] if is_last else 0.0)
    if is_first and at_start and rules.held[place]:
        return paid
    return paid + (rules.head[o] if is_first else rules.again[o])


@kernel
def best_runs(rules, places, grid, rates, fits, reward, last, end_rate, least, pin, out_place, out_start, out_end):
    """Fills the runs that maximise reward x work - cost, and returns their number and work.

    out_place: indices of `places`.
    last: end of all other jobs, after which each second costs `end_rate`.
    pin: a job that runs at time 0 must continue until then.
    """
    num_places, num = rates.shape
    value = np.full(num_places, NEVER)
    begun = np.zeros(num_places, np.int64)
    after = np.full(num_places, -1, np.int64)
    paused = np.full(num + 1, NEVER)  # the best value of plans in which the job has run, and pauses now
    at = np.full(num + 1, -1, np.int64)  # the piece before which the last run of that plan ended
    place_at = np.zeros(num + 1, np.int64)
    begun_at = np.zeros(num + 1, np.int64)
    after_at = np.full(num + 1, -1, np.int64)
    best, best_place, best_begun, best_after, best_end = 0.0, -1, 0, -1, 0
    for k in range(num):
        length = grid[k + 1] - grid[k]
        for p in range(num_places):
            if not fits[p, k]:
                value[p] = NEVER
                continue
            o = rules.place_option[places[p]]
            per_second = reward / rules.runtime[o]
            is_held = k == 0 and grid[0] == 0.0 and rules.held[places[p]]
            paid = rules.save[o] + rules.evaluate[o] + (0.0 if is_held else rules.head[o])
            start, previous = -per_second * paid, -1
            if pin > 0.0 and not is_held:
                start = NEVER
            if paused[k] > NEVER:
                again = paused[k] - per_second * (rules.again[o] + rules.save[o])
                if again > start:
                    start, previous = again, at[k]
            if start > value[p]:
                value[p], begun[p], after[p] = start, k, previous
            value[p] += length * (per_second - rates[p, k])
        for p in range(num_places):
            if value[p] <= NEVER / 2 or grid[k + 1] < pin:
                continue
            is_long = grid[k + 1] - grid[begun[p]] >= least
            late = end_rate * max(0.0, grid[k + 1] - last)
            if (is_long or after[p] < 0) and value[p] - late > best:
                best, best_place, best_begun, best_after = value[p] - late, p, begun[p], after[p]
                best_end = k + 1
            if is_long and value[p] > paused[k + 1]:
                paused[k + 1], at[k + 1], place_at[k + 1] = value[p], k + 1, p
                begun_at[k + 1], after_at[k + 1] = begun[p], after[p]
        if paused[k] > paused[k + 1]:
            paused[k + 1], at[k + 1] = paused[k], at[k]
    if best_place < 0:
        return 0, 0.0
    count, work = 0, 0.0
    p, start, previous, end = best_place, best_begun, best_after, best_end
    while True:
        if count == MAX_RUNS:
            return 0, 0.0
        out_place[count], out_start[count], out_end[count] = p, grid[start], grid[end]
        count += 1
        if previous < 0:
            break
        end = previous
        p, start, previous = place_at[end], begun_at[end], after_at[end]
    for i in range(count // 2):
        k = count - 1 - i
        out_place[i], out_place[k] = out_place[k], out_place[i]
        out_start[i], out_start[k] = out_start[k], out_start[i]
        out_end[i], out_end[k] = out_end[k], out_end[i]
    for i in range(count):
        work += work_of_run(rules, i, count, places[out_place[:count]], out_start, out_end)
    return count, work


@kernel
def work_of_run(rules, i, count, place, start, end):
    """Returns the share of the job that the i-th of its runs does."""
    paid = paid_by(rules, place[i], i == 0, i == count - 1, start[i] == 0.0)
    return (end[i] - start[i] - paid) / rules.runtime[rules.place_option[place[i]]]


@kernel
def cut(rules, places, grid, rates, count, last, end_rate, least, pin, row, start, end):
    """Shortens runs that do more than the whole job, where it saves most; returns their number, 0 without success."""
    for _ in range(MAX_RUNS):
        place = places[row[:count]]
        work = -1.0
        for i in range(count):
            work += work_of_run(rules, i, count, place, start, end)
        if work < -1e-9:
            return 0
        saved, which, at_end = -1.0, -1, True
        for i in range(count):
            seconds = work * rules.runtime[rules.place_option[place[i]]]
            paid = paid_by(rules, place[i], i == 0, i == count - 1, start[i] == 0.0)
            if end[i] - start[i] - seconds < max(paid, least if count > 1 else 0.0):
                continue
            own_rates = rates[row[i]]
            if i > 0 or pin == 0.0 or end[i] - seconds >= pin:
                saving = worth_between(grid, own_rates, end[i] - seconds, end[i])
                if i == count - 1:
                    saving += end_rate * (max(end[i], last) - max(end[i] - seconds, last))
                if saving > saved:
                    saved, which, at_end = saving, i, True
            if not (i == 0 and start[i] == 0.0 and rules.held[place[i]]):
                saving = worth_between(grid, own_rates, start[i], start[i] + seconds)
                if saving > saved:
                    saved, which, at_end = saving, i, False
        if which >= 0:
            seconds = work * rules.runtime[rules.place_option[place[which]]]
            if at_end:
                end[which] -= seconds
            else:
                start[which] += seconds
            return count
        if count == 1:
            return 0
        worst, share = -1, np.inf  # the run that does least is left out
        for i in range(1 if pin > 0.0 else 0, count):
            own = work_of_run(rules, i, count, place, start, end)
            if own < share:
                worst, share = i, own
        if worst < 0 or share > work:
            return 0
        for i in range(worst, count - 1):
            row[i], start[i], end[i] = row[i + 1], start[i + 1], end[i + 1]
        count -= 1
    return 0


@kernel
def cost_of_runs(grid, rates, count, last, end_rate, row, start, end):
    """Returns the worth of runs of a job."""
    total = 0.0
    for i in range(count):
        total += worth_between(grid, rates[row[i]], start[i], end[i])
    return total + end_rate * max(0.0, end[count - 1] - last)


@kernel
def best_single(rules, places, grid, rates, fits, last, end_rate, pin):
    """Returns the cost, place, start and end of the cheapest single run on whole pieces; place -1 for none."""
    num_places, num = rates.shape
    best, best_place, best_start, best_end = np.inf, -1, 0.0, 0.0
    total = np.zeros(num + 1)
    blocked = np.zeros(num + 1)
    for p in range(num_places):
        o = rules.place_option[places[p]]
        blocked[num] = grid[num]
        for k in range(num):
            total[k + 1] = total[k] + rates[p, k] * (grid[k + 1] - grid[k])
        for k in range(num - 1, -1, -1):
            blocked[k] = blocked[k + 1] if fits[p, k] else grid[k]
        free_from = grid[0]
        for k in range(num):
            if not fits[p, k]:
                free_from = grid[k + 1]
            for side in range(2):
                at_start = side == 0 and grid[k] == 0.0
                whole = rules.runtime[o] + paid_by(rules, places[p], True, True, at_start)
                if side == 0:
                    start, end = grid[k], grid[k] + whole
                    if end > blocked[k]:
                        continue
                else:
                    start, end = grid[k + 1] - whole, grid[k + 1]
                    if start < free_from or (start == 0.0 and rules.held[places[p]]):
                        continue
                if pin > 0.0 and not (start == 0.0 and rules.held[places[p]]):
                    continue
                cost = end_rate * max(0.0, end - last)
                if side == 0:
                    i = np.searchsorted(grid, end) - 1
                    cost += total[i] + rates[p, i] * (end - grid[i]) - total[k]
                else:
                    i = max(0, np.searchsorted(grid, start, side="right") - 1)
                    cost += total[k + 1] - total[i] - rates[p, i] * (start - grid[i])
                if cost < best:
                    best, best_place, best_start, best_end = cost, places[p], start, end
    return best, best_place, best_start, best_end


@kernel
def insert(rules, runs, job, low, high, last, end_rate, least, pin, is_split, scarcity, guess, tried, steps):
    """Places a job at about the least cost and returns it and the reward of the job; infinite where it fits nowhere.

    low, high: seconds from and until which it may run.
    tried: whether each node is tried.
    steps: steps[0] is increased by the steps of the loops.
    """
    runs.counts[job] = 0
    if high <= low:
        return np.inf, guess
    grid, places = grid_of(rules, runs, job, low, high, tried), tried_places(rules, job, tried)
    devices, memory, group = capacity_of(rules, runs, job, grid, tried)
    rates = rates_of(rules, places, grid, scarcity)
    fits = fits_of(rules, places, grid, devices, memory, group)
    size = rates.size
    steps[0] += 6 * size + 4 * runs.counts.size + 200
    cost, place, start, end = best_single(rules, places, grid, rates, fits, last, end_rate, pin)
    if place >= 0:
        runs.counts[job] = 1
        runs.places[job, 0], runs.starts[job, 0], runs.ends[job, 0] = place, start, end
    if not is_split:
        return cost, guess
    rows = np.zeros(MAX_RUNS, np.int64)
    starts, ends = np.zeros(MAX_RUNS), np.zeros(MAX_RUNS)
    lower, upper, factor = 0.0, np.inf, 1.1
    reward = guess if guess > 0.0 else (cost if cost < np.inf and cost > 0.0 else 1.0)
    for _ in range(BISECTIONS):
        count, work = best_runs(
            rules, places, grid, rates, fits, reward, last, end_rate, least, pin, rows, starts, ends
        )
        steps[0] += 4 * size
        if work >= 1.0:
            upper = reward
            count = cut(rules, places, grid, rates, count, last, end_rate, least, pin, rows, starts, ends)
            if count > 0:
                own = cost_of_runs(grid, rates, count, last, end_rate, rows, starts, ends)
                if own < cost * (1 - 1e-12):
                    cost = own
                    runs.counts[job] = count
                    for i in range(count):
                        runs.places[job, i], runs.starts[job, i], runs.ends[job, i] = (
                            places[rows[i]],
                            starts[i],
                            ends[i],
                        )
            reward = (lower + upper) / 2 if lower > 0.0 else upper / factor
        else:
            lower = reward
            reward = (lower + upper) / 2 if upper < np.inf else factor * reward
        factor *= factor
        if upper - lower <= CLOSE * upper or reward < 1e-280 or reward > 1e280:
            break
    return cost, reward


@kernel
def worth_of_job(rules, runs, job, plain, energy):
    """Returns the worth of a job's runs at rates of device-seconds and of their watts, by kind of nodes and point."""
    total = 0.0
    for i in range(runs.counts[job]):
        p, start, end = runs.places[job, i], runs.starts[job, i], runs.ends[job, i]
        o = rules.place_option[p]
        q = max(0, np.searchsorted(rules.points, start, side="right") - 1)
        while q < rules.points.size and rules.points[q] < end:
            until = rules.points[q + 1] if q + 1 < rules.points.size else np.inf
            seconds = min(until, end) - max(rules.points[q], start)
            for v in rules.place_nodes[p]:
                if v >= 0:
                    kind = rules.kind[v]
                    rate = plain[kind, q] + rules.power[o, kind] * energy[kind, q]
                    total += seconds * rules.slot[o] * rate
            q += 1
    return total
