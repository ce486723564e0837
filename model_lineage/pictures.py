"""SVG drawing of a model family: each model below its parents, the subject highlighted."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ringmaster.text import page_template

COLOURS = {
    "pretrained": "#5b6ee1",
    "fine-tuned": "#2b9348",
    "lora": "#0f9aa8",
    "prefix-tuned": "#0f9aa8",
    "ia3": "#0f9aa8",
    "distilled": "#b5651d",
    "pruned": "#8d6a9f",
    "quantized": "#8d6a9f",
    "merged": "#c2255c",
    "composed": "#c2255c",
    "extracted": "#2b9348",
    "indexed": "#1971c2",
    "imported": "#6c757d",
    "component": "#e09f3e",
}
CULPRIT, REACHED, SERVES = "culprit", "reached", "serves"
# For each mark on a box: its fill, and the colour of its text.
MARKS = {CULPRIT: ("#c92a2a", "#ffffff"), REACHED: ("#ffe3e3", "#c92a2a"), SERVES: ("#2b8a3e", "#ffffff")}
BOX_WIDTH, BOX_HEIGHT, GAP, RISE = 168, 46, 18, 40
MARGIN = 12
FAMILY = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{{ width }}" height="{{ height }}" \
viewBox="0 0 {{ width }} {{ height }}" font-family="sans-serif">
<rect width="{{ width }}" height="{{ height }}" fill="#ffffff"/>
{% for (x1, y1), (x2, y2) in lines %}
{% set middle = (y1 + y2) // 2 %}
<path d="M{{ x1 }} {{ y1 }} C{{ x1 }} {{ middle }} {{ x2 }} {{ middle }} {{ x2 }} {{ y2 }}" \
fill="none" stroke="#868e96"/>
{% endfor %}
{% for each, (x, y), marks in boxes %}
{% set colour = colours.get(each.kind, "#6c757d") %}
{% set second = each.kind ~ (" · " ~ each.detail if each.detail else "") %}
<g><rect x="{{ x }}" y="{{ y }}" width="{{ box[0] }}" height="{{ box[1] }}" rx="6" fill="{{ colour }}" \
fill-opacity="0.12" stroke="{{ colour }}" stroke-width="{{ 3 if each.id == focus else 1 }}"/>\
<text x="{{ x + 8 }}" y="{{ y + 19 }}" font-size="12" font-weight="{{ "bold" if each.id == focus else "normal" }}">\
{{ fitting(each.title, 24) | xml }}</text>\
<text x="{{ x + 8 }}" y="{{ y + 36 }}" font-size="11" fill="{{ colour }}">{{ fitting(second, 27) | xml }}</text>\
{% for mark, fill, text, left in marks %}\
<rect x="{{ left }}" y="{{ y - 7 }}" width="48" height="14" rx="7" fill="{{ fill }}" \
stroke="{{ text if mark == "reached" else fill }}"/>\
<text x="{{ left + 24 }}" y="{{ y + 3 }}" font-size="9" font-weight="bold" text-anchor="middle" fill="{{ text }}">\
{{ mark }}</text>\
{% endfor %}\
</g>
{% endfor %}
</svg>"""
_SWEEPS = 4  # passes of the ordering, alternately down and up


@dataclass(frozen=True, kw_only=True)
class Relative:
    """A box of the drawing.

    title: a model's name and version. detail: shown beside its kind, such as its aliases.
    serves: whether it is the champion of its name. is_culprit: whether a bisection found that a fault began with it.
    """

    id: str
    title: str
    kind: str
    detail: str = ""
    serves: bool = False
    is_culprit: bool = False


def family_svg(relatives: Sequence[Relative], edges: Iterable[tuple[str, str]], *, focus: str) -> str:
    """Draws `relatives` with a line for each (parent, child) edge between them; `focus` has a thick frame.

    Marks show the models that serve, the culprits of bisections, and the descendants of those, which the fault reached.

    A model's layer is its longest path from a root (Sugiyama et al., 1981). Each layer is ordered by the mean position
    of the neighbours.
    """
    known = {relative.id: relative for relative in relatives}
    lines = [(parent, child) for parent, child in edges if parent in known and child in known]
    rows = _rows(list(known), lines)
    width = max(len(row) for row in rows) * (BOX_WIDTH + GAP) - GAP + 2 * MARGIN
    height = len(rows) * (BOX_HEIGHT + RISE) - RISE + 2 * MARGIN
    at, reached = _places(rows, width), _reached(relatives, lines)
    return page_template(FAMILY).render(
        width=width,
        height=height,
        box=(BOX_WIDTH, BOX_HEIGHT),
        lines=[(_middle(at[parent], BOX_HEIGHT), _middle(at[child], 0)) for parent, child in lines],
        boxes=[(each, at[each.id], _marks(each, at[each.id][0], is_reached=each.id in reached)) for each in relatives],
        focus=focus,
        colours=COLOURS,
        fitting=_fitting,
    )


def _middle(place: tuple[int, int], below: int) -> tuple[int, int]:
    return place[0] + BOX_WIDTH // 2, place[1] + below


def _reached(relatives: Sequence[Relative], lines: Sequence[tuple[str, str]]) -> set[str]:
    """Returns the ids of the descendants of culprits."""
    reached: set[str] = set()
    todo = [relative.id for relative in relatives if relative.is_culprit]
    while todo:
        model = todo.pop()
        new = {child for parent, child in lines if parent == model} - reached
        reached |= new
        todo += new
    return reached


def _marks(relative: Relative, x: int, *, is_reached: bool) -> list[tuple[str, str, str, int]]:
    """Returns each mark on the upper edge of a box, from the right: its text, its two colours, and its place."""
    shown = {SERVES: relative.serves, REACHED: is_reached and not relative.is_culprit, CULPRIT: relative.is_culprit}
    marks = [mark for mark, is_shown in shown.items() if is_shown]
    return [(mark, *MARKS[mark], x + BOX_WIDTH - 6 - (i + 1) * 52) for i, mark in enumerate(marks)]


def _rows(ids: Sequence[str], lines: Sequence[tuple[str, str]]) -> list[list[str]]:
    """Returns the ids by layer, from the roots down, each layer from left to right."""
    parents: dict[str, list[str]] = {id: [] for id in ids}
    children: dict[str, list[str]] = {id: [] for id in ids}
    for parent, child in lines:
        parents[child].append(parent)
        children[parent].append(child)
    depth = _depths(parents)
    rows: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
    for id in ids:
        rows[depth[id]].append(id)
    for sweep in range(_SWEEPS):
        neighbours = parents if sweep % 2 == 0 else children
        place = {id: i / len(row) for row in rows for i, id in enumerate(row)}
        for row in rows if sweep % 2 == 0 else reversed(rows):
            row.sort(key=lambda id: _mean([place[other] for other in neighbours[id]], place[id]))
            place |= {id: i / len(row) for i, id in enumerate(row)}
    return rows


def _depths(parents: Mapping[str, Sequence[str]]) -> dict[str, int]:
    depth: dict[str, int] = {}
    left = dict(parents)
    while left:
        free = [id for id, above in left.items() if all(each in depth for each in above)]
        for id in free or list(left)[:1]:  # damaged records may have a cycle, and are drawn too
            depth[id] = max((depth[each] + 1 for each in left.pop(id) if each in depth), default=0)
    return depth


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _places(rows: Sequence[Sequence[str]], width: int) -> dict[str, tuple[int, int]]:
    """Returns the upper left corner of each box; rows are centred."""
    at: dict[str, tuple[int, int]] = {}
    for depth, row in enumerate(rows):
        left = (width - len(row) * (BOX_WIDTH + GAP) + GAP) // 2
        for i, id in enumerate(row):
            at[id] = (left + i * (BOX_WIDTH + GAP), MARGIN + depth * (BOX_HEIGHT + RISE))
    return at


def _fitting(text: str, most: int) -> str:
    """Shortens `text` in the middle if it is too long: names differ at their beginnings and ends."""
    if len(text) <= most:
        return text
    head = (most - 1) * 2 // 3
    return f"{text[:head]}…{text[head + 1 - most :]}"
