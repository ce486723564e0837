"""The data that `ringmaster evaluate --data` names."""

from ringmaster.flows.retraining.examine import data_spec


def test_data_has_no_options_but_those_that_are_given(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "one"}\n')
    assert data_spec(str(file)).options == {}
    assert data_spec(f"{{path: {file}, text_column: body}}").options == {"text_column": "body"}
