"""Scores of trained models on single rows: losses, hits, predictions and probabilities; many adapters over one base.

The rows are a job's held-out rows, in the order in which an evaluation reads them, or literal cases. The scores summed
over all held-out rows equal the metrics of an evaluation. `score_together` scores in this process, `main` in a
worker process. Importing this package does not import torch.
"""

from ringmaster.techniques.scoring.scored_rows import ScoringOrder, model_spec
from ringmaster.techniques.scoring.scoring_worker import Progress, ScoringResults, main, score_together

__all__ = ["Progress", "ScoringOrder", "ScoringResults", "main", "model_spec", "score_together"]
