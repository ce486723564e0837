"""Probes: a tiny step of each job, before planning, that checks the job and whether its batch may be divided."""

from ringmaster.errors import StepError
from ringmaster.techniques.probing.faults import explained
from ringmaster.techniques.probing.probe import TinyStepResult, draws_of, known_draws, probe

__all__ = ["StepError", "TinyStepResult", "draws_of", "explained", "known_draws", "probe"]
