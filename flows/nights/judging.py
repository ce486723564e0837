"""What becomes of each model of a night: compared with its champion, promoted, kept, left, or failed, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ringmaster.flows.approval import ask
from ringmaster.flows.nights.choosing import Chosen
from ringmaster.flows.nights.comparing import Judged, Rival, judge
from ringmaster.flows.nights.looking import Checked, trained_of
from ringmaster.flows.nights.night import Night
from ringmaster.flows.nights.training import keep_trained, row_of
from ringmaster.flows.result import BatchResult
from ringmaster.flows.views import current_view
from ringmaster.model_lineage import ModelRecord
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.evaluation.scores import score_models
from ringmaster.tasks.execution.journal import DONE
from ringmaster.tasks.profiling.stage import survey_jobs
from ringmaster.tasks.promotion import decisions
from ringmaster.tasks.promotion.moves import PromotionRefused
from ringmaster.tasks.promotion.policy import Decision
from ringmaster.tasks.promotion.stage import Standing, leave_waiting
from ringmaster.tasks.promotion.task import promote_task
from ringmaster.tasks.retraining.observing import references_of, scored_features
from ringmaster.tasks.retraining.production import with_tokenizer_of
from ringmaster.tasks.retraining.report import FAILED, KEPT, LEFT, PROMOTED, Verdict
from ringmaster.techniques import Job
from ringmaster.techniques.values import from_json

MOST_SCORED = 2000  # held-out rows, for the reference of predictions


def judge_all(night: Night, checks: Mapping[str, Checked], chosen: Chosen, result: BatchResult | None) -> list[Verdict]:
    """Compares every version that was not compared yet with its champion, and promotes the better ones.

    Each verdict is saved as soon as it is carried out: whoever goes on with the night begins with the next model.
    """
    known = {name: from_json(Verdict, said) for name, said in night.content.get("verdicts", {}).items()}
    left = {name: check for name, check in checks.items() if name not in known}
    now = night.standings()
    candidates = {
        name: candidate
        for name, check in left.items()
        if _is_to_be_compared(check, chosen, result)
        and (candidate := now[check.model.registered_name].candidate) is not None
    }
    judged: dict[str, Judged] = {}
    if candidates:
        rivals = _rivals(night, checks, candidates)
        with night.device() as device:
            judged = judge(rivals, night.production.policy, ledger=night.ledger, site=night.bench.site, device=device)
            for name, candidate in candidates.items():
                _keep_predictions(night, checks[name], candidate, device=device)
    for name, check in left.items():
        if (candidate := candidates.get(name)) is not None:
            known[name] = _compared(night, check, candidate, judged[name])
        else:
            known[name] = _not_compared(night, check, now[check.model.registered_name], chosen, result)
        night.save(verdicts={other: verdict.to_json() for other, verdict in known.items()})
    for name, fault in night.production.broken.items():
        known[name] = Verdict(model=name, is_due=False, why_due="", metric="", outcome=FAILED, why=fault)
    return list(known.values())


def interrupted(night: Night, checks: Mapping[str, Checked], result: BatchResult) -> list[Verdict]:
    """The verdicts of a night whose batch was interrupted: nothing was compared, and nothing is decided."""
    why = "the night was interrupted; the same command goes on with it"
    return [
        replace(_verdict(night, check), outcome=FAILED, why=why)
        if row_of(name, result) is not None
        else _verdict(night, check)
        for name, check in checks.items()
    ]


def _is_to_be_compared(check: Checked, chosen: Chosen, result: BatchResult | None) -> bool:
    """Whether its newest version is one of tonight, or was left over by an earlier one."""
    if check.due is None:
        return False
    if not check.due.is_due or not chosen.trains(check.model.name):
        return not check.due.is_due
    if result is None:  # an earlier process of this night has trained it
        return True
    return any((row := row_of(job.name, result)) and row["status"] == DONE for job in _jobs(check))


def _jobs(check: Checked) -> list[Job]:
    return [check.model.job, *check.model.variants]


def _verdict(night: Night, check: Checked) -> Verdict:
    policy, champion = night.production.policy, check.standing.champion
    return Verdict(
        model=check.model.name,
        why_due=check.due.why if check.due else "",
        is_due=check.due is not None and check.due.is_due,
        metric=(policy and policy.metric) or check.model.metric,
        champion_version=None if champion is None else champion.version,
        notes=check.due.notes if check.due else (),
    )


def _not_compared(night: Night, check: Checked, now: Standing, chosen: Chosen, result: BatchResult | None) -> Verdict:
    """A model without a candidate: nothing was to be done, it waits, its training failed, or it was decided before."""
    verdict, name = _verdict(night, check), check.model.name
    if check.due is None:
        return replace(verdict, outcome=FAILED, why=f"it cannot be looked at: {check.fault}")
    if not verdict.is_due:
        return verdict
    if name in chosen.unfit:
        return replace(verdict, outcome=FAILED, why=chosen.unfit[name])
    if not chosen.trains(name):
        return replace(verdict, outcome=LEFT, why=chosen.left.get(name, ""))
    if name in night.content.get("gone", ()):
        why = "its champion was deleted from the registry while the night ran; the next one sees to it"
        return replace(verdict, outcome=FAILED, why=why)
    row = None if result is None else row_of(name, result)
    if row is not None and row["status"] != DONE:
        return replace(verdict, outcome=FAILED, why=row["message"] or row["status"])
    return _decided_before(night, check, now, verdict)


def _decided_before(night: Night, check: Checked, now: Standing, verdict: Verdict) -> Verdict:
    """What an earlier process of this night decided, and did not live to save."""
    newest = now.latest
    if newest is not None and check.has_made(newest):
        made = decisions.read(night.ledger, newest)
        if made:
            outcome = PROMOTED if made[-1].outcome == decisions.PROMOTED else KEPT
            before = made[-1].champion_before
            why = "; ".join(made[-1].reasons)
            return replace(verdict, outcome=outcome, why=why, candidate_version=newest.version, champion_version=before)
    return replace(verdict, outcome=FAILED, why="it was trained, but could not be recorded")


def _rivals(night: Night, checks: Mapping[str, Checked], candidates: Mapping[str, ModelRecord]) -> list[Rival]:
    """Each candidate and its champion, with the held-out data on which both are compared."""
    folders = {name: night.download(candidate) for name, candidate in candidates.items()}
    # Only now is there a tokenizer by which a first candidate reads what it is compared on.
    compared = {name: with_tokenizer_of(folders[name], checks[name].model).compare_on for name in candidates}
    others = [job for job in compared.values() if job is not None]
    bench, notice = night.bench, current_view.get().notice
    surveys, faults = survey_jobs(others, site=bench.site, cluster=bench.cluster, notice=notice) if others else ({}, {})
    rivals = []
    for name, candidate in candidates.items():
        model, job, data = checks[name].model, checks[name].model.job, checks[name].data
        if (other := compared[name]) is not None:
            job, data = other, surveys[other.name].data if other.name in surveys else None
        rivals.append(
            Rival(
                name=name,
                metric=model.metric,
                min_gain=model.min_gain,
                job=job,
                data=data,
                candidate=candidate,
                candidate_dir=folders[name],
                champion_dir=checks[name].champion_dir,
                fault=faults.get(job.name, ""),
            )
        )
    return rivals


def _keep_predictions(night: Night, check: Checked, candidate: ModelRecord, *, device: Device) -> None:
    """Keeps what a candidate says of held-out rows, where later nights are to look at the drift of predictions."""
    kept = trained_of(night, candidate)
    if check.model.watched.predictions is None or kept is None or kept.predictions:
        return
    job, site = check.model.job, night.bench.site
    folder = {"candidate": night.download(candidate)}
    scored = score_models(folder, job=job, data=check.data, max_rows=MOST_SCORED, site=site, device=device)
    if (scores := scored.scores.get("candidate")) is not None:
        keep_trained(night, candidate, replace(kept, predictions=references_of(scored_features(scores))))


def _compared(night: Night, check: Checked, candidate: ModelRecord, judged: Judged) -> Verdict:
    """What becomes of a candidate; moves its aliases."""
    verdict = replace(
        _verdict(night, check),
        candidate_version=candidate.version,
        candidate_value=judged.candidate_value,
        champion_value=judged.champion_value,
    )
    if judged.decision is None:
        return replace(verdict, outcome=FAILED, why=judged.fault)
    return _carry_out(night, verdict, candidate, judged.decision)


def _carry_out(night: Night, verdict: Verdict, candidate: ModelRecord, decision: Decision) -> Verdict:
    """Moves the aliases by a decision, once a person has agreed where the policy asks for one."""
    policy = night.production.policy
    who = "rule" if policy is None else f"policy {policy.name}"
    if policy is not None and policy.approval_s is not None and decision.promote:
        answer = ask(_question(verdict, candidate, decision), timeout_s=policy.approval_s)
        if answer.approved is None:
            why = f"it waits for approval: {answer.why} ({decision.why})"
            leave_waiting(night.ledger, candidate, why, who=who)
            return replace(verdict, outcome=KEPT, why=why)
        said = f"{answer.who} {'agrees' if answer.approved else 'does not agree'}"
        said += f": {answer.why}" if answer.why else ""
        reasons = (*(decision.reasons if answer.approved else ()), said)
        decision = Decision(promote=answer.approved, why=f"{decision.why}; {said}", reasons=reasons)
        who = answer.who
    try:
        promote_task(
            candidate, decision, ledger=night.ledger, log=night.moves, champion=verdict.champion_version, who=who
        )
    except PromotionRefused as refused:
        return replace(verdict, outcome=FAILED, why=str(refused))
    return replace(verdict, outcome=PROMOTED if decision.promote else KEPT, why=decision.why)


def _question(verdict: Verdict, candidate: ModelRecord, decision: Decision) -> str:
    """What a person is asked, as markdown."""
    serving = "none yet" if verdict.champion_version is None else f"version {verdict.champion_version}"
    reasons = "".join(f"\n- {reason}" for reason in decision.reasons or (decision.why,))
    return (
        f"# Promote {candidate.registered_name} version {candidate.version}?\n\nIts champion is {serving}. "
        f"The policy agrees:\n{reasons}"
    )
