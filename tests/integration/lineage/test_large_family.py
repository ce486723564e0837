"""Undo in a family of sixty small models of five generations, and a hundred audits of one model."""

import random
import shutil
from dataclasses import replace

import pytest

from ringmaster.features.undo.undoing import UndoRequest, plan_undo
from ringmaster.features.warm_start.job import WarmStart
from ringmaster.flows.lineage.home import LineageHome
from ringmaster.techniques.data import prepare
from tests.integration.lineage.family import in_home
from tests.integration.lineage.test_reproducing import flip_a_bit
from tests.integration.lineage.test_undoing import become, tokenizer_of, training_rows
from tests.integration.lineage.trained import LINKS, job_of, record, train, write_rows
from tests.integration.workbench import SINGLE, is_bit_equal

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]
NUM_GENERATIONS, NUM_FAMILIES = 5, 12


def family_of(bench, home, tmp_path):
    """Returns the jobs, by name, of twelve lines of five generations. Each is trained on one of twenty sets of rows."""
    draw, jobs = random.Random(1), {}
    rows = [write_rows(tmp_path / f"rows-{number}.jsonl", seed=number) for number in range(20)]
    tokenizer = tokenizer_of(bench, job_of(bench, rows[0]))
    for line in range(NUM_FAMILIES):
        for generation in range(NUM_GENERATIONS):
            name, base = f"m-{line}-{generation}", f"m-{line}-{generation - 1}" if generation else None
            file = draw.choice(rows)
            job = job_of(bench, file, name=name, base=base)
            job = replace(job, seed=line, data=replace(job.data, name=file.stem, tokenizer=tokenizer))
            folder, below = home / "batches" / name, base and str(home / "batches" / base / "model")
            for last_step in LINKS:
                trained = bench.train(job, SINGLE, folder, last_step=last_step, keep_checkpoints=10, weights_from=below)
            assert trained.outcome.status == "done", trained.outcome
            record(bench, home, job, folder, {}, parents={} if base is None else {base: f"models:/{base}/1"})
            jobs[name] = job
    return jobs


def test_undo_takes_at_most_half_the_steps_of_training_all_again_and_its_weights_are_those_of_a_reference(
    bench, tmp_path
):
    home = tmp_path / "home"
    home.mkdir()
    with in_home(home):
        jobs = family_of(bench, home, tmp_path)
        draw, shares = random.Random(2), []
        for number in range(10):
            job = jobs[draw.choice(sorted(jobs))]
            row = draw.choice(training_rows(bench, job))
            lineage = LineageHome(folder=home, is_fresh=not number)
            plan = plan_undo(lineage, UndoRequest(row=row), folder=home / "undo")
            num_steps = len(jobs) * LINKS[-1]
            shares.append((plan.num_steps - plan.num_kept_steps) / num_steps)
        assert sorted(shares)[len(shares) // 2] <= 0.5, shares
        trained_as_planned(bench, home, plan, tmp_path)


def trained_as_planned(bench, home, plan, tmp_path):
    """Trains a plan's models, and references that continue from the same checkpoints and have never known the row."""
    made = {}
    for each in plan.models:
        name, base = each.job.name, each.job.base
        below = base and str(
            made.get(base) or home / "batches" / base.removeprefix("models:/").partition("/")[0] / "model"
        )
        undone = bench.train(each.job, SINGLE, tmp_path / "undone" / name, weights_from=below)
        reference = each.job.without(WarmStart)
        if each.first_step:
            source = home / "batches" / each.node.record.registered_name / "checkpoints"
            root, step = tmp_path / "reference" / name / "checkpoints", f"step-{each.first_step:08d}"
            shutil.copytree(source / step, root / step)
            become(root, each.first_step, reference, digest=prepare(reference.data, cache_dir=bench.cache_dir).digest)
        trained = bench.train(reference, SINGLE, tmp_path / "reference" / name, weights_from=below)
        assert trained.outcome.result.first_step == undone.outcome.result.first_step == each.first_step
        assert is_bit_equal(trained.weights, undone.weights)
        made[name] = tmp_path / "undone" / name / "model"
    assert made


def test_a_hundred_audits_find_a_change_as_often_as_they_say(bench, tmp_path):
    home, flips = tmp_path / "home", random.Random(3)
    home.mkdir()

    def between(step, root):
        if step == LINKS[0]:
            flip_a_bit(root, step, draw=flips)

    with in_home(home), pytest.MonkeyPatch.context() as patch:
        from contextlib import nullcontext

        from ringmaster.features.reproduction import reproducing

        patch.setattr(reproducing, "fork_server_for", lambda jobs: nullcontext(bench.server))
        made = train(bench, home, job_of(bench, write_rows(tmp_path / "rows.jsonl")), between=between)
        reports = [made.reproduced(share=0.05, seed=seed) for seed in range(100)]

    num_found = sum(not report.is_equal for report in reports)
    assert {report.probability for report in reports} == {1 / 3}
    assert 19 <= num_found <= 48  # 99.9 % of draws of a hundred with probability 1/3
