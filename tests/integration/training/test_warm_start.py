"""`warm_start`: a job goes on from a checkpoint of another one, bit by bit as that one would."""

from dataclasses import replace

import pytest

from ringmaster.techniques import Adapter
from ringmaster.techniques.checkpoints.chain import read_chain
from ringmaster.techniques.job import WarmStart
from tests.integration.workbench import SINGLE, is_bit_equal, weights_in


def start_of(folder, step):
    return WarmStart(checkpoints=str(folder / "checkpoints"), step=step)


@pytest.mark.parametrize("adapter", [None, Adapter(rank=2, dropout=0.1)])
def test_a_job_goes_on_from_another_jobs_checkpoint_with_its_optimizer(bench, tmp_path, adapter):
    changes = {"adapter": adapter} if adapter else {}
    job = bench.job(num_steps=8, optimizer=replace(bench.job().optimizer, options={"momentum": 0.9}), **changes)
    bench.train(job, SINGLE, tmp_path / "source", last_step=3)
    whole = bench.train(job, SINGLE, tmp_path / "whole")

    clone = replace(job, name="clone", warm_start=start_of(tmp_path / "source", 3))
    first = bench.train(clone, SINGLE, tmp_path / "clone", last_step=5)
    rest = bench.train(clone, SINGLE, tmp_path / "clone", known_step=5)

    assert (first.outcome.result["first_step"], rest.outcome.result["first_step"]) == (3, 5)
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
        warm_start=start_of(tmp_path / "source", 3),
    )

    changed = bench.train(clone, SINGLE, tmp_path / "clone")
    rest = bench.train(job, SINGLE, tmp_path / "source")

    assert changed.outcome.result["first_step"] == rest.outcome.result["first_step"] == 3
    assert not is_bit_equal(changed.weights, rest.weights)
    assert is_bit_equal(rest.weights, bench.reference(job).weights)


def test_a_checkpoint_that_is_gone_is_named(bench, tmp_path):
    job = replace(bench.job(num_steps=6), warm_start=start_of(tmp_path / "nowhere", 3))

    outcome = bench.train(job, SINGLE, tmp_path / "clone").outcome

    assert outcome.status == "invalid" or outcome.status == "crashed"
    assert "no whole checkpoint is there. To fix: bring it back, or leave out warm_start" in outcome.message
