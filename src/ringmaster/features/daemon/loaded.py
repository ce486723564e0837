"""What commands that train import, loaded once by the server that forks them."""

from __future__ import annotations

import importlib

MODULES = (
    *("ringmaster.flows.cli", "ringmaster.flows.train_batch", "ringmaster.flows.sweep"),
    *("ringmaster.flows.commands.running", "ringmaster.flows.services.first_processes", "ringmaster.flows.sweep_form"),
    *("ringmaster.flows.reports.plan_report", "ringmaster.model_lineage.ledger.ledger", "ringmaster.tasks.batch"),
    *("mlflow", "mlflow.store.tracking.sqlalchemy_store", "mlflow.tracking.client", "prefect.flow_engine"),
)


def load() -> None:
    """Does nothing: importing this module loads them."""


def _load() -> None:
    from ringmaster.compat.jsonschema import import_without_iris

    import_without_iris()
    for name in MODULES:
        importlib.import_module(name)


_load()
