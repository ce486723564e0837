"""The command `ringmaster lineage undo`."""

from pathlib import Path
from typing import Annotated

import typer

from ringmaster.flows.commands.models import emit_pool_alarm
from ringmaster.flows.commands.parameters import seconds_until
from ringmaster.flows.commands.running import show_result, train_or_resume
from ringmaster.flows.lineage.home import lineage_home
from ringmaster.flows.output import AsJson, error_console, message, print_outcome


def undo(
    row: Annotated[str | None, typer.Option(help="Content hash of a row, its text, or FILE:LINE.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Data set, as NAME or NAME@VERSION.")] = None,
    base: Annotated[str | None, typer.Option(help="Version of a model from which others came.")] = None,
    deadline: Annotated[str | None, typer.Option(help="Time of day by which all is trained, such as 06:00.")] = None,
    text_column: Annotated[str, typer.Option(help="Column that holds the text of a row in a file.")] = "text",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print which models would be trained again.")] = False,
    policy: Annotated[
        Path | None, typer.Option(help="Policy file for the promotion of the new versions; default: the plain rule.")
    ] = None,
    promote: Annotated[
        bool, typer.Option(help="Promote the new versions of models that serve, if the policy agrees.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Train all models that have read a row, or came from a data set or version, again as if it had not been."""
    from ringmaster.features.undo import undoing
    from ringmaster.features.undo.undoing import UndoRequest, plan_undo, register
    from ringmaster.flows.retraining.examine import open_move_log
    from ringmaster.tasks.retraining.policy import load_policy

    request = UndoRequest(row=row, dataset=dataset, base=base, text_column=text_column)
    deadline_s = None if deadline is None else seconds_until(deadline)
    rules = None if policy is None else load_policy(policy)
    with lineage_home(is_fresh=True, writes=not dry_run) as home:
        plan = plan_undo(home, request, folder=home.folder / "undo")
        is_over = dry_run or not plan.models
        print_outcome(plan.to_json(), plan.sentences(), as_json=as_json and is_over)
        if is_over:
            return
        batch = plan.batch(deadline_s=deadline_s)
        trained = train_or_resume(batch)
        exit_code = show_result(trained, as_json=False)
        uris = {job["name"]: job["model_uri"] for job in trained.jobs if job["model_uri"]}
        versions = register(home, plan, uris)
    promotions = []
    with lineage_home(is_fresh=True) as home, open_move_log() as log:
        for version in versions if promote else ():
            decision = undoing.promote(
                home, version, policy=rules, log=log, notice=error_console().print, emit_alarm=emit_pool_alarm
            )
            error_console().print(message(version.sentence(decision)), soft_wrap=True)
            promotions.append({"model": version.label, "is_promoted": decision.promote, "why": decision.why})
    if not promote:
        for version in versions:
            error_console().print(f"{version.label} is made; `ringmaster promote {version.label}` decides on it")
    device_s = sum(segment["device_s"] for job in trained.jobs for segment in job["segments"])
    result = {**plan.to_json(), "versions": [each.label for each in versions], "promotions": promotions}
    print_outcome({**result, "device_s": device_s, "batch": batch.name}, as_json=as_json)
    raise typer.Exit(exit_code)


COMMANDS = {"lineage": (undo,)}
