"""Trials of several groups that continue from a rung are grouped anew, one group a device."""

from dataclasses import replace

import pytest

from ringmaster.features.rung_evaluation.execute import next_part_of
from ringmaster.features.rung_evaluation.row_parts import PARTS
from ringmaster.tasks.execution.execution_events import JobEnded, SegmentEnded
from ringmaster.tasks.execution.job_rows import JobTableEntry
from ringmaster.tasks.execution.steering import SteeringRequest
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.techniques.job_specs import EvaluationSlice
from ringmaster.techniques.processes.gang_events import EvaluationReported, Outcome
from tests.unit.execution.fakes import Bench, FakeRunner, ends, job
from tests.unit.execution.groups.grouped import all_done, group, outcome_of, stopped_at

RUNG, LAST = 4, 10
SIZES = {"a": "abc", "d": "def", "g": "ghi"}  # the groups of the plan by their lead jobs
KEPT = "bcefh"  # what continues from the rung: 2, 2 and 1 of the groups


class TwoStages:
    """A scheduler that lets some jobs continue once all have been evaluated at the rung."""

    PURPOSE = "the scheduler of a test"

    def __init__(self, kept):
        self._kept, self._at_rung, self._open = kept, set(), set("abcdefghi")

    def attach(self, act, *, later, elapsed_s):
        self._act, self._later = act, later

    def listen(self, event):
        if isinstance(event, JobEnded):
            self._open.discard(event.job)
        if isinstance(event, SegmentEnded) and event.segment.last_step == RUNG:
            self._at_rung |= {event.segment.job}
            if self._at_rung == {*SIZES}:
                stops = dict.fromkeys(set("abcdefghi") - set(self._kept), "it is weak")
                request = SteeringRequest(goals=dict.fromkeys(self._kept, LAST), stops=stops)
                self._later(lambda: self._act(request))

    def is_open(self):
        return bool(self._open)


def to_the_rung(call, runner):
    orders = (call.order, *call.order.members)
    own, *others = [outcome_of(call, runner, order, step=RUNG) for order in orders]
    for order in orders:
        name = None if order is call.order else order.job.name
        call.on_event(EvaluationReported(job=name, step=RUNG, metrics={"loss": 1.0}))
    members = {order.job.name: each for order, each in zip(call.order.members, others, strict=True)}
    return Outcome(status="done", result=replace(own, first_step=0, members=members))


class ThreeGroups(Bench):
    """Nine jobs in three groups of three."""

    def entry(self, job, *profiles):
        together = (group(*SIZES[job.name][1:], num_steps=LAST),) if job.name in SIZES else ()
        if job.name == "a":  # an option that the other groups do not have
            together = (*together, replace(together[0], config={"recompute": "full"}))
        return JobTableEntry(job_in_batch=job, job=job, profiles=profiles, paths=self.paths, group_profiles=together)


def bench_of(folder, *, kept=KEPT, after=None, **options):
    script = {lead: [to_the_rung] for lead in SIZES} | {name: list(acts) for name, acts in (after or {}).items()}
    jobs = [job(name, num_steps=LAST) for name in "abcdefghi"]
    bench = ThreeGroups(folder, jobs, runner=FakeRunner(script=script), steering=TwoStages(kept), **options)
    for each in jobs:
        bench.journal.write_job(each.name, goal=RUNG)
    return bench


def gangs_after_rung(bench):
    return [
        "".join(sorted(order.job.name for order in (call.order, *call.order.members)))
        for call in bench.runner.calls
        if call.order.last_step > RUNG
    ]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("num_devices", "expected"), [(2, ["bc", "efh"]), (1, ["bc", "efh"]), (6, ["bc", "ef", "h"])])
def test_those_that_continue_form_as_many_groups_as_there_are_devices(tmp_path, num_devices, expected):
    """No group is larger than those of the plan, which fit: on one device there are two, one after another.

    There are no more groups than in the plan, which weighed what they cost.
    """
    bench = bench_of(tmp_path, num_devices=num_devices, after={name: [all_done] for name in "be"})
    assert bench.run()
    assert sorted(gangs_after_rung(bench)) == sorted(expected)
    assert {name for name, status in bench.statuses.items() if status == JobStatus.DONE} == {*KEPT}
    assert all(call.order.config.get("recompute", "none") == "none" for call in bench.runner.calls)


def test_devices_that_the_user_may_not_hold_are_not_counted(tmp_path):
    def with_limit(problem):
        return replace(problem, quotas={"ann": 2}, jobs=tuple(replace(each, user="ann") for each in problem.jobs))

    bench = bench_of(tmp_path, num_devices=6, after={name: [all_done] for name in "be"}, add_terms=with_limit)
    assert bench.run()
    assert sorted(gangs_after_rung(bench)) == ["bc", "efh"]


def test_a_group_that_waits_while_others_are_trained_is_not_divided(tmp_path):
    after = {name: [to_the_rung, all_done] for name in SIZES}
    bench = bench_of(tmp_path, kept="abcdefghi", after=after)
    assert bench.run()
    assert sorted(gangs_after_rung(bench)) == ["abc", "def", "ghi"]


class MoreRows(TwoStages):
    """A scheduler that has some jobs evaluated on further rows at the rung, and then stops all."""

    def listen(self, event):
        if isinstance(event, JobEnded):
            self._open.discard(event.job)
        if not (isinstance(event, SegmentEnded) and event.segment.last_step == RUNG):
            return
        if self._at_rung == {*SIZES}:
            self._later(lambda: self._act(SteeringRequest(stops=dict.fromkeys("abcdefghi", "it is weak"))))
        self._at_rung |= {event.segment.job}
        if self._at_rung == {*SIZES}:
            part = EvaluationSlice(step=RUNG, begin=0.125, end=0.5)
            self._later(lambda: self._act(SteeringRequest(of_features={PARTS: dict.fromkeys(self._kept, part)})))


@pytest.mark.timeout(60)
def test_members_that_are_evaluated_on_further_rows_while_their_lead_rests_share_a_gang(tmp_path):
    script = {"a": [to_the_rung], "b": [to_the_rung], "d": [to_the_rung], "g": [to_the_rung]}
    jobs = [job(name, num_steps=LAST) for name in "abcdefghi"]
    bench = ThreeGroups(tmp_path, jobs, runner=FakeRunner(script=script), steering=MoreRows("bc"))
    for each in jobs:
        bench.journal.write_job(each.name, goal=RUNG)
    assert bench.run()
    gangs = [{order.job.name for order in (call.order, *call.order.members)} for call in bench.runner.calls]
    assert len(gangs) == 4 and gangs[-1] == {"b", "c"}


def test_the_planner_has_what_a_group_of_other_groups_jobs_takes(tmp_path):
    bench = bench_of(tmp_path, after={name: [all_done] for name in "be"})
    assert bench.run()
    runtimes = {row.id: row.options[0].runtime_s for row in bench.plans[-1].jobs}
    assert runtimes == {"b": pytest.approx(6 * (1.0 + 2 * 0.5)), "e": pytest.approx(6 * (1.0 + 3 * 0.5))}


def test_groups_of_one_size_on_each_device_stay_as_they_are(tmp_path):
    bench = bench_of(tmp_path, kept="bcef", after={name: [all_done] for name in "be"})
    assert bench.run()
    assert sorted(gangs_after_rung(bench)) == ["bc", "ef"]


def test_another_process_trains_the_groups_that_were_formed(tmp_path):
    def stops(call, runner):
        bench.executor.stop_starting()
        names = [order.job.name for order in call.order.members]
        runner.steps |= dict.fromkeys((call.order.job.name, *names), 6)
        return stopped_at(6, names)

    bench = bench_of(tmp_path, after={name: [stops] for name in "be"})
    assert not bench.run()
    bench.journal.close()
    runner = FakeRunner(steps=bench.runner.steps, script={name: [all_done] for name in "be"})
    jobs = [job(name, num_steps=LAST) for name in "abcdefghi"]
    again = ThreeGroups(tmp_path, jobs, runner=runner)
    assert again.run()
    assert sorted(gangs_after_rung(again)) == ["bc", "efh"]


def test_jobs_of_a_gang_that_crashes_again_and_again_are_not_grouped_anew(tmp_path):
    after = {"b": [all_done], "e": [ends("crashed")] * 3}
    bench = bench_of(tmp_path, after=after)
    assert bench.run()
    assert sorted(gangs_after_rung(bench)) == ["bc", "e", "efh", "efh", "efh", "f", "h"]


def test_a_part_that_is_requested_of_a_running_job_is_evaluated_though_the_process_ends(tmp_path):
    part, jobs = EvaluationSlice(step=RUNG, begin=0.125, end=0.5), [job("a", num_steps=LAST)]
    before = Bench(tmp_path, jobs)
    before.executor.job_table.write("a", status=JobStatus.RUNNING, goal=RUNG)
    before.executor.steer(SteeringRequest(of_features={PARTS: {"a": part}}))
    before.journal.close()
    table = Bench(tmp_path, jobs).executor.job_table
    assert table.entries["a"].job.evaluation.parts == (part,) and not table.rests("a")
    assert next_part_of(table.records["a"]) is None
    table.rest("a", RUNG)
    assert table.rests("a") and table.entries["a"].job.evaluation.parts == (part,)
