"""Keeps production models up to date: trains those whose data has changed, and promotes what turns out better."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from pydantic import Field

from flows import settings
from flows.approval import ask
from flows.flow_runs import cancel_batches, ended
from flows.judging import Judged, Rival, judge
from flows.promotions import open_move_log
from flows.result import BatchResult
from flows.train_batch import train_batch
from flows.views import current_view
from flows.workshop import Keep, lent_server, open_bench
from model_lineage import Ledger, ModelRecord
from tasks.batch import Batch
from tasks.cluster import Cluster, Device
from tasks.execution.journal import DONE
from tasks.execution.leases import Leases
from tasks.profiling.stage import survey_jobs
from tasks.profiling.trials import Site
from tasks.promotion.due import Due, due
from tasks.promotion.moves import MoveLog, PromotionRefused
from tasks.promotion.names import CHAMPION
from tasks.promotion.policy import Decision
from tasks.promotion.production import Production, ProductionModel, load_production, with_tokenizer_of
from tasks.promotion.report import FAILED, KEPT, PROMOTED, Verdict, markdown
from tasks.promotion.stage import Standing, leave_waiting, standings
from tasks.promotion.task import promote_task
from techniques import Job
from techniques.engine.processes import ForkServer
from techniques.surveys import Survey

LEASE_RETRY_S = 1.0


@flow(
    name="retrain-daily",
    flow_run_name="retrain {file}",
    persist_result=True,
    result_serializer="json",
    on_cancellation=[cancel_batches],
)
def retrain_daily(file: str = "examples/retraining.yaml", seed: Annotated[int, Field(ge=0)] = 0) -> dict[str, Any]:
    """Trains the production models whose data has changed, in one planned batch, and keeps the better ones.

    Args:
        file: Path of the file that lists the models, their data and how they are trained.
        seed: Of the planner.
    """
    production = load_production(Path(file))
    with _open_night(production) as night:
        checked = {model.name: night.check(model) for model in production.models}
        tonight = [check for check in checked.values() if check.due is not None and check.due.is_due]
        result = None
        if tonight:
            result = train_batch(_batch(production, tonight).to_json(), name=production.name, seed=seed)
        verdicts = night.judge(checked, result)
    report = markdown(production.name, verdicts, batch=None if result is None else result.to_json())
    create_markdown_artifact(key="retraining", markdown=report, description="What was due, and what came of it")
    status = _status(verdicts, result)
    found = {
        "name": production.name,
        "status": status,
        "models": [verdict.to_json() for verdict in verdicts],
        "batch": None if result is None else result.to_json(),
        "report": report,
    }
    failed = [f"{verdict.model} ({verdict.why})" for verdict in verdicts if verdict.outcome == FAILED]
    return ended(found, status=status, message=f"{status}: {', '.join(failed)}")


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What was found of a model before anything was trained.

    model: with the tokenizer of its champion. champion_dir: the champion's files. data: the JSON form of the prepared
    data. due: None where the data could not be read, which `fault` tells.
    """

    model: ProductionModel
    standing: Standing
    champion_dir: Path | None
    data: Mapping[str, Any] | None = None
    due: Due | None = None
    fault: str = ""


@dataclass(frozen=True, kw_only=True)
class Night:
    """The open resources of one night's work beside the training itself.

    keep: on a node of a pool, how its devices are kept free; None where leases do. moves: of aliases, begun and not
    finished.
    """

    production: Production
    cluster: Cluster
    site: Site
    ledger: Ledger
    leases: Leases
    keep: Keep | None
    models_dir: Path
    standings: Mapping[str, Standing]
    moves: MoveLog

    def check(self, model: ProductionModel) -> Checked:
        """Prepares the model's data as its champion reads it, and says whether the model is due."""
        standing = self.standings[model.registered_name]
        folder = None if standing.champion is None else self.download(standing.champion)
        model = with_tokenizer_of(folder, model)
        surveys, faults = self._survey([model.job])
        found = Checked(model=model, standing=standing, champion_dir=folder)
        if faults:
            return replace(found, fault=faults[model.name])
        data = surveys[model.name].data
        return replace(found, data=data, due=due(standing, digest=data["digest"]))

    def judge(self, checked: Mapping[str, Checked], result: BatchResult | None) -> list[Verdict]:
        """Compares every version that was not compared yet with its champion, and promotes the better ones."""
        now = self.standings
        if result is not None:
            now = standings(self.ledger, now)
        candidates = {
            name: candidate
            for name, check in checked.items()
            if check.due is not None
            and (not check.due.is_due or _status_of(name, result) == DONE)
            and (candidate := now[check.model.registered_name].candidate) is not None
        }
        judged: dict[str, Judged] = {}
        if candidates:
            rivals = self._rivals(checked, candidates)
            with self._device() as device:
                judged = judge(rivals, self.production.policy, ledger=self.ledger, site=self.site, device=device)
        return [self._verdict(check, candidates.get(name), judged.get(name), result) for name, check in checked.items()]

    def download(self, model: ModelRecord) -> Path:
        """The folder of a model's files."""
        return self.ledger.download_model(f"models:/{model.model_id}", self.models_dir)

    def _survey(self, jobs: Sequence[Job]) -> tuple[dict[str, Survey], dict[str, str]]:
        return survey_jobs(jobs, site=self.site, cluster=self.cluster, notice=current_view.get().notice)

    def _rivals(self, checked: Mapping[str, Checked], candidates: Mapping[str, ModelRecord]) -> list[Rival]:
        """Each candidate and its champion, with the held-out data on which both are compared."""
        folders = {name: self.download(candidate) for name, candidate in candidates.items()}
        # Only now is there a tokenizer by which a first candidate reads what it is compared on.
        compared = {name: with_tokenizer_of(folders[name], checked[name].model).compare_on for name in candidates}
        surveys, faults = self._survey([job for job in compared.values() if job is not None])
        rivals = []
        for name, candidate in candidates.items():
            model, job, data = checked[name].model, checked[name].model.job, checked[name].data
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
                    champion_dir=checked[name].champion_dir,
                    fault=faults.get(job.name, ""),
                )
            )
        return rivals

    def _verdict(
        self, check: Checked, candidate: ModelRecord | None, judged: Judged | None, result: BatchResult | None
    ) -> Verdict:
        """What becomes of one model; moves its aliases."""
        model, champion = check.model, check.standing.champion
        verdict = Verdict(
            model=model.name,
            why_due=check.due.why if check.due else check.fault,
            is_due=check.due is not None and check.due.is_due,
            metric=(self.production.policy and self.production.policy.metric) or model.metric,
            champion_version=None if champion is None else champion.version,
        )
        if check.due is None:
            return replace(verdict, outcome=FAILED, why=f"its data cannot be used: {check.fault}")
        if candidate is None:
            return _untrained(verdict, result)
        assert judged is not None, "every candidate is judged"
        verdict = replace(
            verdict,
            candidate_version=candidate.version,
            candidate_value=judged.candidate_value,
            champion_value=judged.champion_value,
        )
        if judged.decision is None:
            return replace(verdict, outcome=FAILED, why=judged.fault)
        return self._carry_out(verdict, candidate, judged.decision)

    def _carry_out(self, verdict: Verdict, candidate: ModelRecord, decision: Decision) -> Verdict:
        """Moves the aliases by a decision, once a person has agreed where the policy asks for one."""
        policy = self.production.policy
        who = "rule" if policy is None else f"policy {policy.name}"
        if policy is not None and policy.approval_s is not None and decision.promote:
            answer = ask(_question(verdict, candidate, decision), timeout_s=policy.approval_s)
            if answer.approved is None:
                why = f"it waits for approval: {answer.why} ({decision.why})"
                leave_waiting(self.ledger, candidate, why, who=who)
                return replace(verdict, outcome=KEPT, why=why)
            said = f"{answer.who} {'agrees' if answer.approved else 'does not agree'}"
            said += f": {answer.why}" if answer.why else ""
            reasons = (*(decision.reasons if answer.approved else ()), said)
            decision = Decision(promote=answer.approved, why=f"{decision.why}; {said}", reasons=reasons)
            who = answer.who
        try:
            promote_task(
                candidate,
                decision,
                ledger=self.ledger,
                log=self.moves,
                champion=verdict.champion_version,
                who=who,
            )
        except PromotionRefused as refused:
            return replace(verdict, outcome=FAILED, why=str(refused))
        return replace(verdict, outcome=PROMOTED if decision.promote else KEPT, why=decision.why)

    @contextmanager
    def _device(self) -> Iterator[Device]:
        """A device that nobody else uses meanwhile; waits for one. On a node of a pool it is kept with all others."""
        if self.keep is not None:
            with self.keep(current_view.get().notice):
                yield self.cluster.devices[0]
            return
        names = dict(zip(self.cluster.lease_names().values(), self.cluster.devices, strict=True))
        while not (mine := next((name for name in names if self.leases.take([name], holder="retraining")), None)):
            threading.Event().wait(LEASE_RETRY_S)
        try:
            yield names[mine]
        finally:
            self.leases.give_back([mine])


@contextmanager
def _open_night(production: Production) -> Iterator[Night]:
    """Opens what a night needs beside the training, the slow things at the same time. Raises InputError."""
    home = settings.home()
    every_job = Batch(
        name=production.name,
        jobs=tuple(production.jobs),
        devices=production.devices,
        folder=production.folder,
        text="",
    )
    with open_bench(every_job, home=home) as bench, _lent(bench.server), open_move_log() as moves:
        moves.finish_left_behind(bench.ledger)
        yield Night(
            production=production,
            cluster=bench.cluster,
            site=bench.site,
            ledger=bench.ledger,
            leases=bench.leases,
            keep=bench.hold if bench.is_pool_node else None,
            models_dir=home / "cache" / "models",
            standings=standings(bench.ledger, [model.registered_name for model in production.models]),
            moves=moves,
        )


@contextmanager
def _lent(server: ForkServer) -> Iterator[None]:
    """The night's batch uses the night's fork server."""
    token = lent_server.set(server)
    try:
        yield
    finally:
        lent_server.reset(token)


def _batch(production: Production, tonight: list[Checked]) -> Batch:
    """The due models as one batch, warm-started from their champions. Its name makes the registered names stable."""
    jobs = [
        replace(check.model.job, base=f"models:/{check.model.registered_name}@{CHAMPION}")
        if check.model.warm_start and check.standing.champion is not None
        else check.model.job
        for check in tonight
    ]
    return Batch.of(name=production.name, jobs=jobs, devices=production.devices, folder=production.folder)


def _question(verdict: Verdict, candidate: ModelRecord, decision: Decision) -> str:
    """What a person is asked, as markdown."""
    serving = "none yet" if verdict.champion_version is None else f"version {verdict.champion_version}"
    reasons = "".join(f"\n- {reason}" for reason in decision.reasons or (decision.why,))
    return (
        f"# Promote {candidate.registered_name} version {candidate.version}?\n\nIts champion is {serving}. "
        f"The policy agrees:\n{reasons}"
    )


def _untrained(verdict: Verdict, result: BatchResult | None) -> Verdict:
    """A model without a candidate: nothing was to be done, or its training failed or was interrupted."""
    if not verdict.is_due:
        return verdict
    assert result is not None, "a model that is due is in the batch"
    job = _row(verdict.model, result)
    why = "it was trained, but could not be recorded" if job["status"] == DONE else job["message"] or job["status"]
    return replace(verdict, outcome=FAILED, why=why)


def _status_of(name: str, result: BatchResult | None) -> str | None:
    """What became of a model's job tonight; None where nothing was trained."""
    return None if result is None else str(_row(name, result)["status"])


def _row(name: str, result: BatchResult) -> Mapping[str, Any]:
    return next(job for job in result.jobs if job["name"] == name)


def _status(verdicts: list[Verdict], result: BatchResult | None) -> str:
    if result is not None and result.status == "interrupted":
        return "interrupted"
    return "failed" if any(verdict.outcome == FAILED for verdict in verdicts) else "done"
