"""Commands about single models: how good one is, whether what it says in production is sane, and back to the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.faults import InputError
from flows.output import AsJson, error_console, output_console, print_json

if TYPE_CHECKING:
    from tasks.evaluation.examination import Examined


def evaluate(
    model: Annotated[
        str, typer.Argument(help="A folder with a model, or NAME, NAME/VERSION, NAME@ALIAS or a model id.")
    ],
    data: Annotated[
        str | None,
        typer.Option(help="A source (digits), files ('data/*.jsonl'), a mapping or file as a batch file's data."),
    ] = None,
    tests: Annotated[Path | None, typer.Option(help="A file of slices, behavioural tests and assertions.")] = None,
    against: Annotated[str | None, typer.Option(help="Another model, on the same rows, such as NAME@champion.")] = None,
    max_rows: Annotated[int, typer.Option(help="The most held-out rows.", min=1)] = 2000,
    record: Annotated[bool, typer.Option(help="Whether a registered model's run keeps what was found.")] = True,
    as_json: AsJson = False,
) -> None:
    """Measure a model on held-out data with intervals, test its behaviour, compare it. Exit 1: something failed."""
    from flows import examining
    from flows.lineage_home import lineage_home

    spec = None if data is None else examining.data_spec(data)
    with lineage_home() as home:
        found = examining.find(model, home)
        other = None if against is None else examining.find(against, home)
        examined = examining.examine_model(
            found, data=spec, tests=tests, against=other, max_rows=max_rows, notice=error_console().print
        )
        if record and found.record is not None:
            from tasks.evaluation import recording

            recording.record(home.ledger, found.record, examined, other=None if other is None else other.label)
    if as_json:
        said = {"model": found.label, "against": None if other is None else other.label}
        print_json({**said, **examined.to_json()})
    else:
        _show(examined)
    raise typer.Exit(0 if examined.passed else 1)


def monitor(
    assertions: Annotated[Path, typer.Argument(help="A file with assertions.")],
    predictions: Annotated[Path, typer.Argument(help="A JSONL or Parquet file, a row a prediction.")],
    as_json: AsJson = False,
) -> None:
    """Check model assertions on predictions that were logged in production. Exit 1: one fails."""
    from tasks.evaluation.assertions import check, importable, read_rows
    from tasks.evaluation.suite import load_suite
    from techniques.values import to_json

    suite = load_suite(assertions)
    if not suite.assertions:
        raise InputError([f"{assertions} has no assertions. To fix: give some, under `assertions:`"])
    try:
        rows = read_rows(predictions)
        with importable(assertions.parent):
            results = check(suite.assertions, rows)
    except ValueError as error:
        raise InputError([str(error)]) from error
    passed = all(result.passed for result in results)
    if as_json:
        print_json({"passed": passed, "num_rows": len(rows), "assertions": to_json(results)})
    else:
        from tasks.evaluation.examination import Examined
        from tasks.evaluation.recording import tables

        _table("assertions", tables(Examined(assertions=tuple(results)))["assertions"])
    raise typer.Exit(0 if passed else 1)


def rollback(
    name: Annotated[str, typer.Argument(help="A registered model, such as production.digits.")],
    why: Annotated[str, typer.Option(help="Kept with the decision.")] = "",
    as_json: AsJson = False,
) -> None:
    """Let the previous champion of a registered model serve again."""
    import getpass

    from flows.lineage_home import lineage_home
    from flows.promotions import open_move_log
    from tasks.promotion.moves import PromotionRefused
    from tasks.promotion.stage import roll_back

    with lineage_home() as home, open_move_log() as log:
        try:
            restored, taken_back = roll_back(home.ledger, name, log=log, who=getpass.getuser(), why=why)
        except PromotionRefused as refused:
            raise InputError([str(refused)]) from refused
    if as_json:
        print_json({"model": name, "champion": restored, "taken_back": taken_back})
    else:
        error_console().print(f"version {restored} of {name} serves again; version {taken_back} does not", markup=False)


def _show(examined: Examined) -> None:
    """What was found, for a person."""
    from tasks.evaluation.recording import tables

    if examined.measured:
        level = examined.measured[0].level
        rows = []
        for line in examined.measured:
            row: dict[str, Any] = {"metric": line.metric, "slice": line.slice, "rows": line.num_rows}
            row |= {"value": line.value, f"{level:.0%} interval": f"{line.low:.4g} to {line.high:.4g}"}
            if line.gain is not None and line.p_better is not None and line.p_worse is not None:
                row |= {"other": line.other, "gain": f"{line.gain:+.4g}"}
                p, way = (line.p_better, "better") if line.gain > 0 else (line.p_worse, "worse")
                row["p"] = f"{p:.2g} {way}" if line.gain else ""
            rows.append(row)
        _table("held-out data", rows)
    for name, rows in tables(examined).items():
        if rows:
            _table(name, rows)
    for fault in examined.faults:
        error_console().print(fault, style="red", markup=False, highlight=False)


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(*(rows[0] if rows else ()), title=title, title_justify="left", header_style="bold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row.values()))
    output_console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
