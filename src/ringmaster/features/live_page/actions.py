"""What a person does with jobs on the page, by the same functions as the commands and the forms in Prefect's UI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ringmaster.codec import to_json
from ringmaster.errors import InputError
from ringmaster.features.live_page.sources import RunSource
from ringmaster.flows.commands.pool import values_of
from ringmaster.flows.job_forms import JobForm, job_forms
from ringmaster.flows.pool.batch_requests import open_database, submit_batch
from ringmaster.flows.settings import PoolAddress
from ringmaster.tasks.batch import parse_batch
from ringmaster.tasks.batch.references import NAME_REMEDY
from ringmaster.techniques.job_features import is_name


def forms_for(jobs: Sequence[str]) -> list[dict[str, Any]]:
    """Returns what can be done with jobs of a batch, or with all ([]): the text of a button, and a form to fill in."""
    return [
        {"text": text, "form": form.__name__, "fields": dict(fields), "schema": form.model_json_schema()}
        for form in job_forms()
        for text, fields in form.links(jobs).items()
        if text and (len(jobs) < 2 or "jobs" in fields)
    ]


def request(source: RunSource, content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Makes the request of a form; returns the answers. Raises InputError with all faults.

    content: the form's name, the run and the batch, and the fields. Settings are lines such as `optimizer.lr=1e-4`.
    """
    forms = {form.__name__: form for form in job_forms()}
    form = forms.get(str(content.get("form")))
    fields = content.get("fields")
    if form is None or not isinstance(fields, Mapping):
        raise InputError([f"there is no form {content.get('form')!r} with these fields"])
    filled = _filled(form, fields)
    with source.control(str(content.get("run", "")), str(content.get("batch", ""))) as (database, batch):
        return [to_json(answer) for answer in filled.request(database, batch)]


def _filled(form: type[JobForm], fields: Mapping[str, Any]) -> JobForm:
    """Returns the form with its fields. Raises InputError with all faults."""
    properties = form.model_json_schema()["properties"]
    values = {
        key: values_of(filter(None, map(str.strip, value.splitlines())))
        if isinstance(value, str) and properties.get(key, {}).get("type") == "object"
        else value
        for key, value in fields.items()
    }
    try:
        return form(**values)
    except ValidationError as error:
        # A number that may be empty is one of two types, of which the second one, None, is not a remedy.
        errors = [each for each in error.errors() if each["type"] != "none_required"]
        raise InputError([f"{each['loc'][0]}: {each['msg']}" for each in errors]) from error


def submit(address: PoolAddress, content: Mapping[str, Any], *, folder: Path) -> dict[str, Any]:
    """Adds the jobs of a batch file's text to what the pool trains; returns their names and the page of their flow run.

    folder: in which relative paths and factories in the text are resolved.
    """
    name = str(content.get("batch", ""))
    if not is_name(name):
        raise InputError([f"batch {name!r} is not a valid name. {NAME_REMEDY}"])
    batch = replace(parse_batch(str(content.get("text", "")), folder=folder, name=name), name=name)
    with open_database(address) as database:
        flow_run = submit_batch(database, batch, notice=lambda text: None)
    page = flow_run and f"{address.prefect_api.removesuffix('/api')}/runs/flow-run/{flow_run}"
    return {"batch": name, "jobs": [job.name for job in batch.jobs], "page": page}
