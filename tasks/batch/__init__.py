"""Batch files: parsing of YAML or Python into jobs, with all faults reported at once, by place, line and remedy."""

from ringmaster.errors import BatchFileError
from ringmaster.tasks.batch.batch import Batch, load_batch, parse_batch
from ringmaster.tasks.batch.document import Fault
from ringmaster.tasks.batch.schema import json_schema

__all__ = ["Batch", "BatchFileError", "Fault", "json_schema", "load_batch", "parse_batch"]
