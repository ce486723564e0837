from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ringmaster.features.bisection.bisecting import with_culprit
from ringmaster.model_lineage import DatasetInput, ModelRecord, Origin, model_pages

BASE = ModelRecord(model_id="m-1", registered_name="base", version=4, uri="models:/base/4", experiment_id="7")
DRAFT = ModelRecord(model_id="m-2", registered_name="draft", version=None, uri="models:/m-2", experiment_id="7")
CHILD = ModelRecord(
    model_id="m-3",
    registered_name="child",
    version=None,
    uri="models:/m-3",
    kind="merged",
    datasets=(DatasetInput(name="stdlib", digest="0123456789abcdef", source="/usr/lib", num_rows=5),),
    run_id="r-3",
    experiment_id="7",
)


def test_a_card_tells_every_origin_as_a_link():
    text = model_pages.card(CHILD, text="Hello.", parents=[BASE, DRAFT], run_name="tune", batch=("tonight", "r-0"))
    assert text.splitlines() == [
        "Hello.",
        "",
        f"- merged from [base version 4]({model_pages.model_version_path('base', 4)})",
        f"- merged from [draft]({model_pages.logged_model_path('7', 'm-2')})",
        f"- made by run [tune]({model_pages.run_path('7', 'r-3')})",
        f"- in batch [tonight]({model_pages.run_path('7', 'r-0')})",
        f"- data for training: [stdlib]({model_pages.artifact_path('7', 'r-3', 'data.json')}) (`0123456789ab`, 5 rows)",
        f"- files and metrics: [m-3]({model_pages.logged_model_path('7', 'm-3')})",
        "",
        "![Its family](get-artifact?path=lineage/m-3.svg&run_uuid=r-3)",
    ]


def test_a_card_of_a_model_without_a_base_says_so():
    said = {"text": "", "parents": [], "run_name": "tune", "batch": None}
    assert model_pages.card(replace(CHILD, kind="pretrained"), **said).startswith("- trained from scratch\n")
    assert model_pages.card(replace(CHILD, kind="imported"), **said).startswith("- imported, without a base\n")


def test_a_card_says_that_a_base_was_in_4_bits_and_what_its_adapter_is_merged_into():
    origin = Origin(num_steps=3, quantized_base="nf4")
    adapter = replace(BASE, model_id="m-4", registered_name="qlora", kind="lora", origin=origin)
    said = {"text": "", "run_name": "tune", "batch": None}
    assert "- 3 steps\n- trained on its base in `nf4`\n" in model_pages.card(adapter, parents=[BASE], **said)
    first = model_pages.card(CHILD, parents=[adapter], **said).splitlines()[0]
    assert first.startswith("- merged from [qlora version 4]")
    assert first.endswith("), added to the values of its base in `nf4`")


def test_the_newest_bisection_that_found_a_model_is_the_first_line_of_its_page():
    page = model_pages.with_children("A model.\n\nDo not use!", ["one"])
    first = with_culprit(page, "loss<2")
    assert first == f"**A fault began here**, as a bisection found by the test `loss<2`.\n\n{page}"
    assert with_culprit(first, "loss<3") == first.replace("loss<2", "loss<3")
    assert len(with_culprit(page, "x" * model_pages.DESCRIPTION_LIMIT)) < len(page) + 300
    assert with_culprit("x" * model_pages.DESCRIPTION_LIMIT, "loss<2") == "x" * model_pages.DESCRIPTION_LIMIT


def test_a_long_text_leaves_room_for_the_links():
    text = model_pages.card(CHILD, text="x" * 9000, parents=[BASE], run_name="tune", batch=None)
    assert len(text) == model_pages.DESCRIPTION_LIMIT
    assert f"[m-3]({model_pages.logged_model_path('7', 'm-3')})" in text
    assert text.endswith(model_pages.picture("Its family", "r-3", "lineage/m-3.svg"))
    assert "xxx ...\n\n- merged from [base version 4]" in text


def test_children_replace_the_children_that_stood_there():
    first = model_pages.with_children("A model.", ["one"])
    assert model_pages.with_children(first, ["two", "three"]) == model_pages.with_children("A model.", ["two", "three"])
    assert model_pages.with_children(first, []) == "A model."


def test_what_a_person_wrote_above_the_children_stays():
    text = model_pages.with_children("A model.", ["one"]).replace("A model.", "A model.\n\nDo not use!")
    assert "Do not use!" in model_pages.with_children(text, ["one", "two"])


@given(st.integers(0, 6000), st.lists(st.text("abc", min_size=1, max_size=200), max_size=80))
def test_a_description_fits_and_accounts_for_every_child(length, children):
    text = model_pages.with_children("x" * length, children)
    assert len(text) <= model_pages.DESCRIPTION_LIMIT
    lines = [line for line in text.splitlines() if line.startswith("- ")]
    left_out = int(lines.pop().split()[2]) if lines and lines[-1].startswith("- and ") else 0
    assert len(lines) + left_out == len(children)
