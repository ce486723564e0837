"""Layouts of jobs on the devices of a node by the wrap-around rule."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.families import draw
from ringmaster.tasks.planning.bounds.bounds import preemptive_bound
from ringmaster.tasks.planning.kernels.assignment import MemberRuntimes, layout_of, sequence_of, wrap_around
from ringmaster.tasks.planning.kernels.configurations import INFEASIBLE, OptionTable, config_lp
from ringmaster.tasks.planning.kernels.sequences import in_order, of_group, score_of
from ringmaster.tasks.planning.node_groups import NodeGroups, Tables, whole_jobs
from ringmaster.tasks.planning.preemptive import _rules


def _options(widths):
    ones, numbers = np.ones(len(widths)), np.arange(len(widths), dtype=np.int32)
    slots = np.array(widths, np.int32)
    return OptionTable(numbers, numbers + 1, slots, ones, ones, slots, np.ones(len(widths), np.int32))


def _pieces(lengths):
    numbers = np.arange(len(lengths))
    return MemberRuntimes(numbers, numbers.astype(np.int32), np.array(lengths, float))


rectangles = st.lists(st.tuples(st.integers(1, 4), st.floats(0.05, 1.0)), min_size=1, max_size=12)


@given(rectangles, st.integers(4, 8))
def test_a_layout_uses_no_device_twice_and_runs_no_job_beside_itself(rows, capacity):
    options, pieces = _options([width for width, _ in rows]), _pieces([length for _, length in rows])
    parts = layout_of(pieces, np.arange(len(rows)), 1.0, capacity, options)
    for at in np.linspace(0.001, 0.999, 97):
        running = [int(part[0]) for part in parts if part[2] < at < part[3]]
        assert len(running) == len(set(running))
        assert sum(rows[i][0] for i in running) <= capacity
    for i, (_, length) in enumerate(rows):
        assert sum(part[3] - part[2] for part in parts if part[0] == i) <= length + 1e-9
    assert (parts[:, 3] <= 1.0 + 1e-9).all()
    assert {int(o) for o in sequence_of(parts, pieces, len(rows)).max(axis=0)} == set(range(len(rows)))


@given(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=12))
def test_jobs_of_one_device_fill_the_devices_with_one_interruption_each(lengths):
    """McNaughton's theorem: max(longest job, sum / devices) suffices, with fewer interruptions than devices."""
    num_devices = 4
    total = max(max(lengths), sum(lengths) / num_devices)
    parts = layout_of(_pieces(lengths), np.argsort(lengths)[::-1], total, num_devices, _options([1] * len(lengths)))
    assert sum(part[3] - part[2] for part in parts) == pytest.approx(sum(lengths), rel=1e-6)
    assert len(parts) - len(lengths) < num_devices


@pytest.mark.parametrize("seed", range(3))
def test_many_jobs_on_a_node_begin_the_local_search_with_fewer_switches(seed):
    problem = draw("gavel-24x8", seed=seed)
    tables = Tables.of(problem, preemptive_bound(problem))
    groups = NodeGroups.of(tables, [[0]])
    members = of_group(whole_jobs(tables, groups), np.arange(24, dtype=np.int32), 0, 1)
    options, layout, rules, steps = tables.options_of(0), groups.layout(0), _rules(tables), np.zeros(1)
    total, configs, times, prices = config_lp(members.job, members.share, members.within, options, layout, steps)
    _, score = wrap_around(configs, times, total, members, options, layout, rules, 100, steps)
    of_the_lp = score_of(in_order(configs, options.rate, prices, members), members, options, layout, rules, steps)
    assert total <= score < of_the_lp < INFEASIBLE
