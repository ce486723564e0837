"""What trained models say of single rows: losses, hits, predictions and probabilities; many adapters over one base.

The rows are the held-out ones of a job, in the order in which an evaluation reads them, or literal cases. The sums over
all held-out rows are what `evaluate_model` says. `score_together` does it in this process, `main` in a worker's.
Importing this package does not import torch.
"""

from ringmaster.techniques.engine.scoring.order import ScoringOrder, model_spec
from ringmaster.techniques.engine.scoring.together import Progress, Together, score_together
from ringmaster.techniques.engine.scoring.worker import main

__all__ = ["Progress", "ScoringOrder", "Together", "main", "model_spec", "score_together"]
