"""Promotion on a person's request: decided by a policy, or by the person alone, and recorded with the reasons.

Promotions in progress are logged in the pool's database, or in a file of this home.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ringmaster.codec import to_json
from ringmaster.errors import InputError
from ringmaster.flows import settings
from ringmaster.flows.lineage.home import LineageHome
from ringmaster.flows.retraining import examine
from ringmaster.flows.retraining.examine import EvaluatedModel
from ringmaster.model_lineage.records import CHAMPION
from ringmaster.model_lineage.snapshot import LineageNode
from ringmaster.tasks.alarms import Alarm
from ringmaster.tasks.evaluation import recording
from ringmaster.tasks.profiling.preflight import Notice
from ringmaster.tasks.retraining import promotion
from ringmaster.tasks.retraining.policy import PromotionDecision, PromotionPolicy, decide_by, load_policy
from ringmaster.tasks.retraining.promotion import MoveLog
from ringmaster.tasks.storage.database import Database, file_url
from ringmaster.techniques import EvaluationSpec


@dataclass(frozen=True, kw_only=True)
class PromotionRequest:
    """A person's request.

    model: the model to promote.
    policy: file of the policy; None to promote without one.
    data: the data for the policy's evaluation.
    all_rows: whether all rows of the data are compared on, as no model is trained on them.
    against: name of the model to compare with; None for the champion.
    force: whether to promote against the policy's decision.
    why: the person's reason.
    who: the person.
    """

    model: str
    policy: Path | None = None
    data: str | None = None
    all_rows: bool = False
    against: str | None = None
    force: bool = False
    why: str = ""
    who: str


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """A decision on a promotion.

    name: registered name of the model.
    version: the version that was considered.
    before: the version that served before, if any.
    decision: the decision.
    """

    name: str
    version: int
    before: int | None
    decision: PromotionDecision

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        serves = self.version if self.decision.promote else self.before
        said = {"model": self.name, "version": self.version, "promoted": self.decision.promote}
        compared = self.decision.compared
        return {
            **said,
            "champion": serves,
            "champion_before": self.before,
            "reasons": list(self.decision.reasons),
            "compared": None if compared is None else to_json(compared),
        }

    def sentence(self) -> str:
        """Returns the decision as a sentence."""
        before = "none before it" if self.before is None else f"version {self.before} before it"
        if self.decision.promote:
            return f"version {self.version} of {self.name} serves; {before}"
        serves = "no version serves" if self.before is None else f"version {self.before} serves"
        return f"version {self.version} of {self.name} is not promoted; {serves}"


def promote_by_hand(
    home: LineageHome,
    asked: PromotionRequest,
    *,
    log: MoveLog,
    notice: Notice,
    sound: Callable[[Alarm], None] = lambda alarm: None,
) -> Promotion:
    """Decides on a promotion, and moves the aliases accordingly.

    sound: sends an alarm if a version is refused.

    Raises InputError, or PromotionRefused if another promotion was faster.
    """
    _check(asked)
    policy = None if asked.policy is None else load_policy(asked.policy)
    node = _candidate(home, asked.model)
    name, version = node.record.registered_name, promotion.version_of(node.record)
    finished = log.finish_left_behind(home.ledger, name)
    serving = home.ledger.get_alias(name, CHAMPION)
    champion = None if serving is None else serving.version
    if champion == version and finished:  # this promotion was begun before, and interrupted
        return _begun_before(home, node)
    if champion == version:
        raise InputError([f"{node.label} serves already. To fix: name another version"])
    if policy is None:
        decision, who = PromotionDecision(promote=True, why=asked.why, reasons=(asked.why,)), asked.who
    else:
        against = asked.against or (None if champion is None else f"{name}/{champion}")
        decision, who = _judged(home, node, policy, asked, against=against, notice=notice)
    promotion.apply(home.ledger, node.record, decision, log=log, champion=champion, who=who, sound=sound)
    return Promotion(name=name, version=version, before=champion, decision=decision)


def _begun_before(home: LineageHome, node: LineageNode) -> Promotion:
    """Returns a promotion that was just finished, with the decision that was made when it was begun."""
    kept = promotion.read_decisions(home.ledger, node.record)
    decision = PromotionDecision(promote=True, why="; ".join(kept[-1].reasons), reasons=kept[-1].reasons)
    return Promotion(
        name=node.record.registered_name,
        version=promotion.version_of(node.record),
        before=kept[-1].champion_before,
        decision=decision,
    )


def _judged(
    home: LineageHome,
    node: LineageNode,
    policy: PromotionPolicy,
    asked: PromotionRequest,
    *,
    against: str | None,
    notice: Notice,
) -> tuple[PromotionDecision, str]:
    """Returns the decision, by the policy or by the person against it, and who made it."""
    assert asked.data is not None, "a policy has data to look at"
    other = None if against is None else examine.find(against, home)
    model = EvaluatedModel(label=node.label, folder=home.model_dir(node), record=node.record)
    data = examine.data_spec(asked.data, all_rows=asked.all_rows)
    found = examine.examine_by(policy, model, data=data, all_rows=asked.all_rows, against=other, notice=notice)
    for examined in found:
        recording.record(home.ledger, node.record, examined, other=None if other is None else other.label)
    metric = next((line.metric for examined in found for line in examined.measured), EvaluationSpec.metrics[0])
    decision = decide_by(policy, found, metric=metric, is_first=other is None)
    if decision.promote and policy.approval_s is not None:
        agrees = f"{asked.who} agrees" + (f": {asked.why}" if asked.why else "")
        return replace(decision, reasons=(*decision.reasons, agrees)), asked.who
    if not decision.promote and asked.force:
        forced = f"promoted all the same by {asked.who}: {asked.why}"
        return replace(decision, promote=True, why=forced, reasons=(*decision.reasons, forced)), asked.who
    return decision, f"policy {policy.name}"


def _check(asked: PromotionRequest) -> None:
    """Raises InputError if the options of the request contradict each other."""
    faults = []
    if asked.policy is None and not asked.why:
        faults.append("nobody says why. To fix: say it by --why, or name a policy by --policy")
    if asked.policy is None and (asked.force or asked.against or asked.data or asked.all_rows):
        faults.append("--force, --against, --data and --all-rows go with a policy. To fix: name one by --policy")
    if asked.policy is not None and asked.data is None:
        faults.append("the policy has nothing to look at. To fix: name data by --data, such as --data digits")
    if asked.force and not asked.why:
        faults.append("--force wants a reason. To fix: say it by --why")
    if faults:
        raise InputError(faults)


def _candidate(home: LineageHome, name: str) -> LineageNode:
    """Returns the requested version, the newest one for a name alone. Raises InputError if it is no version."""
    snapshot, text = home.snapshot, name.removeprefix("models:/")
    newest_first = sorted(snapshot.versions(text), key=lambda node: node.record.version or 0, reverse=True)
    # A model outlives its version: one that was deleted in the registry cannot serve.
    there = (node for node in newest_first if home.ledger.get_version(text, node.record.version or 0) is not None)
    node = next(there, None) or home.find(name)
    if node.record.version is None:
        raise InputError([f"{node.label} is no registered version. To fix: name a model's version"])
    return node


@contextmanager
def open_move_log() -> Iterator[MoveLog]:
    """Yields the log of alias moves that were begun and not finished; all machines of a pool share it."""
    pool = settings.pool()
    with closing(Database(pool.database if pool else file_url(settings.home() / "promotions.db"))) as database:
        yield MoveLog(database)
