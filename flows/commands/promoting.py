"""Commands that say which version of a model serves: this one, by a policy or by a person's word, or the one before."""

from __future__ import annotations

import getpass
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringmaster.errors import InputError
from ringmaster.flows import settings
from ringmaster.flows.output import AllRows, AsJson, error_console, output_console, print_json

if TYPE_CHECKING:
    from ringmaster.flows.lineage.home import LineageHome
    from ringmaster.tasks.alarms import Alarm
    from ringmaster.tasks.retraining.alias_moves import MoveLog


def promote(
    model: Annotated[
        str, typer.Argument(help="NAME/VERSION, NAME@ALIAS or a model id; NAME alone is its newest version.")
    ],
    policy: Annotated[Path | None, typer.Option(help="A policy file that decides; without one, --why does.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="What the policy looks at: a source (digits), files, a mapping or file as a batch's data."),
    ] = None,
    all_rows: AllRows = False,
    against: Annotated[
        str | None, typer.Option(help="Compare with this model in place of the champion of the same name.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Promote it though the policy refuses; needs --why.")] = False,
    why: Annotated[str, typer.Option(help="Your reason, kept with the decision.")] = "",
    as_json: AsJson = False,
) -> None:
    """Let a model serve: its alias becomes champion. Exit 1: the policy refuses it."""
    from ringmaster.flows.promotion.promote import Asked, promote_by_hand

    asked = Asked(
        model=model,
        policy=policy,
        data=data,
        all_rows=all_rows,
        against=against,
        force=force,
        why=why,
        who=getpass.getuser(),
    )
    with _promotions() as (home, log):
        done = promote_by_hand(home, asked, log=log, notice=error_console().print, sound=_sound)
    if as_json:
        print_json(done.to_json())
    else:
        for reason in done.decision.reasons:
            output_console().print(f"- {reason}", soft_wrap=True)
        error_console().print(done.sentence())
    raise typer.Exit(0 if done.decision.promote else 1)


def rollback(
    name: Annotated[str, typer.Argument(help="A registered model, such as production.digits.")],
    why: Annotated[str, typer.Option(help="Kept with the decision.")] = "",
    as_json: AsJson = False,
) -> None:
    """Let the previous champion of a registered model serve again."""
    from ringmaster.tasks.retraining.promotion import roll_back

    with _promotions() as (home, log):
        restored, taken_back = roll_back(home.ledger, name, log=log, who=getpass.getuser(), why=why)
    if as_json:
        print_json({"model": name, "champion": restored, "taken_back": taken_back})
    else:
        error_console().print(f"version {restored} of {name} serves again; version {taken_back} does not")


def _sound(alarm: Alarm) -> None:
    """Tells the pool's Prefect server, whose automations tell people; without a pool there is nobody to tell."""
    if settings.pool() is None:
        return
    settings.embed(settings.home())  # before Prefect is imported
    from ringmaster.tasks.alarms.task import sound

    sound(alarm)


@contextmanager
def _promotions() -> Iterator[tuple[LineageHome, MoveLog]]:
    """The lineage, and where moves of aliases are written down. Promotions that are refused are the input's fault."""
    from ringmaster.errors import PromotionRefused
    from ringmaster.flows.lineage.home import lineage_home
    from ringmaster.flows.promotion.promote import open_move_log

    with lineage_home() as home, open_move_log() as log:
        try:
            yield home, log
        except PromotionRefused as refused:
            raise InputError([str(refused)]) from refused
