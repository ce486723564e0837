"""What coding agents read, llms.txt and the skill, is made from the documentation as it is."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from ringmaster.tasks.batch import parse_batch
from tests.unit.flows.test_command_tree import COMMANDS

DOCS = Path(__file__).parents[3] / "docs"
LLMS, SKILL = (DOCS / "llms.txt").read_text(), (DOCS / "skill" / "SKILL.md").read_text()
LISTED = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", LLMS, re.MULTILINE)


def made() -> dict[str, str]:
    """What the build of the site writes."""
    spec = importlib.util.spec_from_file_location("agent_files", DOCS / "agent_files.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.files()


@pytest.mark.parametrize("name", made())
def test_a_file_is_what_the_pages_say(name):
    assert (DOCS / name).read_text() == made()[name], "make it anew: python docs/agent_files.py"


def test_llms_txt_has_the_format_of_llmstxt_org():
    """A heading, a summary as a quotation, text, and sections that are lists of links."""
    title, summary, advice, *sections = re.split(r"\n\n(?=>|Before|## )", LLMS.strip())
    assert title == "# Ringmaster"
    assert summary.startswith("> ") and not advice.startswith("#")
    for section in sections:
        heading, _, lines = section.partition("\n\n")
        assert re.fullmatch(r"## \w+", heading)
        assert all(re.fullmatch(r"- \[[^\]]+\]\(\S+\)(: .+)?", line) for line in lines.split("\n"))
    assert sections[-1].startswith("## Optional\n")


def test_llms_txt_lists_every_page_once():
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {"index.md", "skill/SKILL.md"}
    assert sorted(LISTED) == sorted(pages)


def test_the_skill_has_a_name_a_description_and_text():
    _, front, text = SKILL.split("---\n", maxsplit=2)
    about = yaml.safe_load(front)
    assert re.fullmatch(r"[a-z0-9-]{1,64}", about["name"])
    assert 0 < len(about["description"]) <= 1024
    assert len(SKILL.split()) < 4000
    assert "](" not in text, "a copy elsewhere has no neighbouring pages"


def test_the_skill_names_every_command():
    for name in COMMANDS:
        assert f"`ringmaster {name}" in SKILL


def test_the_batch_file_of_the_skill_is_right(tmp_path):
    (text,) = re.findall(r"^```yaml\n(.*?)^```", SKILL, re.MULTILINE | re.DOTALL)
    assert len(parse_batch(text, folder=tmp_path, name="SKILL.md").jobs) > 1
