"""The promotion stage: reads and moves the aliases of a registered model.

`champion` serves. `previous` is the champion before it, to go back to. `challenger` is the version that was compared
last, whether it won or not; a newer version than both is a candidate that was trained but not compared yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from model_lineage import Ledger, ModelRecord
from tasks.promotion.policy import Decision

CHAMPION, PREVIOUS, CHALLENGER = "champion", "previous", "challenger"


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a registered model stands. latest: its newest version, whatever became of that."""

    name: str
    champion: ModelRecord | None = None
    challenger: ModelRecord | None = None
    latest: ModelRecord | None = None

    @property
    def candidate(self) -> ModelRecord | None:
        """The newest version, where it was not compared with a champion yet."""
        if self.latest is None:
            return None
        judged = max((version_of(model) for model in (self.champion, self.challenger) if model is not None), default=0)
        return self.latest if version_of(self.latest) > judged else None


def standings(ledger: Ledger, names: Iterable[str]) -> dict[str, Standing]:
    """The standing of each registered model; one that was never trained stands nowhere."""
    wanted = list(names)
    latest: dict[str, ModelRecord] = {}
    for model in ledger.models():
        name = model.registered_name
        if (
            name in wanted
            and model.version is not None
            and (name not in latest or model.version > version_of(latest[name]))
        ):
            latest[name] = model
    return {
        name: Standing(
            name=name,
            champion=ledger.get_alias(name, CHAMPION),
            challenger=ledger.get_alias(name, CHALLENGER),
            latest=latest[name],
        )
        if name in latest
        else Standing(name=name)
        for name in wanted
    }


def apply(ledger: Ledger, candidate: ModelRecord, decision: Decision) -> None:
    """Moves the aliases of the candidate's name by `decision`; again, it changes nothing.

    In this order a crash between any two steps leaves a champion, and a repetition ends in the same aliases:
    `challenger` comes last, because it says that the comparison is done.
    """
    name, version = candidate.registered_name, version_of(candidate)
    champion = ledger.get_alias(name, CHAMPION)
    if decision.promote and (champion is None or champion.version != version):
        if champion is not None:
            ledger.set_alias(name, PREVIOUS, version_of(champion))
        ledger.set_alias(name, CHAMPION, version)
    ledger.set_alias(name, CHALLENGER, version)


def training_digest(model: ModelRecord | None) -> str | None:
    """The digest of the data that the model was trained on; None where it is not known."""
    if model is None:
        return None
    return next((dataset.digest for dataset in model.datasets if dataset.context == "training"), None)


def version_of(model: ModelRecord) -> int:
    """The version number of a model that was registered."""
    assert model.version is not None, f"{model.model_id} has no version"
    return model.version
