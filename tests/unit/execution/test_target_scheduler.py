"""The choice of a batch size on the way to a target: by what the probe measured, once, and the same after a kill."""

from contextlib import suppress
from dataclasses import replace

import pytest

from ringmaster.tasks.execution.job_table import CHOICE, PHASES
from ringmaster.tasks.execution.target_scheduler import TargetScheduler, choose_variant, variant_jobs
from ringmaster.tasks.storage.journal import begin
from ringmaster.techniques import EvaluationSpec, ScheduleSpec
from ringmaster.techniques.job import Target, Variables
from ringmaster.techniques.processes.events import REACHED, Steps
from ringmaster.techniques.processes.gang import Outcome
from ringmaster.techniques.training.noise_scale import GradientNoise
from tests.unit.execution.fakes import Bench, FakeRunner, job, open_journal, profile

STEP_S = {16: 1.0, 32: 1.1, 64: 1.4, 128: 2.5}
VARYING = job(
    "a",
    num_steps=1000,
    target=Target(metric="loss", at_most=1.0),
    may_vary=Variables(global_batch_size=(16, 32, 64, 128)),
    evaluation=EvaluationSpec(every_steps=50),
)


def measured(scale, *, num=90):
    return tuple(GradientNoise(step=step, signal=1.0, noise=scale, num_samples=16) for step in range(1, num))


def step_s(job=VARYING):
    return {variant: STEP_S[variant[0]] for variant in job.may_vary.choices(job)}


@pytest.mark.parametrize(("scale", "size"), [(0.0, 16), (3.0, 16), (40.0, 64), (1e6, 128)])
def test_the_noisier_the_gradients_the_larger_the_batch(scale, size):
    choice = choose_variant(VARYING, measured(scale), first_step=100, step_s=step_s())
    assert choice.global_batch_size == size
    assert (choice.phases(VARYING) == ()) == (size == 16)


def test_a_choice_says_what_it_predicts_and_why():
    choice = choose_variant(VARYING, measured(48.0), first_step=100, step_s=step_s())

    own, phase = choice.phases(VARYING)
    assert choice.global_batch_size == 64 and choice.gain == pytest.approx(4 / 1.75 / 1.4)
    assert choice.steps[1] < choice.steps[0] == 394 < choice.steps[2]
    assert (own.first_step, own.global_batch_size, own.lr_factor, own.num_steps) == (0, 16, 1.0, 1000)
    assert (phase.first_step, phase.lr_factor) == (100, pytest.approx(4 / 1.75))
    assert phase.num_steps == 100 + choice.steps[2] < 1000  # a constant rate may train on
    assert "batches of 64 samples in fp32 in place of 16 in fp32 from step 100: noise scale 48" in choice.why


def test_a_schedule_that_decays_ends_with_the_predicted_steps():
    decaying = replace(VARYING, schedule=ScheduleSpec(name="cosine"))
    choice = choose_variant(decaying, measured(48.0), first_step=100, step_s=step_s())
    assert choice.num_steps == 100 + choice.steps[0]


def test_nothing_changes_without_enough_measurements_or_gain():
    few = choose_variant(VARYING, measured(1e6, num=5), first_step=100, step_s=step_s())
    slow = choose_variant(VARYING, measured(1e6), first_step=100, step_s={v: v[0] / 14 for v in step_s()})
    assert few.phases(VARYING) == slow.phases(VARYING) == ()
    assert "the noise scale was not measured" in few.why and "no other choice is predicted to save 15%" in slow.why


def test_a_quicker_precision_is_taken_without_a_measurement():
    both = replace(VARYING, may_vary=Variables(precision=("fp32", "bf16")))
    choice = choose_variant(both, (), first_step=100, step_s={(16, "fp32"): 1.0, (16, "bf16"): 0.5})
    assert (choice.precision, choice.num_steps, choice.lr_factor) == ("bf16", 1000, 1.0)


def test_variants_are_jobs_with_names_of_their_own():
    others = variant_jobs(replace(VARYING, may_vary=Variables(global_batch_size=(32, 16))))
    assert {key: (each.name, each.global_batch_size) for key, each in others.items()} == {
        (32, "fp32"): ("a.32.fp32", 32)
    }


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
        noise = [each for each in measured(self.scale, num=1000) if first <= each.step < last]
        call.on_event(Steps(first_step=first, seconds=(1.0,) * (last - first), noise=tuple(noise)))
        self.steps[name] = last
        is_end = is_reached or last == call.order.job.total_steps
        ended = {"metrics": {"loss": 1.0}, REACHED: is_reached} if is_end else {}
        future.set_result(Outcome(status="done", result={"first_step": first, "step": last, **ended}))


class Varying(Bench):
    """A batch of one job that may vary its batch size."""

    def __init__(self, folder, runner, *, journal=None):
        self.variants = {
            variant: (profile(step_s=STEP_S[variant[0]]),) for variant in VARYING.may_vary.choices(VARYING)
        }
        self.notices, journal = [], journal or open_journal(folder)
        self.scheduler = TargetScheduler(journal, {"a": VARYING}, {"a": self.variants}, notice=self.notices.append)
        super().__init__(folder, [VARYING], runner=runner, journal=journal, steering=self.scheduler)

    def entry(self, job, *profiles):
        return replace(super().entry(job, *profiles), variants=self.variants)

    def run(self):
        begin(self.journal, self.jobs, faults={})
        for name, details in self.scheduler.details().items():
            self.journal.write_job(name, details=details)
        return self.executor.run()

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
    assert [each["global_batch_size"] for each in record.details[PHASES]] == [16, 64]
    assert record.details[CHOICE] == bench.notices[0] and record.details[REACHED]
    assert record.message == "reached loss at most 1, after step 300"
    assert any(bench.notices[0] in each.why for each in bench.events if hasattr(each, "why"))
    assert bench.plans[-1].job("a").options[0].runtime_s == pytest.approx((left - 100) * STEP_S[64], rel=1e-3)


def test_a_job_whose_batch_size_is_right_keeps_it(tmp_path):
    bench = Varying(tmp_path, Probing(1.0))

    assert bench.run()

    assert bench.ran[-1] == (16, 1000) and PHASES not in bench.journal.jobs()["a"].details
    assert bench.journal.jobs()["a"].message == "did not reach loss at most 1, after step 1000"
    assert "keeps batches of 16" in bench.notices[0]


class Killed(Exception):
    """Stands for the sudden death of the process."""


@pytest.mark.parametrize("num_messages", range(1, 8))
def test_whenever_it_is_killed_the_same_is_chosen(tmp_path, num_messages):
    steps = {}
    first = Varying(tmp_path, Probing(48.0, steps=steps))
    get, left = first.runner.get, [num_messages]

    def dying(timeout=None):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return get(timeout)

    first.runner.get = dying
    with suppress(Killed):
        first.run()
    steps.update({name: record.step for name, record in first.journal.jobs().items()})

    second = Varying(tmp_path, Probing(48.0, steps=steps), journal=first.journal)
    assert second.run()

    record = second.journal.jobs()["a"]
    assert record.status == "done"
    assert [(each["first_step"], each["global_batch_size"]) for each in record.details[PHASES]] == [(0, 16), (100, 64)]
