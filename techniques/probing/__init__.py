"""Probes: a tiny step of each job, before planning, that checks the job and whether its batch may be divided."""

from ringmaster.errors import StepError
from ringmaster.techniques.probing.faults import explained
from ringmaster.techniques.probing.probe import Probe, draws_of, known_draws, probe

__all__ = ["Probe", "StepError", "draws_of", "explained", "known_draws", "probe"]
