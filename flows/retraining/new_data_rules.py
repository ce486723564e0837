"""Rules of features that decide, in place of `new_data`, whether new data makes a model due.

The module `retraining` of a feature lists its rules in `NEW_DATA_RULES`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringmaster.features import listed
from ringmaster.flows.retraining.retraining_run import RetrainingRun
from ringmaster.model_lineage import ModelRecord
from ringmaster.tasks.retraining.production import ProductionModel
from ringmaster.tasks.retraining.selection import NewDataDecision


@dataclass(frozen=True, kw_only=True)
class RuleResult:
    """What a rule says of a model in one run.

    measured: what the run stores of the model, in JSON; None for nothing.
    missing: why the rule could not decide; empty if it could.
    """

    decision: NewDataDecision
    measured: Mapping[str, Any] | None = None
    missing: str = ""


class NewDataRule:
    """A rule of a feature for new data. It keeps no state: what it has measured is in the records of the runs."""

    def is_for(self, model: ProductionModel) -> bool:
        """Returns whether the model's rules ask for it."""
        raise NotImplementedError

    def windows(self, run: RetrainingRun, model: ProductionModel) -> Sequence[int | None]:
        """Returns numbers of days of dated files, of which a run reads the first that has some; None for all."""
        return [model.window_days]

    def decide(
        self, run: RetrainingRun, model: ProductionModel, champion: ModelRecord, folder: Path, data: Mapping[str, Any]
    ) -> RuleResult:
        """Decides about the data of a run. folder: the champion's files. data: JSON of prepared data, by job."""
        raise NotImplementedError

    def record(self, run: RetrainingRun) -> None:
        """Records its decisions of a run that is over. Raises LedgerError where MLflow cannot be written."""


def new_data_rules() -> tuple[NewDataRule, ...]:
    """Returns the rules of all features."""
    return tuple(listed("retraining", "NEW_DATA_RULES"))


def rule_of(model: ProductionModel) -> NewDataRule | None:
    """Returns the rule that a model asks for, the first of several."""
    return next((rule for rule in new_data_rules() if rule.is_for(model)), None)
