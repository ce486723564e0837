"""The search for models that have read a row: by its text, or by the columns that a job reads."""

import json
from types import SimpleNamespace

import pytest

from ringmaster.errors import InputError
from ringmaster.flows.lineage.row_readers import TracedRow, readers_of
from ringmaster.tasks.recording.rows import rows_text
from ringmaster.techniques.data.encoded_rows import RowManifest

ROW = {"text": "a good film", "label": "pos", "id": 7}


def home_of(tmp_path, *, content, columns=()):
    """A lineage home with one model that was trained on one row of that content."""
    RowManifest.of([(content, False)]).write(tmp_path)
    text = rows_text({"folder": str(tmp_path), "columns": [[name, name] for name in columns]})
    data = SimpleNamespace(rows_digest="d", context="training", label="reviews/1", split=None, window=None)
    node = SimpleNamespace(label="m/1", record=SimpleNamespace(datasets=[data], run_id="run"))
    ledger = SimpleNamespace(read_text=lambda run_id, path: text)
    return SimpleNamespace(snapshot=SimpleNamespace(models=[node]), ledger=ledger)


@pytest.fixture
def traced(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({**ROW, "text": "another"}) + "\n" + json.dumps(ROW) + "\n")
    return TracedRow.of(f"{file}:2")


def test_a_row_of_several_columns_is_found_by_those_that_were_read(tmp_path, traced):
    content = {"label": "pos", "text": "a good film"}
    found = readers_of(traced, home_of(tmp_path, content=content, columns=("label", "text")))
    assert [(reader["model"], reader["use"]) for reader in found] == [("m/1", "trained")]
    other = {"label": "neg", "text": "a good film"}
    assert readers_of(traced, home_of(tmp_path, content=other, columns=("label", "text"))) == []


def test_a_row_of_text_is_found_by_its_text(tmp_path, traced):
    home = home_of(tmp_path, content="a good film")
    assert readers_of(traced, home) == readers_of(TracedRow.of("a good film"), home) != []
    assert readers_of(TracedRow.of("a bad film"), home) == []


def test_a_row_without_the_text_column_is_refused_where_nothing_has_read_it(tmp_path, traced):
    with pytest.raises(InputError, match=r"has no text in column 'body'. To fix: name another by --text-column"):
        readers_of(traced, home_of(tmp_path, content="other"), text_column="body")
    with pytest.raises(InputError, match="holds no row"):
        TracedRow.of(traced.place.replace(":2", ":9"))
