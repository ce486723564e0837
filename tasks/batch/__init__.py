"""Batch files: YAML or Python to jobs, with every fault told at once, its place, its line and the way out."""

from ringmaster.tasks.batch.batch import Batch, load_batch, parse_batch
from ringmaster.tasks.batch.faults import BatchFileError, Fault
from ringmaster.tasks.batch.schema import json_schema

__all__ = ["Batch", "BatchFileError", "Fault", "json_schema", "load_batch", "parse_batch"]
