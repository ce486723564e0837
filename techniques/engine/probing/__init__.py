"""A tiny step of each job before anything is planned: can it be trained, and may its batch be divided?"""

from ringmaster.techniques.engine.probing.faults import StepFault, explained
from ringmaster.techniques.engine.probing.probe import Probe, draws_of, known_draws, probe

__all__ = ["Probe", "StepFault", "draws_of", "explained", "known_draws", "probe"]
