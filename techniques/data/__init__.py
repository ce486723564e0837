"""Data of a job: prepared once into memory-mapped arrays, then read in an order that no layout changes.

`prepare` does the slow work. `open_data` opens the training and the held-out samples. `sampler_of` selects the
samples of a step's global batch, and `fetch` stacks them. Importing this package does not import torch.
"""

from ringmaster.techniques.data.arrays import Indices
from ringmaster.techniques.data.loading import open_data, prepare
from ringmaster.techniques.data.samples import batch_indices, fetch, num_tokens_of, sampler_of, width_of
from ringmaster.techniques.data_source import SOURCES, Dataset, PreparedData

__all__ = [
    "SOURCES",
    "Dataset",
    "Indices",
    "PreparedData",
    "batch_indices",
    "fetch",
    "num_tokens_of",
    "open_data",
    "prepare",
    "sampler_of",
    "width_of",
]
