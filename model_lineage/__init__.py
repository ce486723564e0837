"""Which model came from which: the graph, and the MLflow ledger that records it.

Importing this package is quick: MLflow is imported at a ledger's first use.
"""

from ringmaster.model_lineage.connection import QUIET_ENVIRONMENT
from ringmaster.model_lineage.faults import LedgerError
from ringmaster.model_lineage.graph import Adaptation, Graph
from ringmaster.model_lineage.ledger import Ledger
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
    "Adaptation",
    "DatasetInput",
    "Graph",
    "Ledger",
    "LedgerError",
    "MetricPoint",
    "ModelRecord",
    "Origin",
]
