"""The lineage commands that query: their answers and exit codes."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import yaml

from tests.integration.lineage.family import answer, run

GRAPHML = "{http://graphml.graphdrawing.org/xmlns}"
pytestmark = pytest.mark.usefixtures("family_home")


def labels(nodes):
    return [node["label"] for node in nodes]


def test_show_tells_ancestors_descendants_data_and_aliases():
    code, output, _ = run("show", "tuned")
    assert code == 0
    for line in ("tuned/1  lora", "came from (2)", "└── spoilt/1  fine-tuned on spam", "└── base/1  pretrained on web"):
        assert line in output
    assert "├── small/1 @champion  distilled on reviews" in output or "└── small/1 @champion" in output
    said = answer("show", "models:/tuned/1")
    assert labels(said["ancestors"]) == ["spoilt/1", "base/1"]
    assert sorted(labels(said["descendants"])) == ["merged/1", "small/1"]
    assert said["model"]["origin"] == {"job": "tuned", "seed": 3, "code_version": "git abc"}


def test_show_of_a_component_tells_who_has_it():
    component = answer("show", "merged")["components"][0]
    code, output, _ = run("show", component)
    assert code == 0 and "part of" in output and "merged/1" in output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("show", "tunde"), "Did you mean tuned"),
        (("show", "tuned/7"), "tuned has no '7'. There are tuned/1"),
        (("impact", "spm"), "no model was trained on data of that name or digest. Did you mean spam?"),
        (("impact", "tuned", "--data"), "no model was trained on data 'tuned'"),
        (("diff", "tuned", "nobody"), "no model 'nobody'"),
        (("bisect", "tuned", "--test", " "), "the test is empty"),
        (("bisect", "tuned", "--test", "accuracy>0.5"), "has no metric 'accuracy'. It has loss"),
        (("bisect", "clean", "--test", "loss<2"), "clean/1 passes the test"),
        (("export", "--format", "cards"), "there are 6 cards"),
        (("gc", "--yes", "--dry-run"), "give one of them"),
        (("import", "/nowhere", "--name", "a/b"), "cannot be called 'a/b'"),
    ],
)
def test_a_fault_in_the_input_ends_with_2_and_says_what_to_do(arguments, told):
    code, output, said = run(*arguments)
    assert (code, output) == (2, "")
    assert told in said


def test_impact_of_a_poisoned_data_set_names_what_is_in_production():
    said = answer("impact", "spam")
    assert labels(said["models"])[0] == "spoilt/1"
    assert sorted(labels(said["models"])) == ["merged/1", "small/1", "spoilt/1", "tuned/1"]
    assert said["in_production"] == ["small/1"]
    assert answer("impact", "digest-of-spam")["models"] == said["models"]
    code, output, _ = run("impact", "spoilt")
    assert code == 0 and "reached 3 models. In production (champion): small/1" in output
    assert answer("impact", "base", "--alias", "previous")["in_production"] == []


def test_diff_tells_which_tensors_changed_and_what_is_recorded_differently():
    said = answer("diff", "tuned", "small")
    assert {change["name"]: change["what"] for change in said["tensors"]} == {"stem.w": "same", "head.w": "changed"}
    (head,) = [change for change in said["tensors"] if change["what"] == "changed"]
    assert 0.02 < head["relative_l2"] < 0.2 and head["share"] == 1.0
    assert said["records"]["hyperparameters"] == {"lr": ["0.4", "0.5"]}
    assert "data" not in said["records"]
    code, output, _ = run("diff", "base", "small")  # from files and from the store
    assert code == 0 and "tensors: 1 changed, 1 same" in output and "digest-of-web" in output


def test_export_writes_what_others_read(tmp_path):
    code, output, _ = run("export")
    graph = json.loads(output)
    assert code == 0 and len(graph["edges"]) >= 6
    edge = next(edge for edge in graph["edges"] if edge["kind"] == "lora")
    nodes = {node["id"]: node["label"] for node in graph["nodes"]}
    assert (nodes[edge["parent"]], nodes[edge["child"]]) == ("spoilt/1", "tuned/1")

    assert run("export", "clean", "--format", "graphml", "-o", tmp_path / "g.graphml")[0] == 0
    root = ElementTree.parse(tmp_path / "g.graphml").getroot()
    assert len(root.findall(f".//{GRAPHML}node")) == 3  # base, clean, merged
    ids = {node.get("id") for node in root.iter(f"{GRAPHML}node")}
    assert all(edge.get("target") in ids and edge.get("source") in ids for edge in root.iter(f"{GRAPHML}edge"))

    assert run("export", "--format", "cards", "-o", tmp_path / "cards")[0] == 0
    card = yaml.safe_load((tmp_path / "cards" / "tuned" / "1" / "README.md").read_text().split("---")[1])
    assert (card["base_model"], card["base_model_relation"]) == ("spoilt", "adapter")


def test_export_draws_a_family(tmp_path):
    assert run("export", "tuned", "--format", "svg", "-o", tmp_path / "family.svg")[0] == 0
    root = ElementTree.parse(tmp_path / "family.svg").getroot()
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"base v1", "spoilt v1", "tuned v1", "small v1", "merged v1"} <= set(words)
    assert "clean v1" not in words  # neither an ancestor nor a descendant of `tuned`
    assert {"distilled", "champion"} <= set(words)


QUESTIONS = [["show", "small"], ["impact", "spam"], ["export"], ["diff", "tuned", "small"]]
IMPORTED = f"""
import sys
from typer.testing import CliRunner
from ringmaster.flows import cli

for words in {QUESTIONS}:
    done = CliRunner().invoke(cli.app, ["lineage", *words])
    assert done.exit_code == 0, done.exception
    print(*({{"torch", "transformers", "mlflow", "prefect"}} & set(sys.modules)), end="")
"""


def test_questions_need_neither_torch_nor_mlflow():
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_an_empty_home_says_that_there_are_none(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGMASTER_HOME", str(tmp_path / "fresh"))
    code, _, said = run("show", "anything")
    assert code == 2 and "There are none yet" in said
    assert not (tmp_path / "fresh" / "mlflow.db").exists()
