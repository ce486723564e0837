r"""Foreign text: what a job, a file, a checkpoint or a server says, for terminals, pages, pictures and databases.

Foreign text is never markup. A control character can clear a terminal, set its title, or hide and reorder what is
after it; databases and encodings refuse NUL and halves of surrogate pairs. Such characters are written as escapes, for
example `\x1b`, so that a reader sees them, and whatever is visible stays as it is.

Apply `printable` where foreign text enters a line, as often as is convenient: it leaves its own output alone. Apply
`markdown`, `code_span` and `xml` once, where a page or picture is written.
"""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

if TYPE_CHECKING:
    from jinja2 import Template

Notice = Callable[[str], None]
"""Shows a line of progress to a person; it may be called from any thread."""

MAX_CHARACTERS = 4_000
"""Most characters of a line of foreign text."""

MAX_IN_LINES = 20_000
"""Most characters of foreign text that keeps its lines."""

MAX_IN_NAME = 250
"""Most characters of a name, which becomes part of file names and of MLflow's keys."""

SHORT = 200  # below this limit there is no room for a note about what is left out, and the end goes
TAIL_SHARE = 0.25  # of a text that is too long; the cause of an error is often at its end
JOINERS = "\u200c\u200d"  # they are invisible, but some scripts and many emoji are written with them

# Special anywhere; at the beginning; a `_` that is not inside a word; what makes a bare address a link.
MARKDOWN = re.compile(r"([\\`*{}\[\]|~$]|^(?:[-+=#]|\d+[.)])(?![\w.])|(?<!\w)_|_(?!\w))")
BARE_LINKS = re.compile(r"(?i):(?=//)|(?<=mailto):|(?<=www)\.|@")


def printable(text: str, *, limit: int = MAX_CHARACTERS) -> str:
    """Returns `text` on one line of at most `limit` characters, with escapes for all that is not visible.

    Escaped are control characters (C0, C1, DEL, line ends and tabs), bidirectional and other format characters, line
    separators, lone surrogates, and characters without a meaning. The middle of a long text is left out.
    """
    if len(text) <= limit and text.isprintable():
        return text
    return _bounded(_escaped(_ends(text, limit)), limit, length=len(text))


def message_of(error: BaseException) -> str:
    """Returns the message of an exception on one line, whatever its own code does."""
    try:
        return " ".join(str(error).split())
    except BaseException as fault:  # noqa: BLE001 - it is a user's code, and the exception itself is what matters
        return f"(its message cannot be read: {type(fault).__name__})"


def is_printable_name(name: object) -> bool:
    """Whether a name can be shown as it is: a text of visible characters, without blanks at its ends."""
    return isinstance(name, str) and 0 < len(name) <= MAX_IN_NAME and printable(name) == name == name.strip()


def printable_lines(text: str, *, limit: int = MAX_IN_LINES) -> str:
    """Returns `text` as `printable` does, but keeps its lines and tabs. A carriage return begins a line, too."""
    lines = _ends(text, limit).replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return _bounded("\n".join("\t".join(map(_escaped, line.split("\t"))) for line in lines), limit, length=len(text))


def storable_values(value: Any) -> Any:
    """Returns `value` with every text in it, in lists and mappings too, as `storable` returns it."""
    match value:
        case str():
            return storable(value)
        case dict():
            return {storable_values(key): storable_values(item) for key, item in value.items()}
        case list() | tuple() if type(value) in (list, tuple):
            return type(value)(map(storable_values, value))
    return value


def storable(text: str) -> str:
    """Returns `text` with escapes for what databases and UTF-8 refuse: NUL and lone surrogates."""
    return text if text.isprintable() else re.sub("[\x00\ud800-\udfff]", lambda match: _escape(match[0]), text)


def markdown(text: str, *, limit: int = MAX_CHARACTERS) -> str:
    """Returns foreign text for a paragraph, heading, link or table in Markdown, where it is neither markup nor HTML."""
    escaped = html.escape(MARKDOWN.sub(_with_backslash, printable(text, limit=limit).strip()), quote=False)
    return BARE_LINKS.sub(lambda match: f"&#{ord(match[0])};", escaped)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, num_figures: int = 0) -> str:
    """Returns a table of cells that are markdown. num_figures: how many of the last columns hold numbers."""
    marks = ["---"] * (len(columns) - num_figures) + ["---:"] * num_figures
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, marks, *rows))


def code_span(text: str, *, limit: int = MAX_CHARACTERS) -> str:
    """Returns foreign text as code in Markdown; as plain text if code could not hold it."""
    shown = printable(text, limit=limit)
    return markdown(shown, limit=limit) if not shown.strip() or re.search("[`|]", shown) else f"`{shown}`"


def xml(text: str, *, limit: int = MAX_CHARACTERS) -> str:
    """Returns foreign text for the text or a quoted attribute of SVG, HTML and other XML."""
    return html.escape(printable(text, limit=limit))


@cache
def page_template(source: str) -> Template:
    """Returns a Jinja template of a page or picture.

    It has the filters `xml`, `markdown` and `code_span`, and the test `finite`.
    """
    from jinja2 import Environment, StrictUndefined

    # Pages are Markdown, SVG or GraphML: each template names the filter that escapes for its place.
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # noqa: S701
    environment.filters |= {"xml": xml, "markdown": markdown, "code_span": code_span}
    environment.tests["finite"] = lambda value: value is not None and math.isfinite(value)
    return environment.from_string(source)


def _ends(text: str, limit: int) -> str:
    """Returns the parts of a long text that can be shown, so that the rest is not escaped in vain."""
    return text if len(text) <= 2 * limit else text[:limit] + text[-limit:]


def _bounded(text: str, limit: int, *, length: int) -> str:
    if len(text) <= limit:
        return text
    if limit < SHORT:
        return f"{text[: limit - 1]}…"
    note = f" … ({length:,} characters in all) … "
    num_last = int(limit * TAIL_SHARE)
    return text[: limit - num_last - len(note)] + note + text[len(text) - num_last :]


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in JOINERS or unicodedata.category(c) == "Zs" else _escape(c) for c in text
    )


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _with_backslash(match: re.Match[str]) -> str:
    return f"{match[0][:-1]}\\{match[0][-1]}"


MAX_FAULTS = 50


def first_of(faults: Sequence[object], *, most: int = MAX_FAULTS) -> list[str]:
    """Returns the first `most` faults as text, followed by how many more there are."""
    lines = [str(fault) for fault in faults[:most]]
    num_more = len(faults) - len(lines)
    return [*lines, f"and {num_more:,} more"] if num_more else lines


def join_limited(faults: Sequence[object], *, between: str = "\n", most: int = MAX_FAULTS) -> str:
    """Joins what `first_of` returns."""
    return between.join(first_of(faults, most=most))


def enumerated(names: Sequence[str], *, most: int = 8) -> str:
    """Returns the first names in one sentence, followed by how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def redacted(uri: str) -> str:
    """Returns `uri` with any password in it masked."""
    parts = urlsplit(uri)
    if parts.password is None:
        return uri
    user, host = parts.username or "", parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{user}:***@{host}"))


def shortened(text: str, most: int) -> str:
    """Returns `text`, cut to `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
