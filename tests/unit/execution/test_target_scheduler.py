"""The choice of a batch size on the way to a target: by what the probe measured, once, and the same after a kill."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest

from ringmaster.codec import to_json
from ringmaster.features.local_updates.job import LocalUpdates
from ringmaster.features.target.execute import (
    TargetScheduler,
    choose_learning_rate,
    choose_variant,
    exchange_share,
)
from ringmaster.features.target.job import Target, Variables
from ringmaster.features.target.noise_scale import GradientNoise
from ringmaster.features.warm_start.job import WarmStart
from ringmaster.tasks.execution.execution_events import GangReport, JobEnded
from ringmaster.tasks.execution.run_paths import RunPaths
from ringmaster.tasks.execution.steering import SteeredBatch, SteeringRequest, first_goals
from ringmaster.tasks.storage.journal import Evaluation, JobRecord, begin_jobs
from ringmaster.techniques import EvaluationSpec, ScheduleSpec, registry
from ringmaster.techniques.processes.gang_events import EvaluationReported, JobResult, Outcome, Steps
from tests.unit.execution.fakes import Bench, FakeRunner, job, open_journal, profile

STEP_S = {16: 1.0, 32: 1.1, 64: 1.4, 128: 2.5}
VARYING = job(
    "a",
    num_steps=1000,
    features=(Target(metric="loss", at_most=1.0), Variables(global_batch_size=(16, 32, 64, 128))),
    evaluation=EvaluationSpec(every_steps=50),
)


def measured(scale, *, num=90):
    return tuple(GradientNoise(step=step, signal=1.0, noise=scale, num_samples=16) for step in range(1, num))


def step_s(job=VARYING):
    return {variant: STEP_S[variant[0]] for variant in job.feature(Variables).choices(job)}


@pytest.mark.parametrize(("scale", "size"), [(0.0, 16), (3.0, 16), (40.0, 64), (1e6, 128)])
def test_the_noisier_the_gradients_the_larger_the_batch(scale, size):
    choice = choose_variant(VARYING, measured(scale), first_step=100, step_s=step_s())
    assert choice.phase.global_batch_size == size
    assert (choice.phases(VARYING) == ()) == (size == 16)


def test_a_choice_says_what_it_predicts_and_why():
    choice = choose_variant(VARYING, measured(48.0), first_step=100, step_s=step_s())

    own, phase = choice.phases(VARYING)
    assert choice.phase.global_batch_size == 64 and choice.gain == pytest.approx(4 / 1.75 / 1.4)
    assert choice.steps[1] < choice.steps[0] == 394 < choice.steps[2]
    assert (own.first_step, own.global_batch_size, own.lr_factor, own.num_steps) == (0, 16, 1.0, 1000)
    assert (phase.first_step, phase.lr_factor) == (100, pytest.approx(4 / 1.75))
    assert phase.num_steps == 100 + choice.steps[2] < 1000  # a constant rate may train on
    assert "batches of 64 samples in fp32 in place of 16 in fp32 from step 100: noise scale 48" in choice.why


def test_a_schedule_that_decays_ends_with_the_predicted_steps():
    decaying = replace(VARYING, schedule=ScheduleSpec(name="cosine"))
    choice = choose_variant(decaying, measured(48.0), first_step=100, step_s=step_s())
    assert choice.phase.num_steps == 100 + choice.steps[0]


def test_nothing_changes_without_enough_measurements_or_gain():
    few = choose_variant(VARYING, measured(1e6, num=5), first_step=100, step_s=step_s())
    slow = choose_variant(VARYING, measured(1e6), first_step=100, step_s={v: v[0] / 14 for v in step_s()})
    assert few.phases(VARYING) == slow.phases(VARYING) == ()
    assert "the noise scale was not measured" in few.why and "no other choice is predicted to save 15%" in slow.why


def test_a_quicker_precision_is_taken_without_a_measurement():
    both = VARYING.with_features(Variables(precision=("fp32", "bf16")))
    choice = choose_variant(both, (), first_step=100, step_s={(16, "fp32", 1): 1.0, (16, "bf16", 1): 0.5})
    assert (choice.phase.precision, choice.phase.num_steps, choice.phase.lr_factor) == ("bf16", 1000, 1.0)


def test_variants_are_jobs_with_names_of_their_own():
    variants = VARYING.with_features(Variables(global_batch_size=(32, 16))).variants
    assert {key: (each.name, each.global_batch_size) for key, each in variants.items()} == {
        (16, "fp32", 1): ("a", 16),
        (32, "fp32", 1): ("a.32.fp32", 32),
    }


RELAXED = VARYING.with_features(Variables(sync_every=(1, 8, 32), workers=4))


def exchanged(share, *, job=RELAXED):
    """The seconds of a step of each variant, with an exchange that takes a share of it on four devices."""
    return {
        variant: (profile("local" if variant[2] > 1 else "ddp", num_devices=4, step_s=1 - share + share / variant[2]),)
        for variant in job.feature(Variables).choices(job)
    }


def choose_relaxed(share, *, job=RELAXED, measurements=()):
    variants = exchanged(share, job=job)
    step_s = {variant: profiles[0].step_s for variant, profiles in variants.items()}
    own = exchange_share(variants, own=job.phase(0).variant)
    assert own == pytest.approx(share)
    return choose_variant(job, measurements, first_step=100, step_s=step_s, exchange_share=own)


@pytest.mark.parametrize(("share", "sync_every"), [(0.0, 1), (0.15, 1), (0.2, 8), (0.5, 8), (0.9, 32)])
def test_the_slower_the_link_the_fewer_the_exchanges(share, sync_every):
    """Of 8 and 32 the first one, unless the rare exchanges still take long."""
    choice = choose_relaxed(share)

    phases = choice.phases(RELAXED)
    assert bool(phases) == (sync_every > 1) and f"exchanges are {share:.0%} of a step" in choice.why
    if phases:
        assert phases[-1].features == (LocalUpdates(workers=4, sync_every=sync_every, warmup_steps=100),)
        assert phases[-1].variant == (16, "fp32", sync_every) and phases[0].features == ()
        assert f"with an exchange of 4 workers every {sync_every} steps in place of 16 in fp32" in choice.why
        assert choice.gain == pytest.approx(1 / (1 - share + share / sync_every))
        assert choice.steps[1] < choice.steps[0] == 900 < choice.steps[2] and choice.phase.num_steps == 1000


def test_a_larger_batch_with_an_exchange_at_each_step_comes_before_local_updates_that_gain_little_more():
    both = RELAXED.with_features(replace(RELAXED.feature(Variables), global_batch_size=(16, 64)))
    choice = choose_relaxed(0.1, job=both, measurements=measured(1e6))
    assert choice.phases(both)[-1].variant == (64, "fp32", 1)
    slow = choose_relaxed(0.9, job=both, measurements=measured(1e6))
    assert slow.phases(both)[-1].variant == (64, "fp32", 32) and slow.phases(both)[-1].lr_factor > 3.9


def test_without_options_on_several_devices_exchanges_take_no_share():
    alone = {variant: (profile(step_s=1.0),) for variant in RELAXED.feature(Variables).choices(RELAXED)}
    assert exchange_share(alone, own=(16, "fp32", 1)) == 0.0 == exchange_share({}, own=(16, "fp32", 1))


def test_variants_with_local_updates_are_profiled_in_the_steps_between_exchanges():
    others = RELAXED.with_variants()[1:]
    assert [each.feature(LocalUpdates) for each in others] == [
        LocalUpdates(workers=4, sync_every=8),
        LocalUpdates(workers=4, sync_every=32),
    ]
    assert [each.name for each in others] == ["a.16.fp32.8", "a.16.fp32.32"]


class Probing(FakeRunner):
    """Gangs that report the noise of the steps that they take, and whose jobs may reach their target at a step."""

    def __init__(self, scale, *, reached=None, **kwargs):
        super().__init__(**kwargs)
        self.scale, self.reached = scale, reached

    def end_one(self):
        call, future = self.running.pop(0)
        name, last = call.order.job.name, call.order.last_step
        first = self.steps.get(name, 0)
        is_reached = self.reached is not None and first < self.reached <= last
        last = self.reached if is_reached else last
        noise = [each for each in measured(self.scale or 0.0, num=1000 * bool(self.scale)) if first <= each.step < last]
        call.on_event(Steps(first_step=first, seconds=(1.0,) * (last - first), measurements=to_json(noise)))
        self.steps[name] = last
        is_end = is_reached or last == call.order.job.total_steps
        ended = {"metrics": {"loss": 1.0}, "ended_early": is_reached} if is_end else {}
        future.set_result(Outcome(status="done", result=JobResult(first_step=first, step=last, **ended)))


class Varying(Bench):
    """A batch of one job that may vary, and those that try its learning rates."""

    def __init__(self, folder, runner, *, journal=None, job=VARYING, variants=None, **kwargs):
        self.variants = variants or {
            variant: (profile(step_s=STEP_S[variant[0]]),) for variant in job.feature(Variables).choices(job)
        }
        self.notices, journal = [], journal or open_journal(folder)
        profiles = {"a": self.variants[job.phase(0).variant]}
        profiles |= {other.name: self.variants[variant] for variant, other in job.variants.items()}
        jobs, paths = [*job.searches(), job], RunPaths(folder=folder, cache_dir=folder)
        self.scheduler = TargetScheduler(
            SteeredBatch(journal=journal, jobs=jobs, profiles=profiles, paths=paths, notice=self.choices_or_hints)
        )
        super().__init__(folder, jobs, runner=runner, journal=journal, steering=self.scheduler, **kwargs)

    def entry(self, job, *profiles):
        own = self.variants[job.phase(0).variant]
        return replace(super().entry(job, *own), variants=self.variants if job.name == "a" else {})

    def run(self):
        for name, goal in first_goals([*self.scheduler.jobs.values()], known=self.journal.jobs()).items():
            self.journal.write_job(name, goal=goal)
        return super().run()

    def choices_or_hints(self, text):
        if not text.startswith("a better learning rate may be worth"):
            self.notices.append(text)

    @property
    def ran(self):
        return [
            (call.order.job.phase(call.order.last_step - 1).global_batch_size, call.order.last_step)
            for call in self.runner.calls
        ]


def test_a_job_changes_its_batch_size_after_its_probe_and_ends_at_its_target(tmp_path):
    bench = Varying(tmp_path, Probing(48.0, reached=300))

    assert bench.run()

    left = bench.runner.calls[1].order.job.total_steps
    assert bench.ran == [(16, 100), (64, left)]
    record = bench.journal.jobs()["a"]
    assert (record.status, record.step) == ("done", 300)
    assert [each.global_batch_size for each in record.phases] == [16, 64]
    assert record.choice == bench.notices[0] and record.ended_early
    assert record.message == "reached loss at most 1, after step 300"
    assert any(bench.notices[0] in each.why for each in bench.events if hasattr(each, "why"))
    assert bench.plans[-1].job("a").options[0].runtime_s == pytest.approx((left - 100) * STEP_S[64], rel=1e-3)


def test_a_job_whose_batch_size_is_right_keeps_it(tmp_path):
    bench = Varying(tmp_path, Probing(1.0))

    assert bench.run()

    assert bench.ran[-1] == (16, 1000) and not bench.journal.jobs()["a"].phases
    assert bench.journal.jobs()["a"].message == "did not reach loss at most 1, after step 1000"
    assert "keeps batches of 16" in bench.notices[0]


def test_what_a_pools_controller_is_asked_is_what_it_reads():
    choice = choose_variant(VARYING, measured(48.0), first_step=100, step_s=step_s())
    request = SteeringRequest(
        jobs={"a": VARYING}, likes={"a": "a"}, goals={"a": 9}, phases={"a": choice.phases(VARYING)}, choices={"a": "x"}
    )
    assert SteeringRequest.from_json(json.loads(json.dumps(request.to_json()))) == request
    with pytest.raises(ValueError, match="its phases are"):
        SteeringRequest.from_json({"phases": {"a": 3}})


def test_noise_that_is_heard_late_is_waited_for(tmp_path):
    """All short runs rest by the journal, and their events are heard one after another: the last one decides."""
    journal, asked = open_journal(tmp_path), []
    jobs, paths = [*SEARCHED.searches(), SEARCHED], RunPaths(folder=tmp_path, cache_dir=tmp_path)
    begin_jobs(journal, jobs, faults={})
    batch = SteeredBatch(journal=journal, jobs=jobs, profiles={"a": (profile(),)}, paths=paths, is_replayed=True)
    scheduler = TargetScheduler(batch)
    scheduler.attach(asked.append, later=lambda act: act(), elapsed_s=0.0)
    for search in SEARCHED.searches():
        evaluated = Evaluation(step=50, metrics={"loss": 1 - 100 * search.optimizer.lr})
        journal.write_job(search.name, step=50, rested=50, evaluated=evaluated)
    for number, search in enumerate(SEARCHED.searches()):
        assert not asked
        noise = tuple(each for each in measured(48.0) if each.step < 50)
        steps = Steps(first_step=0, seconds=(1.0,) * 50, measurements=to_json(noise))
        scheduler.listen(GangReport(number=number, job=search.name, event=steps))
        reported = EvaluationReported(step=50, metrics=evaluated.metrics)
        scheduler.listen(GangReport(number=number, job=search.name, event=reported))
        scheduler.listen(JobEnded(record=JobRecord(name="other", status="done")))
    assert [request.jobs["a"].feature(WarmStart).step for request in asked] == [50]


class Killed(Exception):
    """Stands for the sudden death of the process."""


def kill_after(bench, num_messages):
    """Runs a batch until its executor has received some messages."""
    get, left = bench.runner.get, [num_messages]

    def dying(timeout=None):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return get(timeout)

    bench.runner.get = dying
    with suppress(Killed):
        bench.run()


@pytest.mark.parametrize("num_messages", range(1, 8))
def test_whenever_it_is_killed_the_same_is_chosen(tmp_path, num_messages):
    steps = {}
    first = Varying(tmp_path, Probing(48.0, steps=steps))
    kill_after(first, num_messages)
    steps.update({name: record.step for name, record in first.journal.jobs().items()})

    second = Varying(tmp_path, Probing(48.0, steps=steps), journal=first.journal)
    assert second.run()

    record = second.journal.jobs()["a"]
    assert record.status == "done"
    assert [(each.first_step, each.global_batch_size) for each in record.phases] == [(0, 16), (100, 64)]


def test_a_job_goes_on_with_local_updates_over_a_slow_link(tmp_path):
    bench = Varying(tmp_path, Probing(0.0), job=RELAXED, variants=exchanged(0.9), num_devices=4)

    assert bench.run()

    first, second = (call.order for call in bench.runner.calls)
    assert (first.technique, second.technique) == (registry.dotted_path("ddp"), registry.dotted_path("local"))
    assert second.job.phases[-1].variant[2] == 32
    record = bench.journal.jobs()["a"]
    assert record.phases[-1].features[0].workers == 4
    assert "exchanges are 90% of a step" in record.choice
    assert any(record.choice in each.why for each in bench.events if hasattr(each, "why"))


# -- learning rates ----------------------------------------------------------------------------------------------------

SEARCHED = VARYING.with_features(replace(VARYING.feature(Variables), lr=(5e-4, 1e-3, 2e-3)))
assert SEARCHED.optimizer.lr == 1e-3


@pytest.mark.parametrize(
    ("losses", "best"),
    [((0.5, 0.4, 0.3), 2e-3), ((0.5, 0.3, 0.4), 1e-3), ((0.3, 0.3, 0.3), 1e-3), ((0.5, None, float("nan")), 5e-4)],
)
def test_the_best_learning_rate_is_the_one_with_the_best_loss_and_else_the_own(losses, best):
    results = {
        lr: {} if loss is None else {"loss": loss}
        for lr, loss in zip(SEARCHED.feature(Variables).lr, losses, strict=True)
    }
    choice = choose_learning_rate(SEARCHED, results)
    assert choice.lr == best and f"{losses[0]} with 0.0005" in choice.why
    assert ("keeps" in choice.why) == (best == 1e-3)
    upwards = SEARCHED.with_features(Target(metric="loss", at_least=1.0))
    assert choose_learning_rate(upwards, {1e-3: {"loss": 1.0}, 2e-3: {"loss": 2.0}}).lr == 2e-3


class Searching(Probing):
    """Gangs that report an evaluation where they end: the best learning rate is the last one."""

    def end_one(self):
        call, _ = self.running[0]
        job, last = call.order.job, call.order.last_step
        if job.feature(WarmStart) is not None:
            self.steps.setdefault(job.name, job.feature(WarmStart).step)
        call.on_event(EvaluationReported(step=last, metrics={"loss": 1 - 100 * job.optimizer.lr}))
        super().end_one()


def outcomes(bench):
    return {call.order.job.name: (call.order.job.optimizer.lr, call.order.last_step) for call in bench.runner.calls}


@pytest.mark.parametrize("varies", [True, False])
def test_learning_rates_are_compared_before_the_job_is_trained(tmp_path, varies):
    job = SEARCHED if varies else SEARCHED.with_features(Variables(lr=SEARCHED.feature(Variables).lr))
    bench = Varying(tmp_path, Searching(48.0), job=job)

    assert bench.run()

    orders = [(call.order.job.name, call.order.job.optimizer.lr, call.order.last_step) for call in bench.runner.calls]
    assert sorted(orders[:3]) == [(f"a.lr-{lr!r}", lr, 50) for lr in (5e-4, 1e-3, 2e-3)]
    assert {each[:2] for each in orders[3:]} == {("a", 2e-3)}
    assert orders[3][2] == (100 if varies else 1000)
    records = bench.journal.jobs()
    assert records["a"].status == "done" and "takes, in place of 0.001, the learning rate 0.002" in bench.notices[0]
    assert records["a"].choice == "; ".join(bench.notices)
    start = WarmStart(checkpoints=str(tmp_path / "checkpoints" / "a.lr-0.002"), step=50)
    assert all(call.order.job.feature(WarmStart) == start for call in bench.runner.calls[3:])
    assert "It continues from step 50 of a.lr-0.002" in bench.notices[0]
    assert bench.journal.segments("a")[0].spec.first_step == 50
    for lr in job.feature(Variables).lr:
        record = records[f"a.lr-{lr!r}"]
        assert (record.status, record.step) == ("stopped", 50) and bench.notices[0] in record.message
    assert any(bench.notices[0] in each.why for each in bench.events if hasattr(each, "why"))


def test_a_short_run_may_be_the_whole_probe(tmp_path):
    bench = Varying(tmp_path, Searching(48.0), job=replace(SEARCHED, num_steps=200))

    assert bench.run()

    record = bench.journal.jobs()["a"]
    assert [(each.first_step, each.global_batch_size) for each in record.phases] == [(0, 16), (20, 64)]
    assert bench.ran[3:] == [(64, record.phases[1].num_steps)] and record.status == "done"
    assert bench.journal.segments("a")[0].spec.first_step == 20


def test_a_job_begins_anew_where_its_short_run_has_measured_no_noise(tmp_path):
    class Deaf(Searching):
        def __init__(self):
            super().__init__(48.0)

        def end_one(self):
            self.scale = 48.0 if self.running[0][0].order.job.name == "a" else None
            super().end_one()

    bench = Varying(tmp_path, Deaf(), job=SEARCHED)
    assert bench.run()
    orders = [call.order for call in bench.runner.calls if call.order.job.name == "a"]
    assert all(order.job.feature(WarmStart) is None and order.job.optimizer.lr == 2e-3 for order in orders)
    assert bench.ran[3:][0] == (16, 100) and orders[-1].job.phases[-1].global_batch_size == 64


def test_the_short_runs_of_a_job_that_is_cancelled_end_with_it(tmp_path):
    bench = Varying(tmp_path, Searching(48.0), job=SEARCHED)
    bench.executor.call(lambda: bench.executor.cancel(["a"], message="by hand"))
    bench.run()
    assert bench.statuses["a"] == "cancelled"
    assert {bench.statuses[f"a.lr-{lr!r}"] for lr in SEARCHED.feature(Variables).lr} == {"stopped"}


def test_a_learning_rate_whose_run_fails_is_not_taken(tmp_path):
    runner = Searching(48.0)
    bench = Varying(tmp_path, runner, job=SEARCHED)
    end_one = runner.end_one

    def end():
        call, future = runner.running[0]
        if call.order.job.name == "a.lr-0.002":
            runner.running.pop(0)
            future.set_result(Outcome(status="invalid", message="as it should"))
        else:
            end_one()

    runner.end_one = end
    bench.run()
    assert bench.statuses["a.lr-0.002"] == "failed" and bench.statuses["a"] == "done"
    assert outcomes(bench)["a"][0] == 1e-3 and "nan with 0.002" in bench.notices[0]


@pytest.mark.parametrize("num_messages", range(1, 12))
def test_whenever_it_is_killed_the_same_learning_rate_is_chosen(tmp_path, num_messages):
    steps = {}
    first = Varying(tmp_path, Searching(48.0, steps=steps), job=SEARCHED)
    kill_after(first, num_messages)
    steps.update({name: record.step for name, record in first.journal.jobs().items()})

    second = Varying(tmp_path, Searching(48.0, steps=steps), journal=first.journal, job=SEARCHED)
    assert second.run()

    last = second.runner.calls[-1].order.job
    assert second.statuses["a"] == "done"
    assert (last.name, last.optimizer.lr, last.phases[-1].variant) == ("a", 2e-3, (64, "fp32", 1))
