"""Foreign text for terminals, databases, pages and pictures."""

import unicodedata
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmaster.features.diagnosis.bundle import BundleFile, collect
from ringmaster.model_lineage.mlflow_calls import RetryingClient
from ringmaster.text import MAX_CHARACTERS, code_span, markdown, printable, printable_lines, storable, xml

ANY_TEXT = st.text(st.characters() | st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp"]))
HARMFUL = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0), 0x200E, 0x200F, *range(0x202A, 0x202F)]))
HARMFUL += "".join(map(chr, [*range(0x2066, 0x206A), 0x2028, 0x2029, 0x061C, 0xFEFF, 0xD800, 0xDFFF, 0xFFFE, 0xFFFF]))


@pytest.mark.parametrize("character", HARMFUL, ids=lambda c: f"U+{ord(c):04X}")
def test_what_is_not_visible_is_escaped(character: str):
    shown = printable(f"a{character}b")
    assert shown.startswith("a\\") and shown.endswith("b") and shown.isprintable()


@pytest.mark.parametrize(
    "text", ["[bold]x[/]", "grün", "日本\u3000語", "1\u00a0000", "👩‍👩‍👧", "می‌خواهم", "C:\\new", "a;b|c"]
)
def test_what_is_visible_stays(text: str):
    assert printable(text) == text


def test_a_long_text_keeps_its_ends_within_the_limit():
    shown = printable("first " + 100_000 * "x" + " last")
    assert len(shown) == MAX_CHARACTERS
    assert shown.startswith("first x") and shown.endswith("x last")
    assert "(100,011 characters in all)" in shown
    assert printable("a" * 50, limit=10) == "aaaaaaaaa…"
    assert len(printable("\x1b" * 100_000)) == MAX_CHARACTERS


@given(ANY_TEXT, st.integers(1, 200))
def test_printing_twice_is_printing_once(text: str, limit: int):
    once, lines = printable(text, limit=limit), printable_lines(text, limit=limit)
    assert printable(once, limit=limit) == once
    assert printable_lines(lines, limit=limit) == lines
    assert max(len(once), len(lines)) <= limit


@given(ANY_TEXT)
def test_no_control_character_is_left(text: str):
    for shown in (printable(text), printable_lines(text).replace("\n", "").replace("\t", "")):
        categories = {unicodedata.category(c) for c in shown.replace("\u200c", "").replace("\u200d", "")}
        assert not categories & {"Cc", "Cf", "Cs", "Zl", "Zp", "Cn"}
        shown.encode()


@given(ANY_TEXT)
def test_visible_text_is_printed_whole(text: str):
    for part in "".join(c if c.isprintable() else "\n" for c in text).split("\n"):
        assert part in printable(text)


def test_lines_are_kept():
    assert printable_lines("a\tb\r\nc\rd\x1be\n") == "a\tb\nc\nd\\x1be\n"


@given(ANY_TEXT)
def test_stored_text_has_neither_nul_nor_surrogates(text: str):
    assert "\0" not in storable(text)
    storable(text).encode()


def test_stored_text_keeps_the_rest():
    assert storable("a\x1b\n\0\ud800") == "a\x1b\n\\x00\\ud800"


@given(ANY_TEXT)
def test_xml_is_well_formed_and_shows_the_text(text: str):
    root = ElementTree.fromstring(f'<a b="{xml(text)}">{xml(text)}</a>')
    assert (root.text or "") == root.get("b") == printable(text)


HOSTILE = "[a](http://x) <img src=x onerror=y> |c|\n# h\n- www.a.b me@b.c `d` *e* _f_ ~~g~~ $h$ \\"


def rendered(text: str):
    from markdown_it import MarkdownIt

    return MarkdownIt("gfm-like", {"linkify": False}).parse(
        f"| a | b |\n| --- | --- |\n| {text} | end |\n\n{text}\n\n# {text}"
    )


@pytest.mark.parametrize(
    "text", [HOSTILE, "- a", "1. a", "# a", "+ a", "=== a", "    a", "> a", "1) a", "***", "&lt;b&gt;"]
)
@pytest.mark.parametrize("escape", [markdown, code_span])
def test_text_on_a_page_is_no_markup(escape, text: str):
    tokens = rendered(escape(text))
    kinds = {child.type for token in tokens for child in token.children or []}
    assert kinds <= {"text", "text_special", "code_inline"}
    shown = ["".join(c.content for c in token.children) for token in tokens if token.children is not None]
    assert [each.strip() for each in shown] == [
        "a",
        "b",
        printable(text).strip(),
        "end",
        *2 * [printable(text).strip()],
    ]
    assert "http:" not in escape(text) or escape is code_span


@pytest.mark.parametrize(
    "text", ["acc_top5 0.975", "-1.5", "1.5 s", "7.2.1", "#7", "a-b", "node-0:1", "x=1", "loss (nll)!"]
)
def test_usual_text_on_a_page_needs_no_escapes(text: str):
    assert markdown(text) == text


def test_whatever_goes_to_mlflow_and_into_a_bundle_can_be_written(tmp_path):
    class Client:
        def set_tag(self, *said, **more):
            return said, more

    said, more = RetryingClient(Client(), tracking_uri="sqlite:///x").set_tag(
        "a\0", {"\ud800": ["\0"]}, value=("b\0", 3)
    )
    assert (said, more) == (("a\\x00", {"\\ud800": ["\\x00"]}), {"value": ("b\\x00", 3)})
    log = BundleFile(name="worker.log", text="\ud800\x1b[2J\n\tb")
    bundle = collect({"logs": lambda: [log]}, redact=str)
    bundle.write(tmp_path / "bundle.tar.gz")
    assert bundle.parts[0].text == "\\ud800\\x1b[2J\n\tb"
