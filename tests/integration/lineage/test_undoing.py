"""`ringmaster lineage undo`: models are trained again as if they had never read a row."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ringmaster.errors import InputError
from ringmaster.features.undo.undoing import UndoRequest, plan_undo, promote, register
from ringmaster.features.warm_start.job import WarmStart
from ringmaster.flows.lineage.home import LineageHome
from ringmaster.flows.retraining import examine
from ringmaster.model_lineage.base_models import record_base
from ringmaster.model_lineage.records import CHAMPION
from ringmaster.tasks.evaluation.examination import ExaminationResult, SliceMetric
from ringmaster.tasks.retraining.policy import PromotionPolicy
from ringmaster.tasks.retraining.promotion import DecisionRecord, read_decisions, write_decision
from ringmaster.techniques import Adapter
from ringmaster.techniques.checkpoints.checkpoint import read_manifest, stored_manifest
from ringmaster.techniques.checkpoints.storage import MANIFEST, LocalStorage
from ringmaster.techniques.data import prepare
from ringmaster.techniques.data.encoded_rows import RowManifest
from ringmaster.techniques.training.rank_job import weights_digest
from tests.integration.lineage.family import in_home
from tests.integration.lineage.trained import LINKS, job_of, record, train, write_rows
from tests.integration.workbench import SINGLE, is_bit_equal, weights_in


@pytest.fixture
def home(tmp_path):
    with in_home(tmp_path / "home"):
        (tmp_path / "home").mkdir()
        yield tmp_path / "home"


def lineage(home):
    return LineageHome(folder=home, is_fresh=True)


def planned(home, **request):
    return plan_undo(lineage(home), UndoRequest(**request), folder=home / "undo")


def training_rows(bench, job):
    return RowManifest.read(Path(prepare(job.data, cache_dir=bench.cache_dir).folder)).rows["training"]


def a_late_row(bench, home, job):
    """A row that was read after the first checkpoint, and the plan that undoes it."""
    for row in training_rows(bench, job):
        plan = planned(home, row=row)
        if plan.models[0].first_step:
            return row, plan
    raise AssertionError("all rows were read at once")


@pytest.fixture(scope="module")
def trained_alone(bench, tmp_path_factory):
    """(the home of one model that no test changes, its job)."""
    home = tmp_path_factory.mktemp("alone")
    job = job_of(bench, write_rows(home / "rows.jsonl"))
    with in_home(home):
        train(bench, home, job)
    return home, job


@pytest.fixture
def alone(trained_alone):
    with in_home(trained_alone[0]):
        yield trained_alone


def test_the_rest_is_trained_from_the_last_checkpoint_before_the_row_as_if_it_had_never_been(bench, alone, tmp_path):
    check_the_rest_is_trained(bench, *alone, tmp_path)


# A whole training, for another beginning, order or end of what the tests without this marker do.
@pytest.mark.full
def test_the_rest_of_samples_that_are_grouped_by_length_is_trained_as_if_the_row_had_never_been(bench, home, tmp_path):
    rows = [json.loads(line) for line in write_rows(tmp_path / "rows.jsonl").read_text().splitlines()]
    pairs = [{"prompt": f"{n}", "completion": row["text"][: 5 + 3 * (n % 17)]} for n, row in enumerate(rows)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    job = job_of(bench, tmp_path / "pairs.jsonl")
    data = replace(job.data, kind="completion", sampling="length-grouped", seq_len=64)
    job = replace(job, data=data)
    train(bench, home, job)
    model = check_the_rest_is_trained(bench, home, job, tmp_path)
    assert model.job.data.sampling == "length-grouped"


def check_the_rest_is_trained(bench, home, job, tmp_path):
    row, plan = a_late_row(bench, home, job)
    (model,) = plan.models
    start = model.first_step
    assert start in LINKS

    undone = bench.train(model.job, SINGLE, tmp_path / "undone")

    # The reference: the checkpoint of that step, continued by a job that has never known the row.
    data = model.job.data
    assert row not in training_rows(bench, model.job)
    reference = replace(job, data=data)
    root = tmp_path / "reference" / "checkpoints"
    shutil.copytree(home / "batches" / job.name / "checkpoints" / f"step-{start:08d}", root / f"step-{start:08d}")
    become(root, start, reference, digest=prepare(data, cache_dir=bench.cache_dir).digest)
    continued = bench.train(reference, SINGLE, tmp_path / "reference")
    assert continued.outcome.result.first_step == undone.outcome.result.first_step == start
    assert is_bit_equal(undone.weights, continued.weights)
    assert not is_bit_equal(undone.weights, weights_in(home / "batches" / job.name / "model"))
    return model


def become(root, step, job, *, digest):
    """Makes a checkpoint into one of another job."""
    manifest = read_manifest(LocalStorage(root), f"step-{step:08d}")
    meta = {**manifest.meta, "weights_digest": weights_digest(job, data_digest=digest)}
    (root / f"step-{step:08d}" / MANIFEST).write_bytes(stored_manifest(replace(manifest, meta=meta)))


def test_all_rows_but_one_are_left_in_order(bench, alone):
    home, job = alone
    (row, *_) = training_rows(bench, job)

    (model,) = planned(home, row=row).models

    texts = [json.loads(line)["text"] for line in Path(model.job.data.path).read_text().splitlines()]
    every = [json.loads(line)["text"] for line in Path(job.data.path).read_text().splitlines()]
    assert texts == [text for text in every if text in texts]
    assert len(training_rows(bench, job)) - len(training_rows(bench, model.job)) == 1
    assert model.job.data.version == f"1-without-{row[:8]}"
    assert model.job.data.original_path == job.data.path


def tokenizer_of(bench, job):
    return str(prepare(job.data, cache_dir=bench.cache_dir).tokenizer_dir)


def family(bench, home, tmp_path):
    """A base, an adapter of it on other rows, and a model of that; and one that is not a relative."""
    rows, others = write_rows(tmp_path / "rows.jsonl"), write_rows(tmp_path / "others.jsonl", seed=8)
    base = job_of(bench, rows, name="base")
    train(bench, home, base, layouts=(SINGLE,))
    result, tokenizer = {"base": base}, tokenizer_of(bench, base)
    for name, parent, data in (("child", "base", others), ("grandchild", "child", rows), ("stranger", None, others)):
        parents = {} if parent is None else {parent: f"models:/{parent}/1"}
        job = job_of(bench, data, name=name, base=parent)
        job = replace(job, data=replace(job.data, name=data.stem, tokenizer=tokenizer))
        folder, below = home / "batches" / name, parent and str(home / "batches" / parent / "model")
        trained = bench.train(job, SINGLE, folder, weights_from=below)
        assert trained.outcome.status == "done", trained.outcome
        record(bench, home, job, folder, {}, parents=parents)
        result[name] = job
    return result


@pytest.fixture(scope="module")
def trained_family(bench, tmp_path_factory):
    """(the home of a family that no test changes, its jobs by name)."""
    home = tmp_path_factory.mktemp("family")
    with in_home(home):
        return home, family(bench, home, home)


@pytest.fixture
def relatives(trained_family):
    with in_home(trained_family[0]):
        yield trained_family


def test_a_family_is_trained_again_in_order_and_strangers_are_left_alone(bench, relatives):
    home, jobs = relatives
    own = set(training_rows(bench, jobs["base"])) - set(training_rows(bench, jobs["stranger"]))

    plan = planned(home, row=own.pop())

    assert [each.node.label for each in plan.models] == ["base/1", "child/1", "grandchild/1"]
    by_name = {each.node.record.registered_name: each.job for each in plan.models}
    assert by_name["child"].base == by_name["base"].name
    assert by_name["grandchild"].base == by_name["child"].name
    assert by_name["child"].data == jobs["child"].data  # it never read the row
    assert by_name["grandchild"].feature(WarmStart) is None  # it came from a model that changes
    batch = plan.batch(deadline_s=600.0)
    assert batch.deadlines_s == dict.fromkeys(batch.deadlines_s, 600.0)
    assert "3 models to train again" in [*plan.sentences()][-1]


def test_a_version_is_taken_out_and_its_children_start_from_its_parent(relatives):
    home, _ = relatives

    plan = planned(home, base="child/1")

    assert [node.label for node in plan.removed] == ["child/1"]
    (model,) = plan.models
    assert (model.node.label, model.job.base) == ("grandchild/1", "models:/base/1")
    with pytest.raises(InputError, match="base/1 came from nothing"):
        planned(home, base="base/1")


def test_a_data_set_takes_out_the_models_that_were_trained_on_it(relatives):
    home, _ = relatives

    plan = planned(home, dataset="others")

    assert sorted(node.label for node in plan.removed) == ["child/1", "stranger/1"]
    assert [(each.node.label, each.job.base) for each in plan.models] == [("grandchild/1", "models:/base/1")]
    assert planned(home, dataset="others@1").to_json()["removed"] == [node.label for node in plan.removed]
    with pytest.raises(InputError, match="no recorded model has read dataset others@2"):
        planned(home, dataset="others@2")


def going_on(bench, home, first, rows, *, root, step):
    """A recorded model of the job `first` on other rows, that went on from a checkpoint."""
    data = replace(first.data, path=str(rows), name=rows.stem, tokenizer=tokenizer_of(bench, first))
    job = replace(first, name="second", data=data, features=(WarmStart(checkpoints=str(root), step=step),))
    train(bench, home, job, layouts=(SINGLE,))
    return job


# A whole training, for another beginning, order or end of what the tests without this marker do.
@pytest.mark.full
def test_a_job_goes_back_to_the_checkpoint_of_a_folder_that_it_went_on_from(bench, home, tmp_path):
    first = job_of(bench, write_rows(tmp_path / "rows.jsonl"), name="first")
    train(bench, tmp_path, first, layouts=(SINGLE,) * 2)  # in another home
    root = tmp_path / "batches" / "first" / "checkpoints"
    job = going_on(bench, home, first, write_rows(tmp_path / "others.jsonl", seed=8), root=root, step=6)

    (model,) = planned(home, row=training_rows(bench, job)[0]).models

    assert model.job.feature(WarmStart) == job.feature(WarmStart)
    assert model.first_step == 6


# A whole training, for another beginning, order or end of what the tests without this marker do.
@pytest.mark.full
def test_a_job_that_went_on_from_a_changed_checkpoint_is_trained_from_its_beginning(bench, home, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl")
    first = job_of(bench, rows, name="first")
    train(bench, home, first)
    root = home / "batches" / "first" / "checkpoints"
    job = going_on(bench, home, first, rows, root=root, step=3)
    starts = set()
    for row in training_rows(bench, first)[:20]:
        models = {each.node.record.registered_name: each for each in planned(home, row=row).models}
        has_read = models["first"].first_step < 3
        assert models["second"].job.feature(WarmStart) == (None if has_read else job.feature(WarmStart))
        assert (", and what it came from is trained again" in models["second"].why) == has_read
        starts.add(models["second"].first_step)
    assert starts == {0, 3}


def imported(home, folder):
    return record_base(lineage(home).ledger, str(folder), store=None)


def test_a_model_in_a_folder_is_taken_out(bench, home, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl")
    base = job_of(bench, rows, name="base")
    train(bench, tmp_path, base, layouts=(SINGLE,))
    folder = tmp_path / "batches" / "base" / "model"
    model = replace(base.model, from_pretrained=str(folder))
    job = replace(base, name="tuned", model=model, data=replace(base.data, tokenizer=tokenizer_of(bench, base)))
    bench.train(job, SINGLE, home / "batches" / "tuned")
    record(bench, home, job, home / "batches" / "tuned", {}, parents={str(folder): imported(home, folder)})
    label = lineage(home).find(imported(home, folder)).label

    with pytest.raises(InputError, match=f"{label} came from nothing"):
        planned(home, base=label)


@pytest.fixture
def replaced(bench, home, tmp_path, monkeypatch):
    """(the home, a new version that was recorded in place of a model, and the gains that examinations will find)."""
    job = job_of(bench, write_rows(tmp_path / "rows.jsonl"))
    made = train(bench, home, job, layouts=(SINGLE,))
    made.ledger.set_alias(made.name, CHAMPION, 1)
    plan = planned(home, row=training_rows(bench, job)[0])
    record(bench, home, plan.models[0].job, home / "batches" / job.name, {})
    (version,) = register(lineage(home), plan, {plan.models[0].job.name: f"models:/{plan.models[0].job.name}/1"})
    gains = []

    def examine_by(policy, models, *, data, all_rows, against, against_data, num_devices, notice):
        (model,), gain = models, gains.pop()
        interval = {"low": 1.9, "high": 2.1, "level": 0.95, "gain_low": gain - 0.1, "gain_high": gain + 0.1}
        whole = SliceMetric(
            metric=policy.metric, slice="all", num_rows=20, value=2.0, other=2.0 + gain, gain=gain, **interval
        )
        assert (model.label, against.label, data.version) == (version.label, f"{made.name}/1", job_version)
        yield [ExaminationResult(num_rows=20, measured=(replace(whole, p_better=0.01),))]

    job_version = plan.models[0].job.data.version
    monkeypatch.setattr(examine, "examine_by", examine_by)
    return home, version, gains


def promoted(home, version, *, policy=None):
    with examine.open_move_log() as log:
        told = {"notice": lambda _: None, "emit_alarm": lambda _: None}
        decision = promote(lineage(home), version, policy=policy, log=log, **told)
    name = version.label.partition("/")[0]
    return decision, lineage(home).ledger.get_alias(name, CHAMPION).version


def test_a_new_version_is_promoted_where_the_one_it_replaces_serves_and_the_rule_agrees(replaced):
    home, version, gains = replaced
    assert lineage(home).find(version.label).record.datasets[0].version.startswith("1-without-")
    gains += [0.5, -0.5]

    decision, champion = promoted(home, version)
    assert (decision.promote, champion) == (False, 1)
    assert "the new model is worse by 0.5" in version.sentence(decision)

    decision, champion = promoted(home, version)
    assert (decision.promote, champion) == (True, 2)
    made = read_decisions(lineage(home).ledger, lineage(home).find(version.label).record)
    assert [(each.outcome, each.who) for each in made] == [("kept", "rule"), ("promoted", "rule")]

    idle = replace(version, replaced=replace(version.replaced, aliases=()))
    assert "does not serve" in promoted(home, idle)[0].why


# A whole training, for another beginning, order or end of what the tests without this marker do.
@pytest.mark.full
def test_policies_decide_on_what_they_have_promoted(replaced):
    home, version, gains = replaced
    by_policy = DecisionRecord(version=1, outcome="promoted", reasons=("good",), who="policy careful")
    write_decision(lineage(home).ledger, version.replaced.record, by_policy)
    decision, champion = promoted(home, version)
    assert (decision.promote, champion) == (False, 1)
    assert "the policy careful decides. To fix: name its file by --policy" in decision.why

    gains += [0.5, 0.5]
    decision, champion = promoted(home, version, policy=PromotionPolicy(name="careful", approval_s=60.0))
    assert (decision.promote, champion) == (False, 1)
    assert decision.why.startswith("it waits for approval: ")

    keys = home / "keys"
    keys.mkdir()
    (keys / "policy.yaml").write_text("require_signature: [promote]\n")
    decision, champion = promoted(home, version, policy=PromotionPolicy(name="careful"))
    assert (decision.promote, champion) == (False, 1)
    assert "was not signed" in decision.why


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, "one thing is undone at a time"),
        ({"row": "a", "base": "b"}, "one thing is undone at a time"),
        ({"row": "0" * 16}, "no recorded model has read row 0000000000000000 in a data set with a name.* To fix: "),
        ({"row": "never written"}, "no recorded model has read row never written"),
    ],
)
def test_what_nothing_has_read_is_refused(relatives, request_, message):
    home, _ = relatives
    with pytest.raises(InputError, match=message):
        planned(home, **request_)


def test_data_that_has_changed_since_is_refused(bench, alone):
    home, job = alone
    row = training_rows(bench, job)[0]
    write_rows(Path(job.data.path), changed=4)
    try:
        with pytest.raises(InputError, match="its data has changed since"):
            planned(home, row=row)
    finally:
        write_rows(Path(job.data.path))


@pytest.mark.full
def test_an_adapter_goes_back_to_a_checkpoint_of_its_own(bench, home, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl")
    base = job_of(bench, write_rows(tmp_path / "others.jsonl", seed=8), name="base")
    train(bench, home, base, layouts=(SINGLE,))
    job = job_of(bench, rows, name="tuned", base="base", adapter=Adapter(rank=2))
    job = replace(job, data=replace(job.data, tokenizer=tokenizer_of(bench, base)))
    below = home / "batches" / "base" / "model"
    folder = home / "batches" / "tuned"
    for last_step in LINKS:
        bench.train(job, SINGLE, folder, last_step=last_step, keep_checkpoints=10, weights_from=str(below))
    record(bench, home, job, folder, {}, parents={"base": "models:/base/1"})
    own = sorted(set(training_rows(bench, job)) - set(training_rows(bench, base)))

    (model,) = planned(home, row=own[0]).models

    assert (model.node.label, model.job.base) == ("tuned/1", "models:/base/1")
    assert model.first_step == 0 or model.job.feature(WarmStart).checkpoints == str(folder / "checkpoints")
