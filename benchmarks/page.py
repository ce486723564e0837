"""The page of all figures, docs/benchmarks.md, in which each benchmark rewrites the lines between its own markers."""

from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"


def write_section(name: str, content: str | Sequence[str]) -> None:
    """Writes a text, or lines, between the two markers of this name.

    Raises ValueError where the page does not have each of them once.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    page = PAGE.read_text()
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"{PAGE} does not have the markers {begin} and {end} once. To fix: write them where it goes")
    text = content if isinstance(content, str) else "\n".join(content)
    before, after = page.split(begin)[0], page.split(end)[1]
    PAGE.write_text(f"{before}{begin}\n{text.strip(chr(10))}\n{end}{after}")
