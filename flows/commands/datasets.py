"""Commands about data sets with names: what is there, what is wrong with it, and which models have read a row."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ringmaster.errors import InputError
from ringmaster.flows.output import AsJson, output_console, print_json

if TYPE_CHECKING:
    from ringmaster.tasks.datasets.catalogue import Catalogue, Entry

app = typer.Typer(no_args_is_help=True, help="Data sets by name and version: what they hold, and what is wrong.")

File = Annotated[
    Path, typer.Argument(metavar="[FILE]", help="File with `datasets:`: a batch, or a catalogue of its own.")
]
CATALOGUE = Path("datasets.yaml")


@app.command()
def check(file: File = CATALOGUE, as_json: AsJson = False) -> None:
    """Read every data set of a file and tell all that is wrong: files, columns, empty parts, changed content.

    Where the file has jobs, also what is wrong with the parts that they read: windows, and rows that are both trained
    and evaluated on. Exit 0 where all is well, 2 where something is not.
    """
    from ringmaster.errors import BatchFileError
    from ringmaster.tasks.batch import load_batch
    from ringmaster.tasks.datasets.checking import version_faults

    catalogue, raw, faults = _catalogue(file)
    found = {
        f"{name}/{version}": version_faults(entry, version)
        for name, entry in catalogue.entries.items()
        for version in entry.versions
    }
    faults += [f"{label}: {fault}" for label, told in found.items() for fault in told]
    if raw.get("jobs") or raw.get("grid"):
        try:
            load_batch(file)
        except BatchFileError as error:
            faults += [str(fault) for fault in error.faults]
    faults = list(dict.fromkeys(faults))  # what is wrong with the catalogue is wrong with the batch
    if as_json:
        print_json({"datasets": found, "faults": faults})
    if faults:
        raise InputError(faults)
    if not as_json:
        output_console().print(f"{len(found)} versions of {len(catalogue.entries)} data sets: nothing is wrong")


@app.command()
def show(
    name: Annotated[str | None, typer.Argument(help="Name of a data set; default: all.")] = None,
    file: Annotated[Path, typer.Option("--file", help="File with `datasets:`.")] = CATALOGUE,
    as_json: AsJson = False,
) -> None:
    """List data sets with their versions and splits: files, rows, and the fingerprint of their content."""
    from ringmaster.tasks.batch.references import closest

    catalogue, _, faults = _catalogue(file)
    if faults:
        raise InputError(faults)
    if name is not None and name not in catalogue.entries:
        raise InputError([f"there is no data set {name!r}: {closest(name, list(catalogue.entries), what='There are')}"])
    chosen = [entry for entry in catalogue.entries.values() if name in (None, entry.name)]
    rows = [row for entry in chosen for row in _rows(entry)]
    if as_json:
        print_json({"datasets": rows})
        return
    table = Table("data set", "version", "split", "files", "rows", "digest", "path", box=None, header_style="bold")
    for row in rows:
        table.add_row(*(str(row[key]) for key in ("name", "version", "split", "num_files", "num_rows")), *_tail(row))
    output_console().print(table)


@app.command()
def trace(
    row: Annotated[str, typer.Argument(help="Text of a row, or FILE:LINE of a file that has it.")],
    text_column: Annotated[str, typer.Option(help="Column that holds the text of a row in a file.")] = "text",
    as_json: AsJson = False,
) -> None:
    """List the models that were trained or evaluated on a row of a data set with a name."""
    from ringmaster.flows.lineage.home import lineage_home
    from ringmaster.flows.lineage.row_tracing import TracedRow, readers_of

    traced = TracedRow.of(row)
    with lineage_home() as home:
        found = readers_of(traced, home, text_column=text_column)
    if as_json:
        print_json({"models": found})
        return
    console = output_console()
    for reader in found:
        console.print(f"{reader['model']}: {reader['use']} on it, in {reader['data']}")
    if not found:
        console.print("no recorded model has read this row from a data set with a name")


def _tail(row: dict[str, Any]) -> tuple[str, str]:
    return (row["digest"] or "", row["fault"] or row["path"])


def _rows(entry: Entry) -> list[dict[str, Any]]:
    """A row for each split of each version, what cannot be read with its fault."""
    from ringmaster.tasks.datasets.checking import contents, fingerprint

    rows: list[dict[str, Any]] = []
    for version in entry.versions:
        label = {"name": entry.name, "version": version}
        try:
            found = contents(entry, version)
        except ValueError as error:
            empty = {"split": "", "num_files": 0, "num_rows": 0, "digest": "", "version_digest": "", "path": ""}
            rows.append({**label, **empty, "fault": str(error)})
            continue
        whole = fingerprint(found)
        rows += [
            {**label, "split": split, **vars(content), "version_digest": whole, "fault": ""}
            for split, content in found.items()
        ]
    return rows


def _catalogue(file: Path) -> tuple[Catalogue, dict[str, Any], list[str]]:
    """The data sets that a file may name, its plain values, and what is wrong with how they are described.

    Raises InputError where there are no data sets.
    """
    from ringmaster.tasks.batch import document
    from ringmaster.tasks.batch.document import Fault, place_text
    from ringmaster.tasks.datasets.catalogue import catalogue_of
    from ringmaster.tasks.files import text_of

    try:
        read = document.read(text_of(file))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError([f"{file} cannot be read: {error}. To fix: name a file with `datasets:`"]) from error
    raw = read.data if isinstance(read.data, dict) else {}
    catalogue, found = catalogue_of(raw.get("datasets"), folder=file.parent.resolve())
    placed = [(place_text(f.place), f.line or read.line(f.place), f) for f in [*read.findings, *found]]
    faults = [str(Fault(place, line, f.message, f.remedy, file.name)) for place, line, f in placed]
    if not catalogue.entries:
        raise InputError(faults or [f"{file} has no data sets. To fix: describe them under `datasets:`"])
    return catalogue, raw, faults
