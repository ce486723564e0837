"""Plans without preemption: annealing over the sequence of jobs on each node and the option of each job."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tasks.planning.bounds import useful_options
from tasks.planning.listing import Timeline
from tasks.planning.plan import Segment
from tasks.planning.problem import Problem
from tasks.planning.tables import Ints

COOL = 1e-3
# First temperature, sharpness and weight of early ends, by search: no one setting is best for all problems.
SETTINGS = ((0.01, 150.0, 0.3), (0.005, 150.0, 0.1), (0.02, 150.0, 0.1), (0.005, 50.0, 0.1), (0.02, 50.0, 0.03))


def plan_rigid(
    problem: Problem,
    bound_s: float,
    *,
    options: Mapping[str, int] | None = None,
    num_searches: int = 4,
    steps: int = 1_000_000,
    seed: int = 0,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[Segment, ...] | None:
    """The best of `num_searches` annealings, two at a time; None for gangs of several nodes or jobs that
    wait.

    bound_s: a lower bound, in whose units times are. options: the first ones, such as the pattern MILP's.
    """
    from tasks.planning.rigid_kernels import anneal_nodes

    wide = any(option.num_nodes > 1 for job in problem.jobs for option in job.options)
    if wide or not problem.is_plain or len(problem.device_types) > 1:
        return None
    rows = [(j, k) for j, job in enumerate(problem.jobs) for k in useful_options(job)]
    num_jobs = len(problem.jobs)
    first = np.array([next(i for i, row in enumerate(rows) if row[0] == j) for j in range(num_jobs)], np.int32)
    last = np.append(first[1:], len(rows)).astype(np.int32)
    need = np.array([problem.jobs[j].options[k].num_devices for j, k in rows], np.int32)
    length = np.array([problem.jobs[j].options[k].runtime_s / bound_s for j, k in rows])
    size = np.array([node.num_devices for node in problem.nodes], np.int32)
    begin = np.array(
        [
            first[j] + useful_options(job).index(options[job.id])
            if options
            else min(range(first[j], last[j]), key=lambda o: (need[o] * length[o], o))
            for j, job in enumerate(problem.jobs)
        ],
        np.int32,
    )

    def search(own_seed: int) -> tuple[float, Ints, Ints, Ints]:
        option = begin.copy()
        heat, sharpness, spread = SETTINGS[own_seed % len(SETTINGS)]
        sequences, counts = _longest_first(option, need, length, size)
        if is_over():
            return np.inf, sequences, counts, option
        end = anneal_nodes(
            first, last, need, length, size, sequences, counts, option,
            heat, COOL, sharpness, spread, steps, 1.0 + 1e-7, own_seed,
        )  # fmt: skip
        return float(end), sequences, counts, option

    with ThreadPoolExecutor(2) as pool:
        seeds = range(seed * num_searches, (seed + 1) * num_searches)
        _, sequences, counts, option = min(pool.map(search, seeds), key=lambda found: found[0])
    return _segments(problem, rows, sequences, counts, option)


def _longest_first(option: Ints, need: Ints, length: np.ndarray, size: Ints) -> tuple[Ints, Ints]:
    """Jobs onto nodes by area, the longest first; width is left in the rows for jobs that move."""
    width = option.size if size.size <= 64 else min(option.size, 8 * option.size // size.size + 16)
    sequences, counts = np.zeros((size.size, width), np.int32), np.zeros(size.size, np.int32)
    load = np.zeros(size.size)
    for j in np.argsort(-length[option], kind="stable"):
        fits = (size >= need[option[j]]) & (counts < width)
        v = int(np.argmin(np.where(fits, load / size, np.inf)))
        sequences[v, counts[v]] = j
        counts[v] += 1
        load[v] += length[option[j]] * need[option[j]]
    return sequences, counts


def _segments(
    problem: Problem, rows: list[tuple[int, int]], sequences: Ints, counts: Ints, option: Ints
) -> tuple[Segment, ...]:
    timeline, segments = Timeline(problem), []
    for v in range(len(problem.nodes)):
        for j in sequences[v, : counts[v]]:
            k = rows[option[j]][1]
            chosen = problem.jobs[j].options[k]
            start_s = timeline.earliest_on(chosen, v)
            gang = timeline.take(chosen, start_s, [v])
            segments.append(Segment(problem.jobs[j].id, k, start_s, start_s + chosen.runtime_s, 1.0, 0.0, gang))
    return tuple(sorted(segments, key=lambda s: (s.start_s, s.job)))
