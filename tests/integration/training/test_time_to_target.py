"""Jobs that end at a target, and jobs that change their batch size and precision on the way."""

import sqlite3
from dataclasses import replace

import pytest

from ringmaster.codec import from_json
from ringmaster.features.local_updates.job import LocalUpdates
from ringmaster.features.target.job import Phases, Target, Variables
from ringmaster.features.target.noise_scale import GradientNoise
from ringmaster.techniques import EvaluationSpec, Job
from ringmaster.techniques.checkpoints.chain import read_chain
from ringmaster.techniques.checkpoints.checkpoint import CheckpointStore
from ringmaster.techniques.job import TrainingPhase
from ringmaster.techniques.processes.gang_events import EvaluationReported, Steps
from ringmaster.techniques.processes.reporter import STOP
from tests.integration.flows.test_run import Place
from tests.integration.workbench import ADAMW, SINGLE, Layout, is_bit_equal, largest_difference
from tests.matrix import matrix

VARYING = Variables(global_batch_size=(8, 16))
DDP, FSDP = Layout("ddp", 2), Layout("fsdp", 2, {"reshard": False})


def phases(job, *, first_step=4, size=16, precision="fp32", num_steps=9, features=()):
    changed = TrainingPhase(
        first_step=first_step,
        global_batch_size=size,
        precision=precision,
        lr_factor=1.5,
        num_steps=num_steps,
        features=features,
    )
    return replace(job, num_steps=num_steps).with_features(Phases(phases=(job.phase(0), changed)))


def test_a_job_ends_where_an_evaluation_reaches_its_target(bench, tmp_path):
    job = bench.job(num_steps=12, evaluation=EvaluationSpec(every_steps=2, max_batches=1))
    losses = [event.metrics["loss"] for event in bench.reference(job).said("metrics")]
    limit = losses[2]  # after six steps

    trained = bench.train(job.with_features(Target(metric="loss", at_most=limit)), SINGLE, tmp_path)

    first = next(k for k, loss in enumerate(losses) if loss <= limit)
    result = trained.outcome.result
    assert (trained.outcome.status, result.step, result.ended_early) == ("done", 2 * (first + 1), True)
    assert result.metrics["loss"] == losses[first] and trained.weights
    missed = bench.train(job.with_features(Target(metric="loss", at_most=0.0)), SINGLE, tmp_path / "missed")
    assert (missed.outcome.result.step, missed.outcome.result.ended_early) == (12, False)


def test_a_gang_that_died_before_it_reported_the_target_ends_there_again(bench, tmp_path):
    job = bench.job(num_steps=12, evaluation=EvaluationSpec(every_steps=2, max_batches=1))
    job = job.with_features(Target(metric="loss", at_most=100.0))
    bench.train(job, SINGLE, tmp_path, last_step=2)

    again = bench.train(job, SINGLE, tmp_path, known_step=2)

    assert (again.outcome.result.step, again.outcome.result.ended_early) == (2, True)
    assert [event.step for event in again.events if isinstance(event, EvaluationReported)] == [2]


@pytest.mark.parametrize(
    "optimizer",
    matrix([ADAMW, replace(ADAMW, name="sgd", lr=0.1)], quick=[ADAMW], ids=["adamw", "sgd"]),
)
def test_a_changed_batch_size_is_part_of_the_job_however_it_is_trained(bench, tmp_path, optimizer):
    job = bench.job(num_steps=12, optimizer=optimizer, features=(VARYING,))
    changed = phases(job)
    bench.train(job, SINGLE, tmp_path / "own", last_step=4)

    rest = bench.train(changed, SINGLE, tmp_path / "own", known_step=4)

    whole = bench.train(changed, SINGLE, tmp_path / "whole")
    assert is_bit_equal(rest.weights, whole.weights)
    assert [event.num_samples for event in whole.events if isinstance(event, Steps)] and rest.losses == whole.losses[4:]
    divided = bench.train(changed, DDP, tmp_path / "ddp")
    assert largest_difference(divided.weights, whole.weights) < (3e-7 if optimizer.name == "sgd" else 1e-4)
    assert not is_bit_equal(whole.weights, bench.reference(replace(job, num_steps=9)).weights)
    meta = CheckpointStore(str(tmp_path / "own" / "checkpoints")).newest().manifest.meta
    assert [each["global_batch_size"] for each in meta["phases"]] == [8, 16]
    chain = read_chain(tmp_path / "own" / "checkpoints")
    assert from_json(Job, chain.job) == changed and [link.step for link in chain.links] == [4, 9]


def test_a_kill_after_the_change_leaves_no_trace(bench, tmp_path):
    changed = phases(bench.job(num_steps=12, optimizer=ADAMW, features=(VARYING,)), precision="bf16")

    def stop_at_six(gang, event):
        if isinstance(event, Steps) and event.step >= 5:
            gang.send(STOP)

    bench.train(changed, SINGLE, tmp_path / "two", last_step=6, on_event=stop_at_six)
    rest = bench.train(changed, SINGLE, tmp_path / "two", known_step=1)

    assert is_bit_equal(rest.weights, bench.reference(changed).weights)


# A round that a kill divides is a case of test_local_updates.py, and a phase of a larger batch is one above.
@pytest.mark.full
def test_local_updates_that_follow_a_probe_have_the_same_bits_on_any_number_of_devices(bench, tmp_path):
    """Rounds of two steps from step 4 on: the kill after step 7 falls inside one."""
    job = bench.job(num_steps=12, optimizer=ADAMW, features=(replace(VARYING, sync_every=(1, 2), workers=2),))
    changed = phases(job, features=(LocalUpdates(workers=2, sync_every=2, warmup_steps=4),))
    local = {num: Layout("local", num, {"micro_batch": 8}) for num in (1, 2)}
    for folder in ("one", "two"):
        bench.train(job, DDP, tmp_path / folder, last_step=4)

    whole = bench.train(changed, local[1], tmp_path / "one", known_step=4)
    bench.train(changed, local[2], tmp_path / "two", known_step=4, last_step=7)
    rest = bench.train(changed, local[1], tmp_path / "two", known_step=7)

    assert whole.outcome.status == rest.outcome.status == "done"
    assert is_bit_equal(rest.weights, whole.weights) and rest.losses == whole.losses[3:]
    assert from_json(Job, read_chain(tmp_path / "two" / "checkpoints").job) == changed
    synchronous = bench.train(job, DDP, tmp_path / "ddp", last_step=4)
    synchronous = bench.train(phases(job), DDP, tmp_path / "ddp", known_step=4)
    assert 1e-5 < largest_difference(rest.weights, synchronous.weights) < 0.1
    refused = bench.train(changed, SINGLE, tmp_path / "ddp", last_step=4)
    assert "is of another version" in refused.outcome.message


def test_a_plain_technique_does_not_take_the_steps_of_local_updates(bench, tmp_path):
    job = bench.job(num_steps=12, features=(replace(VARYING, sync_every=(1, 2), workers=2),))
    bench.train(job, SINGLE, tmp_path, last_step=4)
    changed = phases(job, features=(LocalUpdates(workers=2, sync_every=2, warmup_steps=4),))

    outcome = bench.train(changed, SINGLE, tmp_path, known_step=4).outcome

    assert outcome.status == "invalid"
    assert "has local updates from step 4, of which single knows nothing. To fix: train it on with" in outcome.message


def test_a_checkpoint_of_another_batch_size_is_refused(bench, tmp_path):
    job = bench.job(num_steps=12, features=(VARYING,))
    bench.train(phases(job), SINGLE, tmp_path, last_step=6)

    outcome = bench.train(phases(job, first_step=3), SINGLE, tmp_path, known_step=6).outcome

    assert outcome.status == "invalid" and "is of another version of job" in outcome.message


@pytest.mark.parametrize("layout", matrix([SINGLE, DDP, FSDP], quick=[FSDP]))
def test_the_noise_is_measured_alike_in_every_layout(bench, tmp_path, layout):
    job = bench.job(num_steps=6, global_batch_size=8, optimizer=ADAMW, features=(VARYING,))
    config = {"micro_batch": 2} if layout == SINGLE else {"micro_batch": 4 // 2}

    trained = bench.train(job, replace(layout, config={**layout.config, **config}), tmp_path)
    reports = [event for event in trained.events if isinstance(event, Steps)]
    noise = [from_json(GradientNoise, each) for event in reports for each in event.measurements]

    other = bench.reference(job)  # in one micro-batch, which is divided for the measurement
    assert [each.step for each in noise] == [1, 2, 3, 4, 5]
    assert largest_difference(trained.weights, other.weights) < 1e-4
    assert all(each.num_samples == 8 and each.signal + each.noise / 8 > 0 for each in noise)
    if layout != SINGLE:  # the same parts: half of each rank's share, and the same sums
        assert noise[0].noise != 0


def test_a_job_that_may_not_vary_measures_nothing(bench):
    assert not [
        each for event in bench.reference(bench.job()).events if isinstance(event, Steps) for each in event.measurements
    ]


BATCH = """
name: target
objective: time-to-target
devices: {cpu: 1}
jobs:
  - name: digits
    model:
      architecture: ViTForImageClassification
      config: {image_size: 8, patch_size: 4, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
               num_attention_heads: 1, hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}
    data: {source: digits}
    optimizer: {lr: 1.0e-6}
    global_batch_size: 16
    num_steps: 60
    evaluation: {every_steps: 10, metrics: [loss], max_batches: 2}
    target: {metric: eval/loss, at_most: 0.01}
    may_vary: {lr: [1.0e-6, 1.0e-2], sync_every: [1, 8]}
    techniques: [single, local]
"""


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_batch_compares_learning_rates_before_it_trains(tmp_path):
    place = Place(tmp_path)
    place.batch.write_text(BATCH)

    result = place.done()

    jobs = {each["name"]: each for each in result["jobs"]}
    assert {name: each["status"] for name, each in jobs.items()} == {
        "digits.lr-1e-06": "stopped",
        "digits.lr-0.01": "stopped",
        "digits": "done",
    }
    assert [jobs[f"digits.lr-{lr!r}"]["num_steps"] for lr in (1e-6, 1e-2)] == [20, 20]
    assert jobs["digits"]["segments"][0]["first_step"] == 20  # of the best short run
    connection = sqlite3.connect(place.home / "mlflow.db")
    params = connection.execute(
        "select value from params join runs using (run_uuid) where name = 'digits' and key = 'optimizer.lr'"
    ).fetchall()
    connection.close()
    assert params == [("0.01",)]
    readme = next(place.home.glob("mlartifacts/**/README.md")).read_text()
    assert "takes, in place of 1e-06, the learning rate 0.01: loss after 20 steps is" in readme
