"""The command `ringmaster reproduce`."""

import time
from pathlib import Path
from typing import Annotated

import typer

from ringmaster.flows.lineage.home import Model, lineage_home
from ringmaster.flows.output import AsJson, notice, print_outcome


def reproduce(
    model: Model,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be trained, and what is known to differ.")
    ] = False,
    share: Annotated[
        float, typer.Option(help="Share of the recorded states to make again, drawn at random.", min=0, max=1)
    ] = 1.0,
    technique: Annotated[
        str | None,
        typer.Option(
            "--as", help="Technique to train under, on one device, for jobs with exact: true; default: as then."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draw of --share.")] = 0,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Folder to work in; default: one in the home's cache.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a model again from its lineage and compare every tensor; report what differs, and exit 1 if something
    does."""
    from ringmaster.features.reproduction.reproducing import ReproductionOptions, reproduce

    with lineage_home(is_fresh=True) as home:
        node = home.find(model)
        work = folder or home.folder / "cache" / "reproductions" / time.strftime("%Y%m%d-%H%M%S")
        options = ReproductionOptions(folder=work, technique=technique, share=share, seed=seed, is_dry_run=dry_run)
        report = reproduce(home, node, options, notice=notice)
    if report is None:
        return
    print_outcome(report.to_json(), report.sentences(), as_json=as_json)
    if not report.is_equal:
        raise typer.Exit(1)


COMMANDS = {"Models": (reproduce,)}
