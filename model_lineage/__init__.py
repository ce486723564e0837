"""The lineage graph of models, and the ledger: all access to MLflow, also for metrics of training.

Importing this package is fast: MLflow is imported when a ledger is first used.
"""

from ringmaster.errors import LedgerError
from ringmaster.model_lineage.graph import Graph
from ringmaster.model_lineage.ledger.connection import QUIET_ENVIRONMENT
from ringmaster.model_lineage.ledger.ledger import Ledger
from ringmaster.model_lineage.records import (
    ADAPTATION_KINDS,
    COMPONENT,
    IMPORTED,
    DatasetInput,
    MetricPoint,
    ModelRecord,
    Origin,
)

__all__ = [
    "ADAPTATION_KINDS",
    "COMPONENT",
    "IMPORTED",
    "QUIET_ENVIRONMENT",
    "DatasetInput",
    "Graph",
    "Ledger",
    "LedgerError",
    "MetricPoint",
    "ModelRecord",
    "Origin",
]
