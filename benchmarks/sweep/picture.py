"""The picture of one round of the benchmark: the best loss so far over time, and the segments of Ringmaster's run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ringmaster.tasks.planning.durations import seconds_text
from ringmaster.tasks.planning.gantt import RIGHT, TOP, WIDTH, Frame, label, legend
from ringmaster.text import xml

COLOURS = {"Ringmaster": "#c0702a", "peft, one after another": "#1f6f8b", "Ray Tune, ASHA": "#6a5a9c"}
TOGETHER, ALONE = "#f8cf7c", "#9ecae9"
SHOWN_FROM = 0.75  # of the curves' range: the loss of first evaluations is far above all that follows
ROWS = 8  # the height of the curves, in rows of devices
STYLE = (
    ".curve{fill:none;stroke-width:2.5}.end{font-size:13px;font-weight:600}"
    ".loss{font-size:11px;text-anchor:end;fill:#52616d}"
)
SIZE = re.compile(r'width="(\d+)" height="(\d+)"')


def draw(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the picture as SVG. rows: the results of one round, of all contenders."""
    ours = next(row for row in rows if row["who"] == "Ringmaster")
    return stacked([curves(rows), segments(ours)])


def curves(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draws the best loss so far of each contender over the seconds of its command."""
    frame = Frame([("", ROWS)], end_s=max(row["seconds"] for row in rows) * 1.12)
    best = {row["who"]: list(best_so_far(row)) for row in rows}
    ends = [points[-1][1] for points in best.values()]
    firsts = [points[0][1] for points in best.values()]
    low = min(ends)
    high = low + max(max(firsts) - low, 0.01) * SHOWN_FROM
    low -= (high - low) * 0.2  # space for the words below the curves' ends
    bottom = frame.height - 44

    def y(loss: float) -> float:
        return bottom - (min(loss, high) - low) / (high - low) * (bottom - TOP)

    ours_s = next(row["seconds"] for row in rows if row["who"] == "Ringmaster")
    said = [
        f"{row['who']}: {seconds_text(row['seconds'], like=100)}"
        + ("" if row["who"] == "Ringmaster" else f", {row['seconds'] / ours_s:.1f} times as long")
        for row in rows
    ]
    parts = [
        frame.head("A sweep of adapters: the best loss on held-out data so far", said, style=STYLE).replace(
            "Gantt chart of ", "", 1
        ),
        legend({row["who"]: COLOURS[row["who"]] for row in rows}),
        frame.axis(),
    ]
    for i in range(5):
        loss = low + (high - low) * i / 4
        parts.append(
            f'<line x1="{frame.x(0):.1f}" y1="{y(loss):.1f}" x2="{WIDTH - RIGHT}" y2="{y(loss):.1f}" class="grid"/>'
        )
        parts.append(f'<text x="{frame.x(0) - 8:.1f}" y="{y(loss) + 4:.1f}" class="loss">{loss:.2f}</text>')
    ends: list[tuple[float, float]] = []  # of the labels so far
    for row in rows:
        points, colour = best[row["who"]], COLOURS[row["who"]]
        path = f"M{frame.x(points[0][0]):.1f} {y(points[0][1]):.1f}"
        path += "".join(f"H{frame.x(at):.1f}V{y(loss):.1f}" for at, loss in points[1:])
        end, loss = frame.x(row["seconds"]), points[-1][1]
        parts.append(f'<path d="{path}H{end:.1f}" class="curve" stroke="{colour}"/>')
        parts.append(f'<circle cx="{end:.1f}" cy="{y(loss):.1f}" r="4.5" fill="{colour}"/>')
        words = f"{row['seconds']:.0f} s: {loss:.3f}"
        below = y(loss) + 20 + 16 * sum(abs(end - x) < 80 and abs(y(loss) - at) < 16 for x, at in ends)
        ends.append((end, y(loss)))
        place = f'x="{end - 4:.1f}" y="{below:.1f}" style="fill:{colour}"'
        parts.append(f'<text {place} class="end">{xml(words)}</text>')
    return "\n".join([*parts, "</svg>"])


def best_so_far(row: Mapping[str, Any]) -> Iterator[tuple[float, float]]:
    """Yields the time and the loss of each evaluation that is better than all before it."""
    best = float("inf")
    for each in sorted(row["evaluations"], key=lambda each: each["at"]):
        if each["loss"] < best:
            best = each["loss"]
            yield each["at"], best


def segments(ours: Mapping[str, Any]) -> str:
    """Draws the segments of Ringmaster's run by device, on an axis of its own."""
    devices = sorted({tuple(device) for span in ours["spans"] for device in span["devices"]})
    nodes = {node: 1 + max(number for name, number in devices if name == node) for node, _ in devices}
    frame = Frame(list(nodes.items()), end_s=ours["seconds"])
    parts = [
        frame.head("The segments of Ringmaster's run", ["a row for each core", "time from the start of the command"]),
        legend({"adapters trained together": TOGETHER, "an adapter alone": ALONE}),
        frame.axis(),
        *frame.ground(),
    ]
    for span in sorted(ours["spans"], key=lambda span: span["start_s"]):
        number = 1 + len(span["fellows"])
        gang = [tuple(device) for device in span["devices"]]
        for i, box in enumerate(frame.cells(gang, span["start_s"], span["end_s"])):
            words = f"{number} adapters" if number > 1 else span["job"]
            title = f"<title>{xml(words)}: {span['end_s'] - span['start_s']:.1f} s</title>"
            parts.append(f"<g>{title}{frame.rect(box, fill=TOGETHER if number > 1 else ALONE)}</g>")
            if i == 0:
                parts.append(label(box, words, least=5))
    return "\n".join([*parts, "</svg>"])


def stacked(pictures: Sequence[str]) -> str:
    """Stacks SVG documents of equal width, one below the other."""
    sizes = [tuple(map(int, SIZE.search(picture).groups())) for picture in pictures]
    height = sum(tall for _, tall in sizes)
    parts, y = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {sizes[0][0]} {height}">'], 0
    for picture, (_, tall) in zip(pictures, sizes, strict=True):
        parts.append(picture.replace("<svg ", f'<svg y="{y}" ', 1))
        y += tall
    return "\n".join([*parts, "</svg>\n"])
