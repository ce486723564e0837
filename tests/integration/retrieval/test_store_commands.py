"""The commands of knowledge stores, and what the lineage says of their passages."""

import json
import sys

import pytest
from typer.testing import CliRunner

from ringmaster.errors import InputError
from ringmaster.features.stores.job import StoreSettings
from ringmaster.features.stores.knowledge_store import Passage
from ringmaster.flows import cli
from ringmaster.model_lineage import Ledger
from ringmaster.model_lineage.tensors import TensorStore
from tests.integration.lineage.family import in_home
from tests.unit.retrieval.encoders import build_store, save_encoder

TEXTS = {"berlin": "city1 river1", "paris": "city2 river2", "rome#0": "city3 river3", "rome#1": "color3"}


def call(*arguments):
    done = CliRunner().invoke(cli.app, [*map(str, arguments), "--json"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def home(tmp_path):
    """A home with a store, the first version of `wiki`, and with a model that reads it."""
    folder = tmp_path / "home"
    folder.mkdir()
    encoder = save_encoder(tmp_path / "encoder")
    passages = [Passage(*each) for each in TEXTS.items()]
    settings = StoreSettings(max_length=32, words=2)
    store = build_store(tmp_path / "store", passages=passages, encoder=encoder, settings=settings)
    ledger = Ledger(f"sqlite:///{folder}/mlflow.db", artifact_root=folder / "mlartifacts")
    batch = ledger.start_batch("night", batch="night", params={})
    wiki = ledger.record_model(
        "wiki", run_id=ledger.start_job(batch, "wiki", params={}), folder=store.folder, kind="indexed"
    )
    ledger.keep_tensors(wiki, store.folder, store=TensorStore(folder / "tensors"))
    ledger.record_model(
        "reader",
        run_id=ledger.start_job(batch, "reader", params={}),
        folder=encoder,
        kind="fine-tuned",
        parents=[wiki.uri],
    )
    with in_home(folder):
        yield folder


def found(store, text):
    return [each["id"] for each in call("store", "search", store, text, "-k", 9)["passages"]]


def labels(what):
    return [each["label"] for each in call("lineage", "impact", what)["models"]]


def test_an_update_is_a_version_that_old_ones_and_readers_do_not_notice(home, tmp_path):
    (tmp_path / "new.jsonl").write_text('{"id": "paris", "text": "city2 color9"}\n{"id": "oslo", "text": "city9"}\n')
    said = call("store", "update", "wiki", "--data", tmp_path / "new.jsonl", "--remove", "rome")
    assert {key: said[key] for key in ("store", "num_removed", "num_added", "num_passages")} == {
        "store": "wiki/2", "num_removed": 3, "num_added": 2, "num_passages": 3,
    }  # fmt: skip
    assert found("wiki/2", "city2 color9")[0] == "paris"
    assert found(tmp_path / "store", "city2 color9") == found("wiki/1", "city2 color9")
    assert sorted(found("wiki/2", "city3")) == ["berlin", "oslo", "paris"]
    assert sorted(found("wiki/1", "city3")) == sorted(TEXTS)
    assert call("lineage", "show", "wiki/2")["model"]["parents"] == [call("lineage", "show", "wiki/1")["model"]["id"]]
    assert labels("rome#0") == ["wiki/1", "reader/1"]
    assert labels("city2 river2") == ["wiki/1", "reader/1"]
    assert labels("oslo") == ["wiki/2"]
    assert labels("berlin") == ["wiki/1", "wiki/2", "reader/1"]


# Stores are models of a lineage, which test_bisect.py searches.
@pytest.mark.full
def test_bisect_finds_the_version_with_a_wrong_passage(home, tmp_path):
    for number, name in enumerate(["oslo", "wrong", "lima"]):
        (tmp_path / "new.jsonl").write_text(json.dumps({"id": name, "text": f"city1{number}"}) + "\n")
        call("store", "update", f"wiki/{number + 1}", "--data", tmp_path / "new.jsonl")
    (tmp_path / "check.py").write_text(
        "import sys, pyarrow as pa\n"
        "table = pa.ipc.open_stream(open(sys.argv[1] + '/passages.arrow', 'rb').read()).read_all()\n"
        "sys.exit('wrong' in table['id'].to_pylist())\n"
    )
    (culprit,) = call("lineage", "bisect", "wiki/4", "--test", f"{sys.executable} {tmp_path / 'check.py'}")["culprits"]
    assert (culprit["child"], culprit["parents"]) == ("wiki/3", ["wiki/2"])


def test_wrong_requests_are_refused(home):
    with pytest.raises(InputError, match="no passage 'tokyo'"):
        call("store", "update", "wiki", "--remove", "tokyo")
    with pytest.raises(InputError, match="reader/1 is not a knowledge store"):
        call("store", "search", "reader", "city1")
    with pytest.raises(InputError, match="no model 'tokyo'"):
        call("lineage", "impact", "tokyo")
