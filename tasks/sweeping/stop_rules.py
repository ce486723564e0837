"""Rules by which a sweep ends before all its trials have been trained as far as early stopping lets them.

The module `sweep` of a feature lists its rules in `STOP_RULES`. A sweep's file names under `stop_when` those that
end it. The others only propose to.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import BaseModel

from ringmaster.features import listed
from ringmaster.findings import Finding
from ringmaster.tasks.sweeping.early_stopping import SweepTrial
from ringmaster.tasks.sweeping.ranking import Reports
from ringmaster.tasks.sweeping.spec import SweepSpec


@dataclass(frozen=True, kw_only=True)
class SweepProgress:
    """What is known of a sweep at a moment.

    trials: those that can be trained.
    done: the names of those that were trained to their last step.
    device_s: the device seconds of all gangs that have ended.
    """

    spec: SweepSpec
    trials: Sequence[SweepTrial]
    reports: Reports
    done: frozenset[str]
    device_s: float


@dataclass(frozen=True, kw_only=True)
class StopProposal:
    """The proposal to end a sweep.

    reason: a clause, for terminals and records.
    figures: what the decision was made from, as JSON.
    ends: whether the sweep ends by it.
    """

    reason: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    ends: bool = False


class StopRule(BaseModel, extra="forbid", frozen=True):
    """A rule by which a sweep ends.

    key: its name in a file.
    """

    key: ClassVar[str]

    @abstractmethod
    def proposal(self, progress: SweepProgress) -> StopProposal | None:
        """Returns why the sweep should end now, or None. It is a function of the results alone."""

    def findings(self, spec: SweepSpec) -> Iterator[Finding]:
        """Yields why the rule cannot end a sweep."""
        return iter(())


def stop_rules() -> dict[str, type[StopRule]]:
    """Returns all rules, by key."""
    return {kind.key: kind for kind in listed("sweep", "STOP_RULES")}
