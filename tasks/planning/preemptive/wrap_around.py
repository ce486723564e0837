# Numba infers the types of arguments; annotations would only say "array" again.
# ruff: noqa: ANN001, ANN201
# mypy: allow-untyped-defs, allow-untyped-calls
"""Sequences with few switches for one node, by the wrap-around rule of McNaughton (Management Science 6, 1959).

The configuration LP says how long each job runs under each option, and how long all take. These *pieces* are laid out
one after another, each on devices that are free until the end, and a piece that does not end by then continues at an
earlier time. So few jobs are interrupted, at most one for each device that they fill, whereas the configurations of the
LP may interrupt every job. Where pieces need different numbers of devices, the layout depends on their order; the best
of many orders is taken.
"""

from typing import Any, NamedTuple

import numpy as np

from ringmaster.tasks.planning.kernels.annealing import shift
from ringmaster.tasks.planning.kernels.compiled import kernel
from ringmaster.tasks.planning.preemptive.config_lp import INFEASIBLE
from ringmaster.tasks.planning.preemptive.sequences import settle

TINY = 1e-9
SLACK = 0.004  # half of the layouts may take longer than the LP, by at most half of this share
RANDOM = 0.3  # share of the orders that are random


class MemberRuntimes(NamedTuple):
    """How long each member of a group runs under each of its options: length[p] of member[p] under option[p]."""

    member: Any
    option: Any
    length: Any


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
            found, is_whole, best_fits = -1, False, 0.0
            for k in range(num):
                if usable[k] < width or (k > 0 and usable[k] <= usable[k - 1]):
                    continue
                fits = run_from(k, width, left, marks, usable, num)
                rest = left - fits
                whole = rest <= TINY or has_room(width, rest, marks, usable, num, marks[k], marks[k] + fits)
                if found < 0 or whole or (not is_whole and fits > best_fits):
                    found, is_whole, best_fits = k, whole, fits
            if found < 0:
                break
            begin, end = marks[found], marks[found] + best_fits
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
