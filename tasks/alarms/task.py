"""An alarm as an event in Prefect, whose automations tell people."""

from __future__ import annotations

from prefect.events import emit_event

from ringmaster.tasks.alarms.rules import Alarm


def sound(alarm: Alarm) -> None:
    """Emits the alarm as an event, related to the flow run that we are in. Where Prefect is away, nobody is told."""
    resource = {"prefect.resource.id": alarm.resource, "prefect.resource.name": alarm.name}
    emit_event(event=alarm.event, resource=resource, payload={"message": alarm.message, **alarm.facts})
