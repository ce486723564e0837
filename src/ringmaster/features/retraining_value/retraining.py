"""The rule of retraining runs that decides by value."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringmaster.codec import to_json
from ringmaster.features.retraining_value.champion_value import (
    measure_champion,
    record_pictures,
    value_now,
    value_rules,
    window_of,
)
from ringmaster.flows.retraining.new_data_rules import NewDataRule, RuleResult
from ringmaster.flows.retraining.retraining_run import RetrainingRun
from ringmaster.model_lineage import ModelRecord
from ringmaster.tasks.retraining.production import ProductionModel
from ringmaster.tasks.retraining.promotion import lasting, version_of
from ringmaster.tasks.retraining.selection import NewDataDecision

UNKNOWN = NewDataDecision(is_due=False, why="whether retraining pays is not known yet", is_known=False)
NO_PRICE = (
    "whether retraining pays is not known: no run has trained it at a cost. To fix: give due.value.price, or train it "
    "once by --force"
)


class ByValue(NewDataRule):
    """Retrains a model when another day of waiting is expected to cost more than retraining."""

    def is_for(self, model: ProductionModel) -> bool:
        """Returns whether `due.value` is given."""
        return value_rules(model) is not None

    def windows(self, run: RetrainingRun, model: ProductionModel) -> Sequence[int | None]:
        """Returns the days chosen by earlier runs, then longer windows."""
        rules, chosen = value_rules(model), window_of(run, model)
        if rules is None or chosen is None:
            return [chosen]
        return sorted(days for days in rules.windows if days >= chosen) or [chosen]

    def decide(
        self, run: RetrainingRun, model: ProductionModel, champion: ModelRecord, folder: Path, data: Mapping[str, Any]
    ) -> RuleResult:
        """Measures the champion on the data of the run, and decides whether retraining pays."""
        try:
            measured = measure_champion(run, model, folder, version=version_of(champion), data=data)
        except (ValueError, OSError) as error:
            return RuleResult(decision=UNKNOWN, missing=f"whether retraining pays is not known: {lasting(error)}")
        value = value_now(run, model, measured)
        missing = "" if value.terms else NO_PRICE
        made = value.decision
        decision = UNKNOWN if made is None else NewDataDecision(is_due=made.is_due, why=made.why)
        return RuleResult(decision=decision, measured=to_json(measured), missing=missing)

    def record(self, run: RetrainingRun) -> None:
        """Draws the decisions of the models that ask for it."""
        record_pictures(run)


NEW_DATA_RULES = (ByValue(),)
