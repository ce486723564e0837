"""The automations of a pool's Prefect server that notify people of alarms; `flows.deployments` makes them.

One setting names their target: a webhook's URL, or the type and name of one of Prefect's notification blocks (Slack,
Teams, e-mail, ...), such as `slack-webhook/on-call`.
"""

from __future__ import annotations

import os
from datetime import timedelta
from uuid import UUID

from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient
from prefect.events.actions import ActionTypes, DoNothing, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound

from ringmaster.errors import InputError
from ringmaster.flows.settings import NOTIFY
from ringmaster.tasks import alarms

BLOCK = "ringmaster-alarms"
"""Name of the block that is made from a webhook's URL."""
SUBJECTS = {
    "ringmaster-batch-failed": ("A batch has failed", {alarms.BATCH_FAILED}),
    "ringmaster-deadline-in-danger": ("A deadline is in danger", {alarms.DEADLINE_IN_DANGER}),
    "ringmaster-device-lost": ("A device is lost", {alarms.DEVICE_LOST}),
    "ringmaster-promotion-refused": ("A model is not promoted", {alarms.PROMOTION_REFUSED}),
}
BODY = "{{ event.payload.message }}"


def make_alarms(client: SyncPrefectClient, notify: str | None = None) -> None:
    """Makes the automations of all alarms.

    notify: target of the notifications; by default the environment's.

    Without a target, missing automations are made without an action, and existing ones stay as people have set them in
    Prefect's pages. Raises InputError if the notification block does not exist.
    """
    said = notify or os.environ.get(NOTIFY)
    block = _block(client, said) if said else None
    for name, (subject, events) in SUBJECTS.items():
        standing = client.read_automations_by_name(name)
        if standing and block is None:
            continue
        wanted = _automation(name, subject, events, block)
        for found in standing:
            client.update_automation(found.id, wanted)
        if not standing:
            client.create_automation(wanted)


def _automation(name: str, subject: str, events: set[str], block: UUID | None) -> AutomationCore:
    """Returns an automation that sends a notification for each event of an alarm."""
    action: ActionTypes = DoNothing()
    if block is not None:
        action = SendNotification(block_document_id=block, subject=f"Ringmaster: {subject}", body=BODY)
    return AutomationCore(
        name=name,
        description=f"{subject}. Made by `ringmaster up`; {NOTIFY} says where it is sent.",
        trigger=EventTrigger(
            expect=events,
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[action],
    )


def _block(client: SyncPrefectClient, said: str) -> UUID:
    """Returns the id of the notification block that a setting names."""
    if "://" in said:
        text = {"text": "{{subject}}: {{body}}", "subject": "{{subject}}", "message": "{{body}}"}
        webhook = CustomWebhookNotificationBlock(name=BLOCK, url=said, json_data=text, headers=None, cookies=None)
        return UUID(str(webhook.save(BLOCK, overwrite=True)))
    slug, slash, name = said.partition("/")
    if not slash:
        remedy = "write a webhook's address, or TYPE/NAME of a notification block, such as slack-webhook/on-call"
        raise InputError([f"{NOTIFY}: {said!r} is no address and no block. To fix: {remedy}"])
    try:
        return client.read_block_document_by_name(name, slug).id
    except ObjectNotFound as error:
        remedy = "make it in Prefect's pages under Blocks, or by `prefect block create`"
        raise InputError([f"{NOTIFY}: Prefect has no block {said!r}. To fix: {remedy}"]) from error
