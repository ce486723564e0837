"""The ledger's models, in a real SQLite store."""

import pytest
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from ringmaster.errors import LedgerError
from ringmaster.model_lineage import QUIET_ENVIRONMENT, DatasetInput, Ledger, model_pages
from ringmaster.model_lineage.records import CHALLENGER, Origin
from ringmaster.model_lineage.snapshot import Snapshot
from ringmaster.tasks.sweeping.results import challenge

TEXT = DatasetInput(name="stdlib", digest="d1", source="/usr/lib/python3", num_rows=90)
HELD_OUT = DatasetInput(name="stdlib", digest="d1", source="/usr/lib/python3", context="evaluation", num_rows=10)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET_ENVIRONMENT.items():
            patch.setenv(name, value)
        yield Ledger(f"sqlite:///{tmp_path_factory.mktemp('ledger')}/mlflow.db", experiment="tests")


@pytest.fixture(autouse=True)
def empty_working_folder(tmp_path, monkeypatch):
    """Asserts that no test writes MLflow's default store, which is a file in the working folder."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    yield
    assert list((tmp_path / "cwd").iterdir()) == []


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(range(256)))
    return tmp_path / "model"


@pytest.fixture
def job(ledger):
    return ledger.start_job(ledger.start_batch("tonight", params={}), "a job", params={})


def description(ledger, record):
    return ledger.client.get_model_version(record.registered_name, str(record.version)).description


def test_a_model_is_recorded_with_all_that_it_came_from(ledger, folder, job):
    record = ledger.record_model(
        "base-lr0.001",
        run_id=job,
        folder=folder,
        kind="pretrained",
        datasets=[TEXT, HELD_OUT],
        params={"optimizer": {"lr": 1e-3}},
        metrics={"loss": 1.5, "perplexity": float("inf")},
        description="A small model.",
    )
    assert (record.registered_name, record.version, record.uri) == ("base-lr0.001", 1, "models:/base-lr0.001/1")
    assert (record.kind, record.parents, record.run_id) == ("pretrained", (), job)
    assert record.datasets == (TEXT, HELD_OUT)

    model = ledger.client.get_logged_model(record.model_id)
    assert model.status == "READY"
    assert model.params == {"optimizer.lr": "0.001"}
    assert [(metric.key, metric.value) for metric in model.metrics] == [("loss", 1.5)]
    files = [file.path for file in ledger.client.list_logged_model_artifacts(record.model_id)]
    assert files == ["README.md", "config.json", "model.safetensors"]

    run = ledger.client.get_run(job)
    assert [output.model_id for output in run.outputs.model_outputs] == [record.model_id]
    assert run.inputs.model_inputs == []
    inputs = {entry.dataset.name: entry.tags[0].value for entry in run.inputs.dataset_inputs}
    assert inputs == {"stdlib (training)": "training", "stdlib (evaluation)": "evaluation"}


def test_the_version_that_a_run_has_made_outlives_the_run(ledger, folder, job, tmp_path):
    record = ledger.record_model("tonight.a", run_id=job, folder=folder, kind="pretrained")
    ledger.client.delete_run(job)
    SqlAlchemyStore(ledger.tracking_uri, str(tmp_path))._hard_delete_run(job)  # as `mlflow gc` does
    assert ledger.version_made_by(job, "tonight.a") == record.uri
    assert ledger.version_made_by(job, "tonight.b") is None
    assert ledger.resolve_model(record.uri).run_id == job


def test_a_page_links_to_parents_run_batch_and_children(ledger, folder, job):
    base = ledger.record_model("page-base", run_id=job, folder=folder, kind="pretrained")
    other_job = ledger.start_job(ledger.start_batch("b2", params={}), "tune", params={})
    child = ledger.record_model(
        "page-child", run_id=other_job, folder=folder, kind="lora", parents=[base.uri], datasets=[TEXT]
    )
    run = ledger.client.get_run(other_job)
    experiment_id, batch_id = run.info.experiment_id, run.data.tags["mlflow.parentRunId"]
    text = description(ledger, child)
    assert f"- lora from [page-base version 1]({model_pages.model_version_path('page-base', 1)})" in text
    assert f"- made by run [tune]({model_pages.run_path(experiment_id, other_job)})" in text
    assert f"- in batch [b2]({model_pages.run_path(experiment_id, batch_id)})" in text
    data = model_pages.artifact_path(experiment_id, other_job, "data.json")
    assert f"- data for training: [stdlib]({data}) (`d1`, 90 rows)" in text

    forward = f"- lora: [page-child version 1]({model_pages.model_version_path('page-child', 1)})"
    assert description(ledger, base).count(forward) == 1
    for record in (base, child):
        note = ledger.client.get_logged_model(record.model_id).tags["mlflow.note.content"]
        assert note == description(ledger, record)
    assert [entry.model_id for entry in run.inputs.model_inputs] == [base.model_id]


def test_recording_again_returns_what_there_is(ledger, folder, job):
    base = ledger.record_model("again-base", run_id=job, folder=folder, kind="pretrained")
    arguments = {"run_id": job, "folder": folder, "kind": "distilled", "parents": [base.uri], "metrics": {"loss": 1.0}}
    first = ledger.record_model("again", **arguments)
    assert ledger.record_model("again", **arguments) == first
    assert len(ledger.client.search_model_versions("name = 'again'")) == 1
    other_job = ledger.start_job(ledger.start_batch("b2", params={}), "tune", params={})
    assert ledger.record_model("again", **{**arguments, "run_id": other_job}).version == 2


def test_recording_again_adds_parents_that_could_not_be_recorded(ledger, folder, job):
    base = ledger.record_model("late-base", run_id=job, folder=folder, kind="pretrained")
    arguments = {"run_id": job, "folder": folder, "kind": "fine-tuned"}
    first = ledger.record_model("early", **arguments)
    assert first.parents == ()
    found = ledger.record_model("early", **arguments, parents=[base.uri])
    assert (found.model_id, found.version) == (first.model_id, first.version)
    assert found.parents == (base.model_id,)
    assert "early version 1" in description(ledger, base)


class Crash(Exception):
    """Simulates the death of the process."""


class Crashing:
    """A client that raises Crash at its `at`-th call (from 0)."""

    def __init__(self, client, at):
        self.client, self.left = client, at

    def __getattr__(self, name):
        self.left -= 1
        if self.left < 0:
            raise Crash
        return getattr(self.client, name)


@pytest.mark.full
def test_whatever_moment_it_died_at_recording_again_completes_it_once(ledger, folder):
    client = ledger.client
    batch = ledger.start_batch("crashes", params={})
    arguments = {"folder": folder, "kind": "fine-tuned", "datasets": [TEXT], "metrics": {"loss": 1.0}}
    num_crashes, crashed = 0, True
    while crashed:
        name = f"crash-{num_crashes}"
        base_job, job = (ledger.start_job(batch, each, params={}) for each in (f"base-{name}", name))
        base = ledger.record_model(f"base-{name}", run_id=base_job, folder=folder, kind="pretrained")
        dying = Ledger(ledger.tracking_uri, experiment=ledger.experiment)
        dying._opened = Crashing(client, num_crashes)
        try:
            dying.record_model(name, run_id=job, parents=[base.uri], **arguments)
            crashed = False
        except Crash:
            num_crashes += 1
        record = ledger.record_model(name, run_id=job, parents=[base.uri], **arguments)
        run = client.get_run(job)
        assert [output.model_id for output in run.outputs.model_outputs] == [record.model_id]
        assert len(run.inputs.dataset_inputs) == 1
        assert client.get_logged_model(record.model_id).status == "READY"
        assert [metric.value for metric in client.get_logged_model(record.model_id).metrics] == [1.0]
        assert [version.version for version in client.search_model_versions(f"name = '{name}'")] == [1]
        assert description(ledger, base).count(f"[{name} version 1]") == 1
    assert num_crashes > 10


@pytest.mark.full
def test_whatever_moment_it_died_at_a_repeated_challenge_makes_one_version(ledger, folder, job):
    num_crashes, crashed = 0, True
    while crashed:
        name = f"best-{num_crashes}"  # of a sweep; another one's would be refused
        best = {"run_id": job, "folder": folder, "kind": "pretrained", "origin": Origin(job="trial-1")}
        trial = ledger.record_model(f"{name}.trial-1", **best)
        dying = Ledger(ledger.tracking_uri, experiment=ledger.experiment)
        dying._opened = Crashing(ledger.client, num_crashes)
        try:
            challenge(dying, trial.uri, sweep=name, challenger_of="")
            crashed = False
        except Crash:
            num_crashes += 1
        again = challenge(ledger, trial.uri, sweep=name, challenger_of="")
        assert again == ledger.get_alias(name, CHALLENGER)
        assert [version.version for version in ledger.client.search_model_versions(f"name = '{name}'")] == [1]
    assert num_crashes > 5


def test_a_model_has_several_parents_and_the_graph_knows_them(ledger, folder, job, tmp_path):
    base = ledger.record_model("g-base", run_id=job, folder=folder, kind="pretrained")
    tuned = ledger.record_model("g-tuned", run_id=job, folder=folder, kind="fine-tuned", parents=[base.uri])
    merged = ledger.record_model(
        "g-merged", run_id=job, folder=folder, kind="merged", parents=[tuned.model_id, f"models:/{base.model_id}"]
    )
    graph = Snapshot.of(ledger, cache=tmp_path).graph
    assert graph.parents(merged.model_id) == (tuned.model_id, base.model_id)
    assert graph.descendants(base.model_id) == (tuned.model_id, merged.model_id)
    assert {record.model_id: record for record in ledger.models()}[merged.model_id] == merged


def test_every_way_to_name_a_model_finds_it(ledger, folder, job):
    record = ledger.record_model("named", run_id=job, folder=folder, kind="pretrained")
    assert ledger.get_alias("named", "champion") is None
    ledger.set_alias("named", "champion", 1)
    assert ledger.get_alias("named", "champion") == record
    for uri in ("models:/named@champion", "models:/named/1", f"models:/{record.model_id}", record.model_id):
        assert ledger.resolve_model(uri) == record


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("models:/nobody@champion", r"no registered model 'nobody'; there are \['named'"),
        ("models:/named@chmpion", r"no alias 'chmpion'; it has \['champion'\]"),
        ("models:/named/7", r"no version 7; it has \[1\]"),
        ("m-0123", "no model 'm-0123'"),
        ("models:/named", "'models:/named' has no alias; write models:/named/1"),
        ("nobody", "models:/NAME@ALIAS, models:/NAME/VERSION or a model id"),
        ("models:/it's@x", "no registered model"),
    ],
)
def test_an_unknown_model_is_answered_with_what_there_is(uri, told, known):
    with pytest.raises(LedgerError, match=told):
        known.resolve_model(uri)


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    place = tmp_path_factory.mktemp("known")
    (place / "model").mkdir()
    (place / "model" / "config.json").write_text("{}")
    known = Ledger(f"sqlite:///{place}/mlflow.db")
    job = known.start_batch("b", params={})
    known.record_model("named", run_id=job, folder=place / "model", kind="pretrained")
    known.set_alias("named", "champion", 1)
    return known


def test_wrong_arguments_are_refused_before_anything_is_recorded(ledger, folder, job, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(LedgerError, match="is not a kind of adaptation: use one of pretrained"):
        ledger.record_model("wrong", run_id=job, folder=folder, kind="tuned")
    with pytest.raises(LedgerError, match="holds no model"):
        ledger.record_model("wrong", run_id=job, folder=tmp_path / "empty", kind="pretrained")
    with pytest.raises(LedgerError, match="no registered model 'nobody'"):
        ledger.record_model("wrong", run_id=job, folder=folder, kind="lora", parents=["models:/nobody/1"])
    with pytest.raises(LedgerError, match="no version 3"):
        ledger.set_alias(
            ledger.record_model("right", run_id=job, folder=folder, kind="imported").registered_name, "x", 3
        )
    assert (
        ledger.client.get_run(job).outputs.model_outputs[0].model_id == ledger.resolve_model("models:/right/1").model_id
    )


def test_a_download_is_complete_and_made_once(ledger, folder, job, tmp_path):
    record = ledger.record_model("down", run_id=job, folder=folder, kind="pretrained")
    copy = ledger.download_model(record.uri, tmp_path / "models")
    assert copy == tmp_path / "models" / record.model_id
    (copy / "README.md").unlink()
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == {
        file.name: file.read_bytes() for file in folder.iterdir()
    }
    assert [path.name for path in (tmp_path / "models").iterdir()] == [record.model_id]
    (copy / "config.json").write_text("changed")
    assert (ledger.download_model(record.model_id, tmp_path / "models") / "config.json").read_text() == "changed"


def test_a_recorded_model_loads_with_its_weights(ledger, job, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes))
    model.save_pretrained(tmp_path / "llama")
    record = ledger.record_model("llama", run_id=job, folder=tmp_path / "llama", kind="pretrained")
    loaded = AutoModelForCausalLM.from_pretrained(ledger.download_model(record.uri, tmp_path / "models"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
