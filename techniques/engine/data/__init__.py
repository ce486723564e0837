"""Data of a job: prepared once into memory-mapped arrays, then read in an order that no layout changes.

`prepare` does the slow work; `open_data` gives the training and the held-out samples; `batch_indices` says
which of them make the global batch of a step, and `fetch` stacks them. Importing this package does not import
torch.
"""

from ringmaster.techniques.engine.data.prepared import Dataset, PreparedData
from ringmaster.techniques.engine.data.samples import fetch
from ringmaster.techniques.engine.data.sampling import batch_indices
from ringmaster.techniques.engine.data.sources import SOURCES, open_data, prepare

__all__ = ["SOURCES", "Dataset", "PreparedData", "batch_indices", "fetch", "open_data", "prepare"]
