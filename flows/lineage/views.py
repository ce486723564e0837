"""Views of the lineage for a terminal: trees, tables and sentences."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from ringmaster.flows.output import plain_table, styled
from ringmaster.model_lineage.records import COMPONENT
from ringmaster.model_lineage.snapshot import LineageNode, Snapshot
from ringmaster.model_lineage.tensors.comparison import CHANGED, SAME, TensorChange
from ringmaster.techniques.processes.gang_events import NUM_ROWS
from ringmaster.text import printable

MAX_LINES = 60  # lines of a tree that are shown


def show_view(snapshot: Snapshot, node: LineageNode, *, most: int = MAX_LINES) -> RenderableType:
    """Returns the facts about a model, above the trees of its ancestors and descendants."""
    parts: list[RenderableType] = [_heading(node), _facts(snapshot, node)]
    if node.record.kind == COMPONENT:
        below = Tree(styled("part of", "bold"))
        for user in snapshot.users(node.id):
            below.add(_line(snapshot, user.id))
        return Group(*parts, below)
    graph = snapshot.graph
    for title, ids, neighbours in (
        ("came from", graph.ancestors(node.id), graph.parents),
        ("became", graph.descendants(node.id), graph.children),
    ):
        if ids:
            heading = Text.assemble(styled(title, "bold"), f" ({len(ids)})")
            parts.append(_tree(heading, snapshot, node.id, neighbours, most=most))
        else:
            parts.append(styled(f"{title} nothing that is recorded", "dim"))
    return Group(*parts)


def impact_view(snapshot: Snapshot, what: str, nodes: Sequence[LineageNode], *, alias: str) -> RenderableType:
    """Returns a table of the models that a data set, row or model has reached, those in production first."""
    columns = ("model", "kind", "aliases", "state", "made", "parents")
    table = Table(*columns, box=None, header_style="bold", padding=(0, 2, 0, 0))
    for node in sorted((node.carrying(alias) or node for node in nodes), key=lambda node: alias not in node.aliases):
        style = "bold red" if alias in node.aliases else None
        parents = ", ".join(snapshot.label(parent) for parent in node.record.parents)
        table.add_row(
            node.label,
            node.record.kind,
            ", ".join(node.aliases),
            ", ".join(node.states),
            _day(node.created_ms),
            parents,
            style=style,
        )
    serving = [result.label for node in nodes if (result := node.carrying(alias)) is not None]
    sentence = styled(f"{what} reached {len(nodes)} model{'s' * (len(nodes) != 1)}. In production ({alias}): ")
    sentence += styled(", ".join(serving), "bold red") if serving else styled("none of them", "green")
    return Group(*([table] if nodes else []), sentence)


def diff_view(
    first: LineageNode,
    second: LineageNode,
    changes: Sequence[TensorChange] | None,
    records: Mapping[str, Mapping[str, tuple[object, object]]],
    *,
    most: int,
) -> RenderableType:
    """Returns the differences between two models: tensors, those that changed most first, then recorded facts."""
    parts: list[RenderableType] = [Text.assemble(styled(first.label, "bold"), " -> ", styled(second.label, "bold"))]
    if changes is not None:
        parts += [*_tensors(changes, most=most)]
    for section, rows in records.items():
        cells = [(key, *map(_short, pair)) for key, pair in rows.items()]
        parts.append(plain_table(section, first.label, second.label, rows=cells))
    return Group(*parts)


def print_view(view: RenderableType, console: Console) -> None:
    """Prints a view; on a terminal, lines that are too long are cut, not wrapped."""
    console.print(view, soft_wrap=not console.is_terminal)


def _heading(node: LineageNode) -> Text:
    aliases = [styled(f"  @{alias}", "green") for alias in node.aliases]
    return Text.assemble(styled(node.label, "bold"), styled(f"  {node.record.kind}"), *aliases, *_states(node))


def _states(node: LineageNode) -> list[Text]:
    """The states of a model that have no alias."""
    aliases = {alias for version in node.versions for alias in version.aliases}
    return [styled(f"  {state}", "red") for state in node.states if state not in aliases]


def _facts(snapshot: Snapshot, node: LineageNode) -> Table:
    record, origin = node.record, node.record.origin
    plan = None if origin.plan is None else f"{origin.plan} of run {origin.batch_run_id}"
    components = ", ".join(snapshot.label(component) for component in record.components)
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in node.metrics.items())
    main, num_rows = node.metric, node.params.get(NUM_ROWS)
    names = snapshot.nodes[node.id].versions
    also = ", ".join("@".join([each.label, *each.aliases]) for each in names if each.label != node.label)
    rows: list[tuple[str, Any]] = [
        ("id", node.id),
        ("also", also),
        ("made", _day(node.created_ms)),
        *(
            (
                f"data, {d.context}",
                f"{d.name}  {d.digest[:12]}" + (f"  {d.num_rows} rows" if d.num_rows is not None else ""),
            )
            for d in record.datasets
        ),
        ("held-out", main),
        ("metrics", metrics if len(node.metrics) > 1 else ""),
        ("held-out rows", num_rows if not main else ""),
        ("job", origin.job),
        ("trained by", origin.technique),
        ("steps", origin.num_steps),
        ("seed", origin.seed),
        ("code", origin.code_version),
        *((name, _short(value)) for name, value in node.params.items() if "." in name),
        ("plan", plan),
        ("checkpoints", origin.checkpoints),
        ("imported from", origin.source),
        ("shares", components),
        ("run", record.run_id),
        ("tensors", record.tensors_id),
    ]
    table = Table.grid(padding=(0, 2, 0, 2))
    for name, value in rows:
        if value not in (None, ""):
            table.add_row(styled(name, "dim"), str(value))
    return table


def _tree(title: Text, snapshot: Snapshot, root: str, neighbours: Callable[[str], Iterable[str]], *, most: int) -> Tree:
    """Returns the tree from `root` along `neighbours`. A node's second occurrence has no children in the tree."""
    tree = Tree(title)
    met, queue = {root}, [(root, tree)]
    left_out = 0
    for id, branch in queue:  # breadth first, so that the farthest are left out
        for other in neighbours(id):
            if most <= 0:
                left_out += other not in met
                met.add(other)
                continue
            most -= 1
            again = other in met
            below = branch.add(_line(snapshot, other) + styled(" (see above)" if again else "", "dim"))
            if not again:
                met.add(other)
                queue.append((other, below))
    if left_out:
        tree.add(styled("and more; --all shows every one", "dim"))
    return tree


def _line(snapshot: Snapshot, id: str) -> Text:
    node = snapshot.nodes.get(id)
    if node is None:
        return styled(snapshot.label(id), "red")
    aliases = "".join(f" @{alias}" for version in node.versions for alias in version.aliases)
    data = ", ".join(dict.fromkeys(d.short_label for d in node.record.datasets))
    on, metric = styled(f" on {data}" if data else "", "dim"), styled(f"  {node.metric}" if node.metric else "")
    head = [styled(node.label), styled(aliases, "green"), *_states(node)]
    return Text.assemble(*head, styled(f"  {node.record.kind}"), on, metric)


def _tensors(changes: Sequence[TensorChange], *, most: int) -> list[RenderableType]:
    counts = Counter(change.what for change in changes)
    text = ", ".join(f"{number} {what}" for what, number in counts.items()) or "there are none"
    differing = [change for change in changes if change.what != SAME]
    differing.sort(key=lambda change: (change.what == CHANGED, -(change.relative_l2 or 0.0)))
    table = Table("tensor", "", "shape", "relative L2", "largest", "values changed", box=None, header_style="bold")
    for change in differing[:most]:
        figures = ["" if each is None else f"{each:.3g}" for each in (change.relative_l2, change.largest)]
        share = "" if change.share is None else f"{change.share:.1%}"
        table.add_row(change.name, change.what, "x".join(map(str, change.shape)), *figures, share)
    parts: list[RenderableType] = [styled(f"tensors: {text}")]
    if differing:
        parts.append(table)
    if len(differing) > most:
        parts.append(styled(f"and {len(differing) - most} more; --most shows them", "dim"))
    return parts


def _short(value: object) -> str:
    text = "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return printable(text, limit=48)


def _day(at_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at_ms / 1000)) if at_ms else ""
