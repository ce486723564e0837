"""A job's kind and parents in the lineage, for every source of its weights."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from ringmaster.errors import LedgerError, TensorStoreError
from ringmaster.features.adaptation.pages import compared_with_parents
from ringmaster.features.loss_teacher.job import LossTeacher
from ringmaster.features.warm_start.job import WarmStart
from ringmaster.model_lineage import ADAPTATION_KINDS, ModelRecord
from ringmaster.tasks.recording import ancestry
from ringmaster.tasks.recording.ancestry import Ancestry, kind_of
from ringmaster.tasks.storage.journal import JobRecord, Variation
from ringmaster.techniques import Adapter, DataSpec, Job, ModelSpec
from ringmaster.techniques.job import ADAPTATIONS, AdaptationSpec
from tests.unit.recording.ledgers import FakeLedger

PLAIN = Job(name="me", model=ModelSpec(architecture="X"), data=DataSpec(source="digits"), num_steps=1)


class Notes(dict):
    """A journal of facts. jobs: their models' URIs by name, None for models that are not recorded."""

    def __init__(self, facts=(), *, jobs=None):
        super().__init__(facts)
        self._jobs = jobs or {}

    def put(self, key, value):
        self[key] = value

    def jobs(self):
        return {name: JobRecord(name=name, model_uri=uri) for name, uri in self._jobs.items()}


def family(journal=None, **jobs):
    """The ancestry of a batch. jobs: the URIs of their models."""
    journal = Notes(jobs=jobs) if journal is None else journal
    return Ancestry(ledger=FakeLedger(), journal=journal, jobs=dict.fromkeys(jobs, PLAIN))


@pytest.mark.parametrize(
    ("job", "has_parents", "kind"),
    [
        (PLAIN, False, "pretrained"),
        (replace(PLAIN, base="a"), True, "fine-tuned"),
        (replace(PLAIN, base="a", adapter=Adapter(kind="lora")), True, "lora"),
        (replace(PLAIN, base="a", adapter=Adapter(kind="prefix")), True, "prefix-tuned"),
        (replace(PLAIN, base="a", adapter=Adapter(kind="ia3")), True, "ia3"),
        *((PLAIN.with_features(AdaptationSpec(kind=kind)), True, kind) for kind in ADAPTATIONS),
    ],
)
def test_a_job_says_of_what_kind_its_model_is(job, has_parents, kind):
    assert kind_of(job, has_parents=has_parents) == kind
    assert kind in ADAPTATION_KINDS


def test_all_that_a_model_comes_from_are_its_parents():
    distilled = replace(PLAIN, base="student", features=(AdaptationSpec(kind="distilled", teacher="big"),))
    assert family(student="models:/n.student/1", big="models:/n.big/2").parents(distilled) == [
        "models:/n.student/1", "models:/n.big/2",
    ]  # fmt: skip
    merged = PLAIN.with_features(AdaptationSpec(kind="merged", parents=("a", "models:/b@champion", "a")))
    notes = Notes({"base:models:/b@champion": "models:/b/7"}, jobs={"a": "models:/n.a/1"})
    assert family(notes, a="").parents(merged) == ["models:/n.a/1", "models:/b/7"]
    warm = replace(PLAIN, base="models:/b@champion")
    assert family(Notes({"base:me": "models:/b/3"})).parents(warm) == ["models:/b/3"]


def test_a_student_starts_from_its_base_and_is_distilled_from_its_teacher(monkeypatch):
    monkeypatch.setattr(ancestry, "record_base", lambda _, source, *, store: f"m-{source}")
    student = replace(PLAIN, base="start", features=(AdaptationSpec(kind="distilled", teacher="big"),))
    relatives = family(start="models:/n.start/1", big="models:/n.big/2")
    assert relatives.first_weights(student) == "models:/n.start/1"
    assert relatives.first_weights(replace(student, base="big")) is None
    assert relatives.first_weights(replace(student, base=None)) is None
    assert relatives.first_weights(replace(PLAIN, base="start")) is None
    loaded = replace(student, base=None, model=ModelSpec(from_pretrained="org/small"))
    assert relatives.first_weights(loaded) == "m-org/small"


def test_the_teacher_of_a_loss_is_a_parent(monkeypatch):
    monkeypatch.setattr(ancestry, "record_base", lambda _, source, *, store: f"m-{source}")
    of_job = replace(PLAIN, base="start", features=(LossTeacher(job="big", model=PLAIN.model),))
    relatives = family(start="models:/n.start/1", big="models:/n.big/2")
    assert relatives.parents(of_job) == ["models:/n.start/1", "models:/n.big/2"]
    assert relatives.first_weights(of_job) == "models:/n.start/1"
    pretrained = LossTeacher(model=ModelSpec(from_pretrained="org/big"))
    loaded = replace(PLAIN, model=ModelSpec(from_pretrained="org/small"), features=(pretrained,))
    assert relatives.parents(loaded) == ["m-org/small", "m-org/big"]
    assert relatives.first_weights(loaded) == "m-org/small"
    assert kind_of(loaded, has_parents=True) == "distilled"


def test_the_model_that_the_weights_are_from_comes_first(monkeypatch):
    monkeypatch.setattr(ancestry, "record_base", lambda _, source, *, store: f"m-{source}")
    start = WarmStart(checkpoints="before", step=3)
    data = DataSpec(path="rows", options={"retriever": {"store": "index"}})
    part = replace(PLAIN, model=ModelSpec(from_pretrained="org/base"), data=data, features=(start,))
    relatives = family(before="models:/before/1", index="models:/index/1", big="models:/big/1")
    assert relatives.parents(part) == ["m-org/base", "models:/before/1", "models:/index/1"]
    assert relatives.parents(replace(part, model=PLAIN.model)) == ["models:/before/1", "models:/index/1"]
    student = replace(PLAIN, model=part.model, features=(AdaptationSpec(kind="distilled", teacher="big"),))
    assert relatives.parents(student) == ["m-org/base", "models:/big/1"]


def test_an_adapter_that_continues_another_is_on_the_same_model_as_that_one():
    dpo = replace(PLAIN, base="models:/sft/1", adapter=Adapter(base_adapter="continue"))
    relatives = family()
    sft = ModelRecord(model_id="m-sft", registered_name="sft", version=1, uri="models:/sft/1", parents=("m-base",))
    relatives.ledger.resolve_model = {sft.uri: sft}.__getitem__
    assert relatives.parents(dpo) == ["m-base", "models:/sft/1"]


def test_the_store_that_is_read_is_named_among_the_parents():
    job = replace(PLAIN, data=DataSpec(path="rows", options={"retriever": {"store": "/cache/m-1"}}))
    assert family(Notes({"store:/cache/m-1": "models:/wiki/3"})).named_parents(job) == {"/cache/m-1": "models:/wiki/3"}


def clone_of(job, step):
    return JobRecord(name="clone", variation=Variation(job=job, step=step))


def test_a_warm_clone_and_its_clones_come_from_their_source():
    journal = Notes()
    known = {"a": JobRecord(name="a"), "me": clone_of("a", 3), "cold": clone_of("me", None)}
    journal.jobs = lambda: known
    warm = PLAIN.with_features(WarmStart(checkpoints="/run/checkpoints/me/start", step=3))
    assert family(journal).parents(warm) == []  # it has ended before its source
    known["a"] = JobRecord(name="a", model_uri="models:/n.a/1")
    assert family(journal).parents(warm) == ["models:/n.a/1"]
    assert family(journal).parents(replace(warm, name="cold")) == ["models:/n.a/1"]
    assert family(journal).parents(replace(PLAIN, name="cold")) == []
    assert family(journal).continued_job("a") is None


def test_a_job_that_goes_on_from_checkpoints_comes_from_their_model(monkeypatch, tmp_path):
    def node(id, checkpoints, **more):
        record = SimpleNamespace(run_id=f"run-{id}", origin=SimpleNamespace(checkpoints=checkpoints))
        return SimpleNamespace(**{"id": id, "record": record, "repeating_job": "", **more})

    (tmp_path / "link").symlink_to(tmp_path / "theirs", target_is_directory=True)
    theirs, url = str(tmp_path / "theirs"), "s3://bucket/theirs"
    models = [
        node("m-1", theirs), node("m-2", None), node("m-own", theirs), node("m-old", theirs, repeating_job="me"),
        node("m-url", url),
    ]  # fmt: skip
    monkeypatch.setattr(ancestry.Snapshot, "of", lambda *_, **__: SimpleNamespace(models=models))
    relatives = family(Notes({"run:me": "run-m-own"}))
    for place, parents in [(theirs, ["m-1"]), (f"{tmp_path}/link/", ["m-1"]), (f"{url}/", ["m-url"]), ("/else", [])]:
        assert relatives.parents(PLAIN.with_features(WarmStart(checkpoints=place, step=3))) == parents


def test_a_parent_that_is_not_recorded_is_told():
    with pytest.raises(LedgerError, match="its base a is not, and would be lost"):
        family(a=None).parents(replace(PLAIN, base="a"))
    with pytest.raises(LedgerError, match="its parent big is not"):
        family(big=None).parents(PLAIN.with_features(AdaptationSpec(kind="distilled", teacher="big")))


def test_what_weights_are_read_from_becomes_a_node_once(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(ancestry, "record_base", lambda _, source, *, store: asked.append(source) or f"m-{source}")
    journal = Notes()
    tuned = replace(PLAIN, model=ModelSpec(from_pretrained="org/base"), adapter=Adapter(from_pretrained="/adapters/a"))
    for _ in range(2):
        assert family(journal).parents(tuned) == ["m-org/base", "m-/adapters/a"]
    assert asked == ["org/base", "/adapters/a"]
    # The base gives the weights, so the model's own source is not a parent.
    assert family(a="models:/n.a/1").parents(replace(tuned, base="a", adapter=None)) == ["models:/n.a/1"]
    assert family(Notes()).parents(replace(PLAIN, base="/models/mine")) == ["m-/models/mine"]


@pytest.mark.parametrize("fault", [TensorStoreError("cut off"), OSError("gone"), LedgerError("wrong name")])
def test_a_base_that_cannot_be_recorded_is_told_and_loses_no_child(monkeypatch, fault):
    def record_base(*_, **__):
        raise fault

    monkeypatch.setattr(ancestry, "record_base", record_base)
    found = family(Notes())
    assert found.parents(replace(PLAIN, model=ModelSpec(from_pretrained="org/base"))) == []
    assert found.lost == {"org/base": f"org/base is not in the lineage: {fault}"}


def test_a_server_that_is_away_is_waited_for(monkeypatch):
    def record_base(*_, **__):
        raise LedgerError("away", may_pass=True)

    monkeypatch.setattr(ancestry, "record_base", record_base)
    with pytest.raises(LedgerError, match="away"):
        family(Notes()).parents(replace(PLAIN, base="/models/mine"))


def test_a_model_stands_beside_its_parents():
    def measured(model, num_bytes, batch_s, **metrics):
        return {"model": model, "weight_bytes": num_bytes, "batch_s": batch_s, "sparsity": 0.0, "metrics": metrics}

    own = measured("small", 250_000, 0.002, accuracy=0.9)
    teacher = measured("models:/big@champion", 1_000_000, 0.008, accuracy=0.95)
    assert compared_with_parents([own, teacher]).splitlines() == [
        "|  | this one | `models:/big@champion` |",
        "| --- | --- | --- |",
        "| weights | 0.25 MB | 1.00 MB (4.0 times as large) |",
        "| a batch | 2.0 ms | 8.0 ms (4.0 times as long) |",
        "| accuracy | 0.9 | 0.95 |",
    ]
    assert compared_with_parents([{**own, "sparsity": 0.5}, teacher]).splitlines()[-1] == "| zeros | 50% | 0% |"
    assert compared_with_parents([]) == compared_with_parents([own]) == ""
