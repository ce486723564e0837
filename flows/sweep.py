"""Trains one job under many hyperparameter values as one planned batch, with early stopping, and ranks the trials."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from ringmaster.errors import LedgerError, SweepFailed
from ringmaster.flows import settings, sweep_form
from ringmaster.flows.batch import flow_runs
from ringmaster.flows.batch.context import ledger_of
from ringmaster.flows.batch.embedded_prefect import FlowWithServer
from ringmaster.flows.batch.flow_runs import cancel_batches, final_state, run_name_template
from ringmaster.flows.batch.run_options import RunOptions
from ringmaster.flows.caller import Caller
from ringmaster.flows.form_fields import HIDDEN, Resume, titled
from ringmaster.flows.train_batch import run_stages
from ringmaster.tasks.batch.references import Metric
from ringmaster.tasks.sweeping.results import (
    best,
    challenge,
    figures,
    leaderboard,
    prepare_sections,
    record,
    sections,
    title_of,
    why_no_winner,
)
from ringmaster.tasks.sweeping.scheduler import SweepScheduler

EXAMPLE = sweep_form.JobFromFile(path="examples/tiny_batch.yaml", job="llama")
RATES = [sweep_form.Parameter(key="optimizer.lr", low=1e-4, high=1e-1, log=True)]


@FlowWithServer.of
@flow(
    name="sweep",
    flow_run_name=run_name_template("sweep {name}"),
    persist_result=True,
    result_serializer="json",
    on_cancellation=[cancel_batches],
)
def sweep(
    name: sweep_form.SweepName = "sweep",
    template: Annotated[sweep_form.JobFromFile | sweep_form.InlineJob, titled("Job")] = EXAMPLE,
    base: Annotated[sweep_form.Line, titled("Base model")] = "",
    data: Annotated[dict[str, Any] | None, HIDDEN] = None,
    space: Annotated[sweep_form.Space, titled("Search space")] = RATES,
    sampler: sweep_form.Sampler = "random",
    num_trials: Annotated[sweep_form.NumTrials | None, titled("Number of trials")] = 8,
    early_stopping: Annotated[sweep_form.Stopping, titled("Early stopping")] = sweep_form.Stopping(),
    objective: Annotated[Metric | None, titled("Objective")] = None,
    devices: Annotated[sweep_form.DeviceChoice, titled("Devices")] = sweep_form.DeviceChoice(),
    deadline_s: Annotated[sweep_form.Seconds | None, titled("Time limit (seconds)")] = None,
    challenger_of: Annotated[sweep_form.OtherName, titled("Challenger of")] = "",
    num_parallel: Annotated[sweep_form.NumParallel, HIDDEN] = 4,
    seed: Annotated[sweep_form.Seed, HIDDEN] = 0,
    ranking: Annotated[sweep_form.RankingKeys, titled("Constraints and objectives")] = sweep_form.NO_RANKING,
    stop_when: Annotated[sweep_form.StopWhen, titled("Ends early")] = sweep_form.NO_STOP_RULES,
    batch_keys: Annotated[dict[str, Any] | None, HIDDEN] = None,
    resume: Resume = False,
    caller: Annotated[Any, HIDDEN] = None,
) -> dict[str, Any]:
    """Trains one job under many hyperparameter values, stops trials that fall behind, and ranks the others.

    Args:
        name: The name of the sweep, and of the models that it registers.
        template: The job to vary: a job of a batch file, or one that is written out.
        base: A model that each trial starts from, such as models:/production.digits@champion. If it is empty, trials
            start from the template's own weights.
        data: The data in place of the template's, with the keys of a batch file, such as {"source": "digits"}.
        space: The values or the range of each key of the job that is varied.
        sampler: "random" draws values at random. "grid" trains every combination. "tpe" proposes values from the
            results so far.
        num_trials: The largest number of trials. It may be empty for a grid.
        early_stopping: The policy that stops weak trials early.
        objective: The metric on held-out data by which trials are compared. By default, it is the template's first.
        devices: The devices of this machine that the sweep may use.
        deadline_s: The number of seconds after which all trials stop. The best finished trial then wins.
        challenger_of: The registered model whose challenger the best trial becomes. By default, it has the sweep's
            name, which must be that of no other model.
        num_parallel: With tpe, the largest number of trials without a result when it proposes the next one.
        seed: The seed of the sampler and of the planner. A job's own seed is a key that can be searched.
        ranking: Bounds of metrics that the best trial must keep, and several objectives in place of one.
        stop_when: When the sweep ends before all its trials have. Without it, the sweep only says when it should.
        batch_keys: Keys of optional features for the batch of the trials, such as {"trackers": ["tensorboard"]}.
        resume: Continues the last run of this sweep, which was interrupted, from its checkpoints.
        caller: The `Caller` of the flow, in Python.
    """
    form = sweep_form.Sweep(
        name=name,
        template=template,
        base=base,
        data=data,
        space=space,
        sampler=sampler,
        num_trials=num_trials,
        early_stopping=early_stopping,
        objective=objective,
        devices=devices,
        deadline_s=deadline_s,
        challenger_of=challenger_of,
        num_parallel=num_parallel,
        seed=seed,
        ranking=ranking,
        stop_when=stop_when,
        batch_keys=batch_keys or {},
    )
    spec = sweep_form.spec_of(form)
    caller = caller or Caller()
    sweep_form.check_name(form, ledger_of(settings.home(), notice=caller.view.notice))
    sweep_scheduler = SweepScheduler(spec, stop_rules=form.stop_rules(), notice=caller.view.notice)
    sweep_scheduler.on_first_done = partial(prepare_sections, len(spec.trials))
    options = RunOptions(resume=resume, seed=seed)
    result = run_stages(spec.batch(), options, sweep_scheduler=sweep_scheduler, caller=caller)
    added = [row["name"] for row in result.jobs if row["name"] not in spec.trials]
    rows = leaderboard(
        [*spec.trials, *added],
        ranking=spec.ranking,
        values=sweep_scheduler.trial_values(),
        reports=sweep_scheduler.reports,
        jobs=result.jobs,
        further=sweep_scheduler.records.columns(sweep_scheduler.reports),
    )
    won = best(rows)
    folder = next((row["model_dir"] for row in result.jobs if won and row["name"] == won["job"]), None)
    without_winner = why_no_winner(sweep_scheduler, rows)
    status = sweep_status(result.status, has_winner=not without_winner)
    added_sections = sections(sweep_scheduler, rows)
    notes = [*filter(None, [without_winner]), *(line for section in added_sections for line in section.lines)]
    drawn = figures(sweep_scheduler, rows)
    for section in added_sections:
        drawn |= section.figures
    results = {
        "name": name,
        "status": status,
        "metric": spec.objective,
        "best": won,
        "folder": folder,
        "leaderboard": rows,
        **{section.key: section.value for section in added_sections},
        "notes": notes,
        **_recorded(
            sweep_scheduler,
            rows,
            drawn=drawn,
            notes=notes,
            folder=folder,
            challenger_of=challenger_of,
            faults=result.faults,
            caller=caller,
        ),
        "batch": result.to_json(),
    }
    message = "; ".join(filter(None, [without_winner, result.summary()]))
    return final_state(results, status=status, message=message, failure=SweepFailed)


def sweep_status(batch_status: str, *, has_winner: bool) -> str:
    """Returns the status of a sweep: a failed trial fails its batch, but not the sweep if another trial has won.

    It is a regular finding of a sweep that some values train badly or not at all.
    """
    has_ended = batch_status in ("done", "failed")
    return batch_status if not has_ended else "done" if has_winner else "failed"


def winner_lines(won: Mapping[str, Any], *, folder: str | None, challenger: str | None) -> list[str]:
    """Returns lines of Markdown about the best trial: where its model is, and the commands that use it.

    won: its row of the leaderboard. folder: its model, if one was exported. challenger: its version, if registered.
    """
    lines = [] if folder is None else [f"Its model, a folder that `from_pretrained` reads: `{folder}`"]
    if challenger is not None:
        name = f"{challenger.removeprefix('models:/').rpartition('/')[0]}@challenger"
        lines.append(f"{won['job']} is the challenger now: `{challenger}`. What uses it:")
        lines.append(f"- `ringmaster export {name} FOLDER` copies it")
        lines.append(f"- `ringmaster promote {name} --policy FILE --data DATA` compares it with the champion")
    return lines


def _recorded(
    sweep_scheduler: SweepScheduler,
    rows: Sequence[Mapping[str, Any]],
    *,
    drawn: Mapping[str, str],
    notes: Sequence[str],
    folder: str | None,
    challenger_of: str,
    faults: Sequence[str],
    caller: Caller,
) -> dict[str, Any]:
    """Shows and records the results of a sweep; returns its MLflow run, the challenger, and the recording faults.

    drawn: the figures. notes: what is said of the results. folder: the model of the best trial. faults: what could not
    be recorded of its trials.
    """
    won, faults, notice = best(rows), list(faults), caller.view.notice
    ledger = settings.ledger(settings.home(), waiting=flow_runs.for_mlflow(notice))
    where, challenger = None, None
    try:
        if sweep_scheduler.run_id is not None:
            record(ledger, sweep_scheduler.run_id, rows, drawn, lines=notes)
            where = ledger.ui_links(run_id=sweep_scheduler.run_id)["run"]
        if won is not None and won["model"] is not None:
            challenger = challenge(
                ledger, won["model"], sweep=sweep_scheduler.spec.name, challenger_of=challenger_of
            ).uri
    except LedgerError as error:
        faults.append(str(error))
    uri = ledger.tracking_uri
    link = f"[The sweep in MLflow]({uri}/{where})" if where and uri.startswith("http") else ""
    encoded = {path: b64encode(svg.encode()).decode() for path, svg in drawn.items()}
    pictures = [f"![{title_of(path)}](data:image/svg+xml;base64,{data})" for path, data in encoded.items()]
    lines = [] if won is None else winner_lines(won, folder=folder, challenger=challenger)
    page, table = "\n\n".join([*lines, *notes, link, *pictures]), [dict(row) for row in rows]
    about = "The results of the trials"
    flow_runs.for_prefect(lambda: create_markdown_artifact(page, key="sweep", description=about), notice)
    order = "The trials, the best first"
    flow_runs.for_prefect(
        lambda: create_table_artifact(key="leaderboard", table=table, description=order), notice=notice
    )
    return {"run": sweep_scheduler.run_id, "challenger": challenger, "faults": faults}
