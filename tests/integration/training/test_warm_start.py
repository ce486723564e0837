"""`warm_start`: a job continues from a checkpoint of another one, bit by bit as that one would."""

import shutil
from dataclasses import replace

import pytest

from ringmaster.features.clones.execute import START
from ringmaster.features.foreign_models.conversion import convert
from ringmaster.features.warm_start.job import WarmStart
from ringmaster.tasks.control.job_changes import with_settings
from ringmaster.techniques import Adapter
from ringmaster.techniques.checkpoints.chain import read_chain
from ringmaster.techniques.checkpoints.checkpoint import copy_checkpoint, link_checkpoint
from tests.integration.workbench import ADAMW, SINGLE, is_bit_equal, weights_in


def start_of(folder, step):
    return WarmStart(checkpoints=str(folder / "checkpoints"), step=step)


@pytest.mark.parametrize("adapter", [pytest.param(None, marks=pytest.mark.full), Adapter(rank=2, dropout=0.1)])
def test_a_job_goes_on_from_another_jobs_checkpoint_with_its_optimizer(bench, tmp_path, adapter):
    changes = {"adapter": adapter} if adapter else {}
    job = bench.job(num_steps=8, optimizer=replace(bench.job().optimizer, options={"momentum": 0.9}), **changes)
    bench.train(job, SINGLE, tmp_path / "source", last_step=3)
    whole = bench.train(job, SINGLE, tmp_path / "whole")

    clone = replace(job, name="clone", features=(start_of(tmp_path / "source", 3),))
    first = bench.train(clone, SINGLE, tmp_path / "clone", last_step=5)
    rest = bench.train(clone, SINGLE, tmp_path / "clone", known_step=5)

    assert (first.outcome.result.first_step, rest.outcome.result.first_step) == (3, 5)
    assert is_bit_equal(rest.weights, weights_in(tmp_path / "whole" / "model"))
    assert whole.outcome.status == "done"
    links = read_chain(tmp_path / "clone" / "checkpoints").links
    assert [(link.first_step, link.step) for link in links] == [(3, 5), (5, 8)]


def test_a_clone_with_another_learning_rate_leaves_its_source_alone(bench, tmp_path):
    job = bench.job(num_steps=6)
    bench.train(job, SINGLE, tmp_path / "source", last_step=3)
    clone = replace(
        job,
        name="clone",
        optimizer=replace(job.optimizer, lr=0.01),
        features=(start_of(tmp_path / "source", 3),),
    )

    changed = bench.train(clone, SINGLE, tmp_path / "clone")
    rest = bench.train(job, SINGLE, tmp_path / "source")

    assert changed.outcome.result.first_step == rest.outcome.result.first_step == 3
    assert not is_bit_equal(changed.weights, rest.weights)
    assert is_bit_equal(rest.weights, bench.reference(job).weights)


@pytest.mark.full
@pytest.mark.parametrize("to", ["dcp", "megatron"])
def test_a_job_goes_on_from_its_state_in_another_trainers_format(bench, tmp_path, to):
    job = bench.job(num_steps=6, optimizer=ADAMW)
    bench.train(job, SINGLE, tmp_path / "source", last_step=3)
    convert(str(tmp_path / "source" / "checkpoints"), tmp_path / "theirs", to=to)
    done = convert(str(tmp_path / "theirs"), tmp_path / "ours", to="checkpoint")

    clone = replace(job, name="clone", features=(WarmStart(checkpoints=str(tmp_path / "ours"), step=3),))
    rest = bench.train(clone, SINGLE, tmp_path / "clone")

    assert done["num_states"] > 0 and rest.outcome.result.first_step == 3
    assert is_bit_equal(rest.weights, bench.reference(job).weights)


def test_a_checkpoint_that_is_gone_is_named(bench, tmp_path):
    job = replace(bench.job(num_steps=6), features=(start_of(tmp_path / "nowhere", 3),))

    outcome = bench.train(job, SINGLE, tmp_path / "clone").outcome

    assert outcome.status == "invalid" or outcome.status == "crashed"
    assert "no whole checkpoint is there. To fix: bring it back, or let the job begin without it" in outcome.message


CHANGES = [
    {"optimizer.lr": 0.01},
    {"schedule.name": "cosine"},
    {"optimizer.options.weight_decay": 0.1},
    {},
    {"num_steps": 9},
    {"clip_grad_norm": 0.5},
    {"seed": 7},
    {"optimizer.lr": 0.003, "schedule.warmup_steps": 6},
]


@pytest.mark.parametrize("num_clones", [2, pytest.param(8, marks=pytest.mark.full)])
def test_clones_of_a_job_that_goes_on_are_bit_equal_to_offline_continuations_although_killed(
    bench, tmp_path, num_clones
):
    adamw = replace(bench.job().optimizer, name="adamw", options={"weight_decay": 0.01})
    job = bench.job(num_steps=8, optimizer=replace(adamw, lr=0.003))
    checkpoints = tmp_path / "source" / "checkpoints"
    bench.train(job, SINGLE, tmp_path / "source", last_step=3)
    clones = []
    for number, changes in enumerate(CHANGES[:num_clones]):
        folder = tmp_path / f"clone{number}"
        link_checkpoint(checkpoints, 3, to=folder / "checkpoints" / START)
        start = WarmStart(checkpoints=str(folder / "checkpoints" / START), step=3)
        clones.append((replace(with_settings(job, changes, name=f"clone{number}"), features=(start,)), folder))
    copy_checkpoint(checkpoints, 3, to=tmp_path / "kept")
    for last_step in (4, 5, 8):  # the source removes the checkpoint of step 3
        bench.train(job, SINGLE, tmp_path / "source", last_step=last_step)
    assert not (checkpoints / "step-00000003").exists()

    for clone, folder in clones:
        offline = clone.with_features(WarmStart(checkpoints=str(tmp_path / "kept"), step=3))
        whole = bench.train(offline, SINGLE, tmp_path / f"offline-{clone.name}")
        bench.train(clone, SINGLE, folder, last_step=5)
        shutil.rmtree(folder / "checkpoints" / "step-00000005")  # it died before it was written, and begins anew
        rest = bench.train(clone, SINGLE, folder)
        assert rest.outcome.result.first_step == 3
        assert is_bit_equal(rest.weights, whole.weights), clone


def test_a_job_whose_steps_are_changed_before_it_has_a_checkpoint_begins_where_it_would_have(bench, tmp_path):
    job = bench.job(num_steps=8)
    bench.train(job, SINGLE, tmp_path / "source", last_step=3)
    clone = replace(job, name="clone", num_steps=6, features=(start_of(tmp_path / "source", 3),))
    whole = bench.train(clone, SINGLE, tmp_path / "whole")
    root = bench.order(clone, SINGLE, tmp_path / "clone").checkpoint_dir
    changed = clone.with_features(WarmStart(checkpoints=str(root), step=0, first=clone.feature(WarmStart)))

    rest = bench.train(changed, SINGLE, tmp_path / "clone", known_step=3)

    assert rest.outcome.result.first_step == 3
    assert is_bit_equal(rest.weights, whole.weights)


def test_a_job_whose_steps_are_changed_goes_on_from_its_own_checkpoint(bench, tmp_path):
    job = bench.job(num_steps=8, schedule=replace(bench.job().schedule, name="cosine"))
    bench.train(job, SINGLE, tmp_path / "job", last_step=3)
    copy_checkpoint(tmp_path / "job" / "checkpoints", 3, to=tmp_path / "kept")
    own = bench.order(job, SINGLE, tmp_path / "job").checkpoint_dir
    longer = replace(job, num_steps=12, features=(WarmStart(checkpoints=str(own), step=0),))

    rest = bench.train(longer, SINGLE, tmp_path / "job", known_step=3)

    offline = longer.with_features(WarmStart(checkpoints=str(tmp_path / "kept"), step=3))
    assert rest.outcome.result.first_step == 3
    assert is_bit_equal(rest.weights, bench.train(offline, SINGLE, tmp_path / "offline").weights)
