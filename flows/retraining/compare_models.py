"""Comparison of candidates with their champions, by a policy or by the plain rule, and the outcome of each model.

A model is promoted, kept, left or failed.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from ringmaster.codec import from_json
from ringmaster.errors import InputError, PromotionRefused, retry_may_help
from ringmaster.flows import settings
from ringmaster.flows.batch.result import BatchResult
from ringmaster.flows.lineage.home import LineageHome
from ringmaster.flows.retraining.approval import ask
from ringmaster.flows.retraining.retraining_run import RetrainingRun
from ringmaster.flows.retraining.select_models import InspectedModel, SelectedModels, trained_of
from ringmaster.flows.retraining.shrinking import replacement_child
from ringmaster.flows.retraining.train_models import keep_trained, row_of, train_children
from ringmaster.model_lineage import Ledger, ModelRecord
from ringmaster.model_lineage.records import CHAMPION, KEPT, PROMOTED
from ringmaster.model_lineage.snapshot import LineageNode
from ringmaster.tasks.alarms.prefect_events import emit_alarm
from ringmaster.tasks.cluster import Device
from ringmaster.tasks.evaluation.examination import ExaminationRequest, ExaminationResult, examine
from ringmaster.tasks.evaluation.scores import score_models
from ringmaster.tasks.evaluation.suite import Suite
from ringmaster.tasks.retraining.drift import references_of, scored_features
from ringmaster.tasks.retraining.policy import OF_POLICY, PLAIN_RULE, PromotionDecision, decide_by
from ringmaster.tasks.retraining.production import ProductionModel, with_tokenizer_of
from ringmaster.tasks.retraining.promotion import (
    MoveLog,
    ServingVersions,
    apply,
    lasting,
    leave_waiting,
    read_decisions,
)
from ringmaster.tasks.retraining.report import FAILED, LEFT, ModelResult
from ringmaster.tasks.storage.journal import JobStatus
from ringmaster.techniques import Job
from ringmaster.techniques.scoring.scored_rows import TrainingData, read_alike, read_by
from ringmaster.text import markdown

MAX_SCORED = 2000  # held-out rows, for the reference of predictions


def compare_models(
    run: RetrainingRun,
    checks: Mapping[str, InspectedModel],
    chosen: SelectedModels,
    result: BatchResult | None,
    *,
    seed: int = 0,
) -> list[ModelResult]:
    """Compares every version that was not compared yet with its champion, and promotes the better ones.

    Each result is saved as soon as it takes effect: a process that resumes the run starts with the next model.
    """
    known = {name: from_json(ModelResult, value) for name, value in run.content.get("verdicts", {}).items()}
    left = {name: check for name, check in checks.items() if name not in known}
    now = run.standings()
    candidates = {
        name: candidate
        for name, check in left.items()
        if name not in run.content.get("refused", {})
        and _is_to_be_compared(check, chosen, result)
        and (candidate := now[check.model.registered_name].candidate) is not None
    }
    verdicts: dict[str, CandidateVerdict] = {}
    rivals: Mapping[str, ComparedCandidate] = {}
    if candidates:
        rivals = _rivals(run, checks, candidates)
        with run.device() as device:
            verdicts = judge(run, rivals.values(), device)
            for name, candidate in candidates.items():
                if verdicts[name].decision is not None:
                    _keep_predictions(run, checks[name], candidate, device=device)
    for name, check in left.items():
        if name in candidates:
            try:
                candidate, verdict = _child_in_place_of(run, rivals[name], verdicts[name], seed=seed)
                known[name] = _apply_verdict(run, check, candidate, verdict)
            except (ValueError, OSError) as error:
                known[name] = replace(_model_result(run, check), outcome=FAILED, why=lasting(error))
        else:
            known[name] = _not_compared(run, check, now[check.model.registered_name], chosen, result)
        run.save(verdicts={other: model_result.to_json() for other, model_result in known.items()})
    for name, fault in run.production.broken.items():
        known[name] = ModelResult(model=name, is_due=False, why_due="", metric="", outcome=FAILED, why=fault)
    return list(known.values())


def interrupted(run: RetrainingRun, checks: Mapping[str, InspectedModel], result: BatchResult) -> list[ModelResult]:
    """Returns the results of a run whose batch was interrupted: nothing was compared, and nothing is decided."""
    why = "the retraining run was interrupted; the same command resumes it"
    return [
        replace(_model_result(run, check), outcome=FAILED, why=why)
        if row_of(name, result) is not None
        else _model_result(run, check)
        for name, check in checks.items()
    ]


def _is_to_be_compared(check: InspectedModel, chosen: SelectedModels, result: BatchResult | None) -> bool:
    """Returns whether a model's newest version was trained by this run, or was left uncompared by an earlier one."""
    if check.due is None:
        return False
    if not check.due.is_due or not chosen.trains(check.model.name):
        return not check.due.is_due
    if result is None:  # an earlier process of this run has trained it
        return True
    rows = (row_of(job.name, result) for job in check.model.trained_jobs)
    return any(row is not None and row["status"] == JobStatus.DONE for row in rows)


def _model_result(run: RetrainingRun, check: InspectedModel) -> ModelResult:
    policy, champion = run.production.policy, check.serving.champion
    return ModelResult(
        model=check.model.name,
        why_due=check.due.why if check.due else "",
        is_due=check.due is not None and check.due.is_due,
        metric=(policy and policy.metric) or check.model.metric,
        champion_version=None if champion is None else champion.version,
        notes=check.due.notes if check.due else (),
    )


def _not_compared(
    run: RetrainingRun, check: InspectedModel, now: ServingVersions, chosen: SelectedModels, result: BatchResult | None
) -> ModelResult:
    """Returns the result of a model without a candidate: not due, waiting, failed, or decided before."""
    model_result, name = _model_result(run, check), check.model.name
    if check.due is None:
        return replace(model_result, outcome=FAILED, why=f"it cannot be inspected: {check.fault}")
    if not model_result.is_due:
        return model_result
    if name in chosen.unfit:
        return replace(model_result, outcome=FAILED, why=chosen.unfit[name])
    if not chosen.trains(name):
        return replace(model_result, outcome=LEFT, why=chosen.left.get(name, ""))
    if (refused := run.content.get("refused", {}).get(name)) is not None:
        return replace(model_result, outcome=FAILED, why=refused)
    if name in run.content.get("gone", ()):
        why = "its champion was deleted from the registry during the retraining run; the next one handles it"
        return replace(model_result, outcome=FAILED, why=why)
    row = None if result is None else row_of(name, result)
    if row is not None and row["status"] != JobStatus.DONE:
        return replace(model_result, outcome=FAILED, why=row["message"] or row["status"])
    return _decided_before(run, check, now, model_result)


def _decided_before(
    run: RetrainingRun, check: InspectedModel, now: ServingVersions, model_result: ModelResult
) -> ModelResult:
    """Returns the result that an earlier process of this run decided, and did not save before it died."""
    newest = now.latest
    if newest is not None and check.has_made(newest) and (made := read_decisions(run.ledger, newest)):
        return replace(
            model_result,
            outcome=PROMOTED if made[-1].outcome == PROMOTED else KEPT,
            why="; ".join(made[-1].reasons),
            candidate_version=newest.version,
            champion_version=made[-1].champion_before,
        )
    return replace(model_result, outcome=FAILED, why="it was trained, but could not be recorded")


def _rivals(
    run: RetrainingRun, checks: Mapping[str, InspectedModel], candidates: Mapping[str, ModelRecord]
) -> dict[str, ComparedCandidate]:
    """Returns each candidate with its champion, and the data on which both are compared."""
    folders, lost = dict[str, Path](), dict[str, str]()
    for name, candidate in candidates.items():
        try:
            folders[name] = run.download(candidate)
        except (ValueError, OSError) as error:
            lost[name] = lasting(error)
    # The tokenizer with which a first candidate reads the comparison data exists only now.
    compared = {name: with_tokenizer_of(folders.get(name), checks[name].model).compare_on for name in candidates}
    others = [job for job in compared.values() if job is not None]
    preflights, faults = run.preflight(others, evaluated=[job.name for job in others])
    rivals = {}
    for name, candidate in candidates.items():
        model, job, data = checks[name].model, checks[name].model.job, checks[name].data
        trained_on: TrainingData | None = None
        if (other := compared[name]) is not None:
            trained_on = TrainingData(spec=job.data, prepared=data or {})
            job, data = other, preflights[other.name].data if other.name in preflights else None
        rivals[name] = ComparedCandidate(
            model=model,
            job=job,
            data=None if name in lost else data,
            trained_on=trained_on,
            candidate=candidate,
            candidate_dir=folders.get(name, Path()),
            champion_dir=checks[name].champion_dir,
            fault=lost.get(name) or faults.get(job.name, ""),
        )
    return rivals


def _child_in_place_of(
    run: RetrainingRun, rival: ComparedCandidate, verdict: CandidateVerdict, *, seed: int
) -> tuple[ModelRecord, CandidateVerdict]:
    """Returns the model that is decided on, and the verdict: of a candidate that breaks a limit, its smaller child.

    Where no known child keeps every rule, some are trained if the file of models requests it.
    """
    policy, decision = run.production.policy, verdict.decision
    if policy is None or decision is None or not policy.broken_limits(decision.figures):
        return rival.candidate, verdict
    home = LineageHome(folder=settings.home(), is_fresh=True)
    node = home.find(rival.candidate.uri.removeprefix("models:/"))

    def decisions(home: LineageHome, nodes: Iterable[LineageNode]) -> Generator[PromotionDecision]:
        with run.device() as device:
            for node in nodes:
                child = replace(rival, candidate=node.record, candidate_dir=home.model_dir(node))
                child_verdict = judge(run, [child], device)[rival.model.name]
                yield child_verdict.decision or PromotionDecision(
                    promote=False, why=child_verdict.fault, reasons=(child_verdict.fault,)
                )

    try:
        node, decision = replacement_child(
            home,
            node,
            policy,
            decision,
            judge=decisions,
            notice=run.caller.view.notice,
            train=partial(train_children, run, seed=seed) if run.production.entry.shrink else None,
            remedy="`shrink: true` in the file of models trains some",
        )
    except InputError as error:  # why none can be trained
        decision = replace(decision, reasons=(*decision.reasons, *error.faults))
    if node.record.model_id != rival.candidate.model_id and (kept := trained_of(run, rival.candidate)) is not None:
        keep_trained(run, node.record, kept)
    return node.record, replace(verdict, decision=replace(decision, why="; ".join(decision.reasons)))


def _keep_predictions(run: RetrainingRun, check: InspectedModel, candidate: ModelRecord, *, device: Device) -> None:
    """Stores a candidate's predictions on held-out rows, if later runs are to measure the drift of predictions."""
    kept, rule = trained_of(run, candidate), check.model.rules.drift
    if rule is None or rule.predictions is None or kept is None or kept.predictions:
        return
    job, environment = check.model.job, run.node_context.environment
    folder = {"candidate": run.download(candidate)}
    scored = score_models(folder, job=job, data=check.data, max_rows=MAX_SCORED, environment=environment, device=device)
    if (scores := scored.scores.get("candidate")) is not None:
        keep_trained(run, candidate, replace(kept, predictions=references_of(scored_features(scores))))


def _apply_verdict(
    run: RetrainingRun, check: InspectedModel, candidate: ModelRecord, verdict: CandidateVerdict
) -> ModelResult:
    """Returns the result of a candidate by its verdict, and moves the aliases if it has a decision."""
    model_result = replace(_model_result(run, check), candidate_version=candidate.version)
    model_result = replace(model_result, notes=(*model_result.notes, *verdict.notes))
    if verdict.decision is None:
        return replace(model_result, outcome=FAILED, why=verdict.fault)
    if (line := verdict.decision.compared) is not None:
        model_result = replace(
            model_result,
            candidate_value=line.value,
            champion_value=line.other,
            num_rows=line.num_rows,
            gain=line.gain,
            gain_low=line.gain_low,
            gain_high=line.gain_high,
        )
    return _move_if_approved(run, model_result, candidate, verdict.decision)


def _move_if_approved(
    run: RetrainingRun, model_result: ModelResult, candidate: ModelRecord, decision: PromotionDecision
) -> ModelResult:
    """Moves the aliases by a decision, once a person has approved it if the policy requires that."""
    policy = run.production.policy
    who = PLAIN_RULE.name if policy is None else OF_POLICY + policy.name
    if policy is not None and policy.approval_s is not None and decision.promote:
        answer = ask(_question(model_result, candidate, decision), timeout_s=policy.approval_s)
        if answer.approved is None:
            why = f"it waits for approval: {answer.why} ({decision.why})"
            leave_waiting(run.ledger, candidate, why, who=who)
            return replace(model_result, outcome=KEPT, why=why, is_waiting=True)
        text = f"{answer.who} {'agrees' if answer.approved else 'does not agree'}"
        text += f": {answer.why}" if answer.why else ""
        reasons = (*(decision.reasons if answer.approved else ()), text)
        decision = PromotionDecision(promote=answer.approved, why=f"{decision.why}; {text}", reasons=reasons)
        who = answer.who
    try:
        promote_task(
            candidate, decision, ledger=run.ledger, log=run.moves, champion=model_result.champion_version, who=who
        )
    except PromotionRefused as refused:
        return replace(model_result, outcome=FAILED, why=str(refused))
    return replace(model_result, outcome=PROMOTED if decision.promote else KEPT, why=decision.why)


def _question(model_result: ModelResult, candidate: ModelRecord, decision: PromotionDecision) -> str:
    """Returns the question for a person, as markdown."""
    serving = "none yet" if model_result.champion_version is None else f"version {model_result.champion_version}"
    reasons = "".join(f"\n- {markdown(reason)}" for reason in decision.reasons or (decision.why,))
    return (
        f"# Promote {markdown(candidate.registered_name)} version {candidate.version}?\n\nIts champion is {serving}. "
        f"The policy agrees:\n{reasons}"
    )


@dataclass(frozen=True, kw_only=True)
class ComparedCandidate:
    """A candidate that is to be compared with its champion, on `data`.

    model: the model of the production file.
    job: the job with the data to compare on.
    data: the JSON form of prepared data; None if the candidate cannot be evaluated.
    trained_on: the data of the candidate, whose rows are left out of other data; None for the candidate's own.
    candidate, candidate_dir: record and files of the candidate.
    champion_dir: files of the champion; None if the candidate is the first one.
    fault: why the data or the candidate's files cannot be read.
    """

    model: ProductionModel
    job: Job
    data: Mapping[str, Any] | None
    trained_on: TrainingData | None = None
    candidate: ModelRecord
    candidate_dir: Path
    champion_dir: Path | None
    fault: str = ""


@dataclass(frozen=True, kw_only=True)
class CandidateVerdict:
    """The decision on a candidate.

    decision: the decision; None if the candidate could not be evaluated.
    fault: why it could not be evaluated.
    notes: what users should inspect.
    """

    decision: PromotionDecision | None = None
    fault: str = ""
    notes: tuple[str, ...] = ()


def judge(run: RetrainingRun, rivals: Iterable[ComparedCandidate], device: Device) -> dict[str, CandidateVerdict]:
    """Returns the decision on each rival, by its name."""
    result = {}
    for rival in rivals:
        fault = rival.fault
        if rival.data is not None:
            try:
                result[rival.model.name] = _verdict_of(run, rival, rival.data, device=device)
                continue
            except (ValueError, OSError) as error:
                fault = lasting(error)
        result[rival.model.name] = CandidateVerdict(fault=f"the candidate cannot be evaluated: {fault}")
    return result


def _verdict_of(
    run: RetrainingRun, rival: ComparedCandidate, data: Mapping[str, Any], *, device: Device
) -> CandidateVerdict:
    """Decides by the policy or the plain rule, and records what was found on the run that made the candidate."""
    policy, environment = run.production.policy, run.node_context.environment
    rule = policy or PLAIN_RULE
    metric, is_whole = rule.metric or rival.model.metric, rival.model.compares_on_all
    max_rows = rule.max_rows if policy is None or is_whole else policy.num_rows
    environment = replace(environment, import_paths=tuple(dict.fromkeys([*environment.import_paths, str(rule.folder)])))
    result: list[ExaminationResult] = [
        examine_task(
            rival.model.name,
            rival.candidate_dir,
            ExaminationRequest(
                against=rival.champion_dir,
                against_job=_champion_job(rival),
                job=rival.job,
                data=data,
                suite=suite,
                metrics=list(dict.fromkeys([metric, *rival.job.evaluation.metrics, *rule.limits])),
                max_rows=max_rows,
                is_whole=is_whole,
                trained_on=rival.trained_on,
                environment=environment,
                device=device,
                folder=rule.folder,
            ),
        )
        for suite in rule.suites or (Suite(name="metrics"),)
    ]
    if policy is None and (faults := [fault for examined in result for fault in examined.faults]):
        return CandidateVerdict(fault=f"it cannot be compared: {'; '.join(faults)}")
    for examined in result:
        label = None if rival.champion_dir is None else CHAMPION
        examined.record(run.ledger, rival.candidate, other=label, notice=run.caller.view.notice)
    decision = decide_by(
        rule, result, metric=metric, is_first=rival.champion_dir is None, min_gain=rival.model.min_gain
    )
    return CandidateVerdict(
        decision=decision, notes=tuple(_left_out(rival, data, result[0].num_rows, max_rows=max_rows))
    )


def _champion_job(rival: ComparedCandidate) -> Job | None:
    """Returns the job by which the champion reads the rows; None where it reads them as the candidate does."""
    data, champion = rival.job.data, rival.champion_dir
    if champion is None or read_alike(data, rival.candidate_dir, champion):
        return None
    return replace(rival.job, data=read_by(data, champion))


def _left_out(
    rival: ComparedCandidate, data: Mapping[str, Any], num_rows: int, *, max_rows: int | None
) -> Sequence[str]:
    """Returns a note on the rows that are not compared on, as the candidate is trained on them."""
    is_whole = rival.model.compares_on_all
    every = data["num_held_out"] + (data["num_samples"] if is_whole else 0)
    if max_rows is None and not is_whole:
        max_rows = rival.job.max_evaluated_rows
    if rival.trained_on is None or not num_rows or num_rows >= min(every, max_rows or every):
        return ()
    return (
        f"{every - num_rows} of the {every} rows of compare_on are trained on too, and were left out of the comparison",
    )


# -- the tasks in Prefect ----------------------------------------------------------------------------------------------


@task(
    name="examine",
    task_run_name="examine {name}",
    retries=1,
    retry_condition_fn=retry_may_help,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def examine_task(name: str, model: Path, request: ExaminationRequest) -> ExaminationResult:
    """Examines the model in a folder. name: of the model, for the name of the task's run."""
    return examine(model, request)


# Moving aliases again changes nothing, so the task may be retried after any failure.
@task(
    name="promote",
    task_run_name="promote {candidate.registered_name}",
    retries=2,
    retry_delay_seconds=[1, 5],
    retry_condition_fn=retry_may_help,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def promote_task(
    candidate: ModelRecord, decision: PromotionDecision, *, ledger: Ledger, log: MoveLog, champion: int | None, who: str
) -> None:
    """Moves the aliases of a registered model by a decision, and records the decision.

    A candidate that does not become champion raises an alarm.
    """
    apply(ledger, candidate, decision, log=log, champion=champion, who=who, emit_alarm=emit_alarm)
