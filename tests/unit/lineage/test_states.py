"""States, main metrics and data of models: in the lineage's texts and in its pictures."""

import io

import pytest
from rich.console import Console

from ringmaster.flows.lineage.views import impact_view, show_view
from ringmaster.model_lineage.exporting import drawing, node_json
from ringmaster.model_lineage.ledger import families
from ringmaster.model_lineage.records import DatasetInput, metric_text, states_of
from ringmaster.model_lineage.snapshot import ModelRow, Snapshot, node_of
from ringmaster.techniques.processes.gang_events import NUM_ROWS
from tests.unit.lineage.families import data, node, snapshot
from tests.unit.lineage.test_pictures import marks, texts


@pytest.mark.parametrize(
    ("aliases", "outcome", "flags", "states"),
    [
        ([], None, {}, ()),
        (["champion"], None, {}, ("champion",)),
        (["champion", "challenger"], "promoted", {}, ("champion",)),
        (["challenger"], None, {}, ("challenger",)),
        (["challenger"], "kept", {}, ("rejected",)),
        ([], "kept", {}, ("rejected",)),
        (["challenger"], "rolled back", {}, ("rolled back",)),
        (["challenger"], "waiting", {}, ("waiting",)),
        (["previous"], "promoted", {}, ("previous",)),
        ([], "promoted", {}, ()),
        (["champion"], "kept", {}, ("champion",)),  # promoted by hand
        (["champion"], "promoted", {"is_undone": True}, ("champion", "undone")),
        ([], None, {"is_ready": False}, ("failed",)),
    ],
)
def test_a_model_has_the_state_that_its_aliases_and_the_last_decision_give(aliases, outcome, flags, states):
    assert states_of(aliases=aliases, outcome=outcome, **flags) == states


def test_the_main_metric_is_the_named_one_and_says_of_how_many_rows():
    metrics = {"lm-eval/x": 0.1, "loss": 2.5, "accuracy": 0.70711}
    assert metric_text(metrics, main="accuracy", num_rows=256) == "accuracy 0.7071 of 256 rows"
    assert metric_text(metrics, main=None) == "loss 2.5"  # of a record of an earlier release
    assert metric_text({}, main="accuracy") == metric_text({}, main=None) == ""


@pytest.mark.parametrize(
    ("name", "version", "label"),
    [
        ("digits", None, "digits 05117b6f"),
        ("reviews", "3", "reviews/3 05117b6f"),
        ("org/reviews", None, "org/reviews 05117b6f"),
        ("/home/me/reviews.csv", None, "reviews.csv 05117b6f"),
        ("/home/me/reviews/*.csv", None, "reviews/*.csv 05117b6f"),
    ],
)
def test_data_is_shown_by_its_name_and_the_start_of_its_digest(name, version, label):
    assert DatasetInput(name=name, digest="05117b6f50d8", source="x", version=version).short_label == label


def family():
    """base -> good (champion), bad (rejected), lost (never completed)."""
    measured = {"metric": "accuracy 0.9 of 20 rows"}
    return snapshot(
        node("base", datasets=[data("web")]),
        replaced(node("good", "base", aliases=["champion"], datasets=[data("/x/reviews.csv")]), **measured),
        replaced(node("bad", "base", aliases=["challenger"]), outcome="kept", metric="accuracy 0.1 of 20 rows"),
        replaced(node("lost", "base"), is_ready=False),
    )


def replaced(model, **values):
    return type(model)(**{**vars(model), **values})


def text_of(view):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(view)
    return console.export_text()


def test_trees_and_tables_say_state_metric_and_data_of_each_model():
    lineage = family()
    shown = text_of(show_view(lineage, lineage.find("base")))
    assert "good/1 @champion  fine-tuned on reviews.csv digest-o  accuracy 0.9 of 20 rows" in shown
    assert "bad/1 @challenger  rejected  fine-tuned  accuracy 0.1 of 20 rows" in shown
    assert "lost/1  failed  fine-tuned" in shown
    head = text_of(show_view(lineage, lineage.find("bad")))
    assert head.startswith("bad/1  fine-tuned  @challenger  rejected") and "accuracy 0.1 of 20 rows" in head
    table = text_of(impact_view(lineage, "base", lineage.models, alias="champion"))
    assert all(state in table for state in ("champion", "rejected", "failed"))
    assert node_json(lineage.find("bad"))["states"] == ["rejected"]


def test_pictures_mark_the_states_and_have_a_line_for_metric_and_data():
    svg = drawing(family())
    assert {title: shown[-1:] for title, shown in marks(svg).items()} == {
        "base v1": ["web digest-o"],
        "good v1": ["champion"],
        "bad v1": ["rejected"],
        "lost v1": ["failed"],
    }
    assert texts(svg)["good v1"] == ["fine-tuned", "accuracy 0.9 of 20 rows", "reviews.csv digest-o", "champion"]


def test_rows_of_the_registry_become_nodes_with_metric_and_state():
    assert families.NUM_ROWS == NUM_ROWS
    tags = {
        families.KIND: "pretrained",
        families.MAIN_METRIC: "accuracy",
        families.VERSIONS: '[{"name": "shop.x", "version": "2"}, {"name": "best", "version": "1"}]',
    }
    row = ModelRow(
        model_id="m-1",
        experiment_id="1",
        name="x",
        artifact_location="",
        creation_timestamp=0,
        source_run_id=None,
        is_ready=True,
        tags=tags,
        params={NUM_ROWS: "12"},
        metrics={"loss": 1.0, "accuracy": 0.5},
    )
    found = Snapshot([node_of(row, {}, {("shop.x", 2): "kept"})]).find("best")
    assert (found.metric, found.states) == ("accuracy 0.5 of 12 rows", ("rejected",))
    assert node_of(row, {"shop.x": {"champion": 2}}, {}).states == ("champion",)
