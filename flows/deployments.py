"""Sets up a pool's Prefect server: `python -m ringmaster.flows.deployments`.

The command makes the work pool, the deployments of prefect.yaml, the automation that marks flow runs without a
heartbeat as crashed, and the automations that send alarms. It is idempotent.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import UUID

import yaml
from prefect import Flow
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import actions
from prefect.client.schemas.objects import ConcurrencyOptions, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.events.actions import ActionTypes, ChangeFlowRunState, DoNothing, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.utilities.callables import parameter_schema
from prefect.workers.base import BaseWorker
from prefect.workers.process import ProcessWorker

from ringmaster.codec import from_json
from ringmaster.errors import InputError
from ringmaster.flows import settings
from ringmaster.flows.output import notice, report_faults
from ringmaster.flows.pool.node import serve_node, wait_for
from ringmaster.flows.pool.segment_runs import NODE_DEPLOYMENT
from ringmaster.flows.settings import NOTIFY
from ringmaster.tasks import alarms
from ringmaster.tasks.pool.engines import NodeDeployment

BLOCK = "ringmaster-alarms"
"""Name of the block that is made from a webhook's URL."""
SUBJECTS = {
    "ringmaster-batch-failed": ("A batch has failed", {alarms.BATCH_FAILED}),
    "ringmaster-deadline-in-danger": ("A deadline is in danger", {alarms.DEADLINE_IN_DANGER}),
    "ringmaster-device-lost": ("A device is lost", {alarms.DEVICE_LOST}),
    "ringmaster-promotion-refused": ("A model is not promoted", {alarms.PROMOTION_REFUSED}),
    "ringmaster-retraining-failed": ("A retraining run has failed", {alarms.RETRAINING_FAILED}),
}
BODY = "{{ event.payload.message }}"


def make_alarms(client: SyncPrefectClient, notify: str | None = None) -> None:
    """Makes the automations of all alarms.

    notify: target of the notifications; by default the environment's.

    Without a target, missing automations are made without an action, and existing ones stay as users have set them in
    Prefect's pages. Raises InputError if the notification block does not exist.
    """
    value = notify or os.environ.get(NOTIFY)
    block = _block(client, value) if value else None
    for name, (subject, events) in SUBJECTS.items():
        if block is None and client.read_automations_by_name(name):
            continue
        action: ActionTypes = DoNothing()
        if block is not None:
            action = SendNotification(block_document_id=block, subject=f"Ringmaster: {subject}", body=BODY)
        trigger = EventTrigger(
            expect=events,
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        )
        text = f"{subject}. Made by `ringmaster up`; {NOTIFY} defines the recipient."
        _make(client, AutomationCore(name=name, description=text, trigger=trigger, actions=[action]))


def _make(client: SyncPrefectClient, automation: AutomationCore) -> None:
    """Creates an automation, or updates those of its name."""
    known = client.read_automations_by_name(automation.name)
    for each in known:
        client.update_automation(each.id, automation)
    if not known:
        client.create_automation(automation)


def _block(client: SyncPrefectClient, target: str) -> UUID:
    """Returns the id of the notification block that a setting names."""
    if "://" in target:
        text = {"text": "{{subject}}: {{body}}", "subject": "{{subject}}", "message": "{{body}}"}
        webhook = CustomWebhookNotificationBlock(name=BLOCK, url=target, json_data=text, headers=None, cookies=None)
        return UUID(str(webhook.save(BLOCK, overwrite=True)))
    slug, slash, name = target.partition("/")
    if not slash:
        remedy = "write a webhook's address, or TYPE/NAME of a notification block, such as slack-webhook/on-call"
        raise InputError([f"{NOTIFY}: {target!r} is neither an address nor a block. To fix: {remedy}"])
    try:
        return client.read_block_document_by_name(name, slug).id
    except ObjectNotFound as error:
        remedy = "make it in Prefect's pages under Blocks, or by `prefect block create`"
        raise InputError([f"{NOTIFY}: Prefect has no block {target!r}. To fix: {remedy}"]) from error


# Deployments of earlier releases: those that were listed among those for users, and those that `control-jobs` replaces.
FORMER = (
    *("segment/segment", "profile-node/profile-node", "cancel-jobs/cancel-jobs", "pause-jobs/pause-jobs"),
    *("resume-jobs/resume-jobs", "set-priority/set-priority"),
)
PROJECT = Path(__file__).absolute().parents[1]
AUTOMATION = "ringmaster-silent-runs"
# A server that restarts receives no heartbeats for a minute. That must not count as the silence of the runs.
SILENT_AFTER = timedelta(seconds=150)
# By default, 180 s are between two heartbeats.
HEARTBEAT = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}


def make_work_pool(client: SyncPrefectClient, name: str) -> None:
    """Creates or updates the work pool, in which each node has a queue, with the base job template of this Prefect
    version.
    """
    template = ProcessWorker.get_default_base_job_template()
    try:
        client.create_work_pool(actions.WorkPoolCreate(name=name, type=ProcessWorker.type, base_job_template=template))
    except ObjectAlreadyExists:
        client.update_work_pool(name, actions.WorkPoolUpdate(base_job_template=template))


def make_automation(client: SyncPrefectClient) -> None:
    """Makes the automation that marks a flow run as crashed when its heartbeats stop: its process died with its
    machine.
    """
    # A suspended run has no process either. It waits for a person, so its missing heartbeat is not a crash.
    states = ("Completed", "Failed", "Cancelled", "Crashed", "Suspended", "Paused")
    at_rest = {f"prefect.flow-run.{state}" for state in states}
    trigger = EventTrigger(
        match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
        for_each={"prefect.resource.id"},
        after={"prefect.flow-run.heartbeat"},
        expect={"prefect.flow-run.heartbeat", *at_rest},
        posture=Posture.Proactive,
        threshold=1,
        within=SILENT_AFTER,
    )
    action = ChangeFlowRunState(
        state=StateType.CRASHED,
        name="Crashed",
        message=f"no sign of life for {SILENT_AFTER.total_seconds():.0f} s",
        force=False,
    )
    _make(client, AutomationCore(name=AUTOMATION, trigger=trigger, actions=[action]))


def keep_own_retraining(client: SyncPrefectClient, deploy: Callable[[], None]) -> None:
    """Runs `deploy`, then restores the retraining deployment's file and schedules as users have set them.

    `deploy` resets both to those in prefect.yaml, which is an example without an active schedule.
    """
    before = _retraining(client)
    deploy()
    after = _retraining(client)
    if before is not None and after is not None and before.parameters.get("file") != after.parameters.get("file"):
        schedules = [actions.DeploymentScheduleUpdate(schedule=s.schedule, active=s.active) for s in before.schedules]
        client.update_deployment(after.id, actions.DeploymentUpdate(parameters=before.parameters, schedules=schedules))


def _retraining(client: SyncPrefectClient) -> DeploymentResponse | None:
    try:
        return client.read_deployment_by_name("retrain-daily/retrain-daily")
    except ObjectNotFound:
        return None


def deploy(client: SyncPrefectClient) -> None:
    """Makes or updates the deployments that prefect.yaml names, in a third of the time of `prefect deploy --all`."""
    value = yaml.safe_load((PROJECT / "prefect.yaml").read_text())
    for each in value["deployments"]:
        module, _, name = each["entrypoint"].rpartition(".")
        flow: Flow[..., Any] = getattr(import_module(module), name)
        limit, pool = each.get("concurrency_limit") or {}, each["work_pool"]
        schedules = [
            actions.DeploymentScheduleCreate(
                schedule=CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"]), active=schedule["active"]
            )
            for schedule in each.get("schedules", [])
        ]
        client.create_deployment(
            flow_id=client.create_flow_from_name(flow.name),
            name=each["name"],
            entrypoint=each["entrypoint"],
            description=each["description"],
            tags=each["tags"],
            parameters=each.get("parameters", {}),
            parameter_openapi_schema=parameter_schema(flow).model_dump_for_openapi(),
            enforce_parameter_schema=True,
            schedules=schedules,
            concurrency_limit=limit.get("limit"),
            concurrency_options=ConcurrencyOptions(collision_strategy=limit["collision_strategy"]) if limit else None,
            work_pool_name=pool["name"],
            work_queue_name=pool.get("work_queue_name"),
            job_variables=pool["job_variables"],
            pull_steps=value["pull"],
        )
    for former in FORMER:
        with suppress(ObjectNotFound):
            client.delete_deployment(client.read_deployment_by_name(former).id)


def make_node_deployment(client: SyncPrefectClient, nodes: NodeDeployment) -> None:
    """Makes or updates the deployment whose flow runs serve lent nodes.

    The work pool is made where it is missing. Its base job template stays as users have edited it, unless another one
    is given.
    """
    template = json.loads(nodes.template) if nodes.template else None
    try:
        client.read_work_pool(nodes.work_pool)
    except ObjectNotFound:
        of_type = template or _template_of(nodes.work_pool_type)
        pool = actions.WorkPoolCreate(name=nodes.work_pool, type=nodes.work_pool_type, base_job_template=of_type)
        with suppress(ObjectAlreadyExists):  # its worker, which starts at the same time, makes it, too
            client.create_work_pool(pool)
    if template is not None:
        client.update_work_pool(nodes.work_pool, actions.WorkPoolUpdate(base_job_template=template))
    client.create_deployment(
        flow_id=client.create_flow_from_name(serve_node.name),
        name=NODE_DEPLOYMENT,
        entrypoint=f"{serve_node.fn.__module__}.{serve_node.fn.__name__}",
        work_pool_name=nodes.work_pool,
        parameters={"devices": nodes.devices},
        parameter_openapi_schema=parameter_schema(serve_node).model_dump_for_openapi(),
        job_variables={"env": HEARTBEAT, **nodes.job_variables},
        tags=["internal"],
        description="Serves a machine that an engine lends. The pool's controller starts and ends its runs.",
    )


def _template_of(work_pool_type: str) -> dict[str, Any]:
    # Types of work pools come from installed packages, Ringmaster's among them. They are loaded when one is requested.
    worker = BaseWorker.get_worker_class_from_type(work_pool_type)
    if worker is None:
        known = ", ".join(sorted(BaseWorker.get_all_available_worker_types()))
        raise InputError(
            [
                f"no work pool of type {work_pool_type} can be made; there are {known}. To fix: install the package of "
                f"that type, such as prefect-{work_pool_type}"
            ]
        )
    return worker.get_default_base_job_template()


def main(arguments: Sequence[str] | None = None) -> int:
    """Sets up the pool's server; returns the exit status: 1 without a pool or without the package's prefect.yaml."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=json.loads, help="a NodeDeployment in its JSON form")
    requested = parser.parse_args(arguments)
    address = settings.checked_pool()
    if address is None or not (PROJECT / "prefect.yaml").exists():
        what = "no pool is named" if address is None else f"{PROJECT} has no prefect.yaml"
        report_faults([f"nothing was deployed: {what}"])
        return 1
    wait_for(f"{address.prefect_api}/health", notice)
    with get_client(sync_client=True) as client:
        make_work_pool(client, address.work_pool)
        make_automation(client)
        try:
            make_alarms(client)
            if requested.nodes is not None:
                make_node_deployment(client, from_json(NodeDeployment, requested.nodes))
        except InputError as error:
            report_faults(error.faults)
            return 1
        keep_own_retraining(client, lambda: deploy(client))
    return 0


if __name__ == "__main__":
    sys.exit(main())
