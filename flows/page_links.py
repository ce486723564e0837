"""Ways between Prefect's pages and MLflow's, for whoever looks at a batch in one and wants the other."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from prefect.artifacts import create_markdown_artifact
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL
from prefect.utilities.urls import url_for

from ringmaster.flows.result import BatchResult
from ringmaster.flows.waiting import for_prefect
from ringmaster.model_lineage import links
from ringmaster.model_lineage.faults import LedgerError
from ringmaster.tasks.recording import Recorder

VERSION = re.compile(r"models:/([^/@]+)/(\d+)")


def flow_run_page() -> str | None:
    """Where Prefect's UI shows the flow run that we are in; None outside of any, and without a lasting server."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or PREFECT_API_URL.value() is None:
        return None
    return url_for("flow-run", obj_id=context.flow_run.id)


def show_records(recorder: Recorder, result: BatchResult) -> None:
    """Shows among the artifacts of the flow run where MLflow has the batch and its models; a file has no pages."""
    run_id, server = recorder.run_of(), recorder.ledger.tracking_uri
    if run_id is None or FlowRunContext.get() is None or not server.startswith("http"):
        return
    try:
        path = recorder.ledger.ui_links(run_id=run_id)["run"]
    except LedgerError:  # it is away: that not all is recorded is told already
        return
    text = records_markdown(result, server=server, run_path=path)
    said = "Where MLflow has the batch and its models"
    for_prefect(lambda: create_markdown_artifact(key="mlflow", markdown=text, description=said))


def records_markdown(result: BatchResult, *, server: str, run_path: str) -> str:
    """Links to the batch's run, whose path in MLflow's UI is given, and to the page of each model."""
    root = _address(server)
    lines = [f"# {result.batch} in MLflow", "", links.link("the batch: plan, metrics and files", f"{root}/{run_path}")]
    models = []
    for job in result.jobs:
        if found := VERSION.fullmatch(job["model_uri"] or ""):
            name, version = found.groups()
            page = links.link(f"{name} version {version}", f"{root}/{links.model_version_path(name, version)}")
            models.append(f"| {job['name']} | {page} |")
    return "\n".join([*lines, *(["", "| job | model |", "|---|---|", *models] if models else [])]) + "\n"


def _address(server: str) -> str:
    """A server as a page may name it: without a password that its address holds."""
    parts = urlsplit(server)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
