"""Links between Prefect's and MLflow's pages of a batch."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from prefect.artifacts import create_markdown_artifact
from prefect.utilities.urls import url_for

from ringmaster.errors import LedgerError
from ringmaster.flows.batch.flow_runs import current_flow_run
from ringmaster.flows.batch.result import BatchResult
from ringmaster.flows.batch.waiting import for_prefect
from ringmaster.flows.services.embedded_server import has_lasting_server
from ringmaster.model_lineage import model_pages
from ringmaster.tasks.recording.async_recorder import AsyncRecorder
from ringmaster.text import markdown

VERSION = re.compile(r"models:/([^/@]+)/(\d+)")


def flow_run_page() -> str | None:
    """Returns the URL of the current flow run in Prefect's UI; None outside a flow run or without a lasting server."""
    run = current_flow_run()
    return url_for("flow-run", obj_id=run.id) if run is not None and has_lasting_server() else None


def show_records(recorder: AsyncRecorder, result: BatchResult) -> None:
    """Shows the MLflow pages of the batch and its models among the flow run's artifacts; only a server has pages."""
    run_id, server = recorder.run_of(), recorder.ledger.tracking_uri
    if run_id is None or current_flow_run() is None or not server.startswith("http"):
        return
    try:
        path = recorder.ledger.ui_links(run_id=run_id)["run"]
    except LedgerError:  # MLflow is away: incomplete records are reported elsewhere
        return
    text = records_markdown(result, server=server, run_path=path)
    said = "Where MLflow has the batch and its models"
    for_prefect(lambda: create_markdown_artifact(key="mlflow", markdown=text, description=said))


def records_markdown(result: BatchResult, *, server: str, run_path: str) -> str:
    """Returns links to the batch's run, at `run_path` in MLflow's UI, and to the page of each model."""
    root = _address(server)
    lines = [
        f"# {markdown(result.batch)} in MLflow",
        "",
        model_pages.link("the batch: plan, metrics and files", f"{root}/{run_path}"),
    ]
    models = []
    for job in result.jobs:
        if found := VERSION.fullmatch(job["model_uri"] or ""):
            name, version = found.groups()
            page = model_pages.link(
                f"{name} version {version}", f"{root}/{model_pages.model_version_path(name, version)}"
            )
            models.append(f"| {markdown(job['name'])} | {page} |")
    return "\n".join([*lines, *(["", "| job | model |", "|---|---|", *models] if models else [])]) + "\n"


def _address(server: str) -> str:
    """Returns a server's URL as a page may show it, without credentials."""
    parts = urlsplit(server)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
