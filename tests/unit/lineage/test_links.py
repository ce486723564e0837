from hypothesis import given
from hypothesis import strategies as st

from model_lineage import links


def test_paths_are_those_of_the_ui():
    assert links.run_path("1", "abc").startswith("#/experiments/1/runs/abc?")
    assert links.model_version_path("llama-lr0.001", 3).startswith("#/models/llama-lr0.001/versions/3?")
    assert links.logged_model_path("1", "m-1").startswith("#/experiments/1/models/m-1?")
    assert links.artifact_path("1", "abc", "plan/a b.svg").startswith(
        "#/experiments/1/runs/abc/artifacts/plan/a%20b.svg?"
    )


def test_names_cannot_break_out_of_a_link():
    assert links.link("a](http://evil)", links.model_version_path("x/..)", 1)) == (
        "[a\\](http://evil)](#/models/x%2F..%29/versions/1?workflowType=machine_learning)"
    )


def test_children_replace_the_children_that_stood_there():
    first = links.with_children("A model.", ["one"])
    assert links.with_children(first, ["two", "three"]) == links.with_children("A model.", ["two", "three"])
    assert links.with_children(first, []) == "A model."


def test_what_a_person_wrote_above_the_children_stays():
    text = links.with_children("A model.", ["one"]).replace("A model.", "A model.\n\nDo not use!")
    assert "Do not use!" in links.with_children(text, ["one", "two"])


@given(st.integers(0, 6000), st.lists(st.text("abc", min_size=1, max_size=200), max_size=80))
def test_a_description_fits_and_accounts_for_every_child(length, children):
    text = links.with_children("x" * length, children)
    assert len(text) <= links.DESCRIPTION_LIMIT
    lines = [line for line in text.splitlines() if line.startswith("- ")]
    left_out = int(lines.pop().split()[2]) if lines and lines[-1].startswith("- and ") else 0
    assert len(lines) + left_out == len(children)
