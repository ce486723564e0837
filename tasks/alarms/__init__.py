"""Alarms: events of a batch, a pool or a model that Prefect's automations report to people."""

from ringmaster.tasks.alarms.rules import (
    BATCH_FAILED,
    DEADLINE_IN_DANGER,
    DEVICE_LOST,
    EVENTS,
    PROMOTION_REFUSED,
    Alarm,
    DeadlineAlarms,
    NodeAlarms,
    batch_failed,
    promotion_refused,
)

__all__ = [
    "BATCH_FAILED",
    "DEADLINE_IN_DANGER",
    "DEVICE_LOST",
    "EVENTS",
    "PROMOTION_REFUSED",
    "Alarm",
    "DeadlineAlarms",
    "NodeAlarms",
    "batch_failed",
    "promotion_refused",
]
