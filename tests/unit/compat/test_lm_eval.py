"""The private names of the LM Evaluation Harness that `ringmaster.compat.lm_eval` gives do what is relied on."""

from pathlib import Path

from ringmaster.compat.lm_eval import task_config


def test_a_task_is_read_with_what_it_includes_and_its_functions(tmp_path: Path):
    (tmp_path / "functions.py").write_text("def upper(doc):\n    return doc['text'].upper()\n")
    (tmp_path / "shared.yaml").write_text("output_type: generate_until\ndataset_path: json\n")
    file = tmp_path / "own.yaml"
    file.write_text("include: shared.yaml\ntask: own\ndoc_to_text: !function functions.upper\n")
    config = task_config(file)
    assert {key: config[key] for key in ("task", "dataset_path")} == {"task": "own", "dataset_path": "json"}
    assert config["doc_to_text"]({"text": "a"}) == "A"
