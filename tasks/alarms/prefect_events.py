"""Emission of alarms as events in Prefect, whose automations notify users."""

from prefect.events import emit_event

from ringmaster.tasks.alarms import Alarm
from ringmaster.text import printable, storable_values


def emit_alarm(alarm: Alarm) -> None:
    """Emits the alarm as a Prefect event, related to the current flow run; it is lost while Prefect is unreachable."""
    emit_event(
        event=alarm.event,
        resource={"prefect.resource.id": alarm.resource, "prefect.resource.name": alarm.name},
        payload=storable_values({"message": printable(alarm.message), **alarm.facts}),
    )
