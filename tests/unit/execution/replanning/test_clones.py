"""Clones in a running batch: what they cost beforehand, and that they train and are resumed like any job."""

from dataclasses import replace
from random import Random

import pytest

from ringmaster.features.warm_start.job import WarmStart
from ringmaster.tasks.execution.dispatch import in_steps
from ringmaster.tasks.execution.execution_events import PlanUpdate, SegmentStarted
from ringmaster.tasks.execution.job_price import price_of
from ringmaster.tasks.execution.job_table import added_jobs
from ringmaster.tasks.execution.plan_simulator import PlanSimulator
from ringmaster.tasks.execution.replan_policy import ReplanPolicy
from ringmaster.tasks.planning import Option, PlanningJob, PlanningNode, Problem
from ringmaster.tasks.planning.bounds.bounds import preemptive_bound
from ringmaster.tasks.storage.journal import JobStatus, Variation
from tests.fake_engine import FakeEngine
from tests.unit.execution.clocked import clocked_bench
from tests.unit.execution.fakes import Bench, job, profile
from tests.unit.execution.replanning.test_replan_policy import OFTEN, by_rules, true_speeds


def drawn(seed):
    """Profiles of a few jobs, their steps, and when one of them is cloned."""
    draw = Random(seed)
    names = "abcdef"[: draw.randint(2, 6)]
    profiles = {}
    for name in names:
        step_s = draw.uniform(0.2, 2.0)
        options = (profile("single", 1, step_s), profile("ddp", 2, draw.uniform(0.55, 0.9) * step_s))
        profiles[name] = tuple(replace(each, save_s=0.0) for each in options[: draw.randint(1, 2)])
    steps = {name: draw.randint(20, 120) for name in names}
    return profiles, steps, draw.choice(names), draw.uniform(1.0, 40.0), draw.choice([None, 10])


def ends_after(folder, seed, *, is_cloned):
    """The seconds that a drawn batch takes, with the price of a clone if one is added, and its events."""
    profiles, steps, source, at_s, warm_step = drawn(seed)
    jobs = [job(name, num_steps=steps[name]) for name in profiles]
    gangs = FakeEngine(true_speeds({**profiles, "clone": profiles[source]}, {}), report_s=0.1)
    bench = clocked_bench(folder, jobs, gangs, make_plan=by_rules, policy=OFTEN, profiles=profiles)
    prices = []

    def clone():
        if bench.executor.job_table.records[source].status in (JobStatus.WAITING, JobStatus.RUNNING):
            start = None if warm_step is None else WarmStart(checkpoints="elsewhere", step=warm_step)
            gangs.steps["clone"] = warm_step or 0
            made = job("clone", num_steps=steps[source], features=() if start is None else (start,))
            prices.append(bench.executor.price(made, source=source, step=warm_step or 0))
            bench.executor.add_variant(
                "clone", made, source=source, step=warm_step, why=f"clone is a clone of {source}"
            )

    if is_cloned:
        gangs.at(at_s, clone)
    bench.make_no_forecasts()
    assert bench.run()
    assert set(bench.statuses.values()) == {JobStatus.DONE}
    return gangs.now_s, prices, bench


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 40), marks=pytest.mark.full)], ids=["3", "40"])
def test_what_a_clone_costs_an_executor_that_replans_lies_in_the_interval_that_was_told(tmp_path, seeds):
    num_priced = 0
    for seed in seeds:
        without_s, _, _ = ends_after(tmp_path / f"{seed}", seed, is_cloned=False)
        with_s, prices, bench = ends_after(tmp_path / f"{seed}-cloned", seed, is_cloned=True)
        for price in prices:
            num_priced += 1
            assert price.least_s - 0.01 <= with_s - without_s <= price.most_s + 0.01, f"draw {seed}: {price.in_words()}"
            assert [event for event in bench.told(PlanUpdate) if "is a clone of" in event.why]
    assert num_priced >= len(seeds) // 2


def shuffled(now, draw):
    """The end of the rest where another order of the waiting segments is followed, if that is better."""
    ends_s = []
    for order in (now.planned, draw.sample(now.planned, len(now.planned))):
        other = now.fork()
        other.planned = list(order)
        ends_s.append(other.finish())
    return min(ends_s)


def test_what_a_clone_costs_lies_in_the_interval_in_all_of_two_hundred_simulated_draws():
    num_delays = 0
    for seed in range(200):
        draw = Random(seed)
        rows = [
            PlanningJob(
                name,
                tuple(
                    Option("any", size, draw.uniform(5.0, 60.0) / size**0.7) for size in (1, 2)[: draw.randint(1, 2)]
                ),
            )
            for name in "abcdefg"[: draw.randint(1, 7)]
        ]
        clone = replace(draw.choice(rows), id="clone")
        node, steps = PlanningNode("n", draw.randint(2, 4)), {row.id: draw.randint(10, 200) for row in (*rows, clone)}
        before = Problem("draw", (node,), tuple(rows))
        problem = replace(before, jobs=(*rows, clone))
        planned = in_steps(by_rules(before), num_steps=steps, steps_done={})
        now = PlanSimulator(
            problem,
            planned,
            num_steps=steps,
            step_s=lambda job, option, problem=problem, steps=steps: (
                problem.job(job).options[option].runtime_s / steps[job]
            ),
        )
        moment_s = draw.uniform(0.0, 30.0)
        while now.advance(moment_s):
            pass
        left = [row for row in rows if row.id not in now.ended_s]

        def bound_s(jobs, now=now, steps=steps, before=before):
            shares = {row.id: 1 - now.step_of(row.id) / steps[row.id] for row in jobs}
            rest = tuple(
                replace(
                    row,
                    options=tuple(replace(o, runtime_s=max(1e-3, o.runtime_s * shares[row.id])) for o in row.options),
                )
                for row in jobs
            )
            return preemptive_bound(replace(before, jobs=rest)).seconds if rest else 0.0

        price = price_of(
            now,
            "clone",
            last_step=steps["clone"],
            policy=ReplanPolicy(),
            bounds_s=(bound_s(left), bound_s([*left, clone])),
            slack_s=max((stretch.step_s for stretch in now.running.values()), default=0.0),
        )
        new = now.fork()
        new.insert(price.segment, is_first=price.is_first)
        for measured_s in (
            new.fork().finish() - now.fork().finish(),
            shuffled(new, draw) - shuffled(now, draw),
        ):
            assert price.least_s - 1e-6 <= measured_s <= price.most_s + 1e-6, f"draw {seed}: {price.in_words()}"
        kept, ended = now.fork(), new.fork()
        kept.finish()
        ended.finish()
        for name, end_s in kept.ended_s.items():
            assert ended.ended_s[name] - end_s == pytest.approx(price.delays_s.get(name, 0.0), abs=0.06)
        num_delays += bool(price.delays_s)
    assert num_delays > 20, "some clones delay others"


def test_a_clone_on_an_idle_device_starts_at_once_and_delays_nobody(tmp_path):
    gangs = FakeEngine(true_speeds({name: (profile(),) for name in ("a", "clone")}, {}))
    bench = clocked_bench(tmp_path, [job("a", num_steps=100)], gangs, make_plan=by_rules, policy=OFTEN)
    prices = []

    def clone():
        prices.append(bench.executor.price(job("clone", num_steps=20), source="a", step=0))
        bench.executor.add_variant("clone", job("clone", num_steps=20), source="a", step=None, why="")

    gangs.at(30.0, clone)
    began_s = []
    bench.other_listeners.append(
        lambda event: (
            began_s.append(gangs.now_s) if isinstance(event, SegmentStarted) and event.segment.job == "clone" else None
        )
    )
    assert bench.run()
    assert began_s == [30.0]
    assert prices[0].delays_s == {}
    assert prices[0].least_s <= 0.0 <= prices[0].most_s
    assert prices[0].in_words().endswith("by the plan it delays no job, and it ends in 20.1 s")
    assert bench.journal.jobs()["clone"].variation == Variation(job="a", step=None)


def test_the_next_process_of_a_run_knows_its_clones(tmp_path):
    first = Bench(tmp_path, [job("a")])
    first.run()
    first.executor.add_variant("b", replace(job("b"), seed=7), source="a", step=None, why="")
    first.executor.add_variant("c", replace(job("c"), seed=8), source="b", step=None, why="")
    again = Bench(tmp_path, [job("a")])
    assert again.run()
    assert again.statuses == dict.fromkeys("abc", JobStatus.DONE)
    assert [clone.seed for clone in added_jobs(again.journal.jobs())] == [7, 8]
    assert again.executor.job_table.entries["c"].job.seed == 8


def test_steps_that_are_set_while_a_job_runs_are_trained(tmp_path):
    gangs = FakeEngine(true_speeds({"a": (profile(),)}, {}))
    bench = clocked_bench(tmp_path, [job("a", num_steps=100)], gangs, make_plan=by_rules, policy=OFTEN)
    start = WarmStart(checkpoints="own", step=0)
    longer = replace(job("a", num_steps=150), features=(start,))
    shorter = replace(job("a", num_steps=60), features=(start,))
    gangs.at(30.0, lambda: bench.executor.redefine("a", longer, why="longer"))
    gangs.at(50.0, lambda: bench.executor.redefine("a", shorter, why="shorter"))
    assert bench.run()
    assert (bench.statuses, gangs.steps) == ({"a": JobStatus.DONE}, {"a": 60})
