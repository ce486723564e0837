"""Models that come from others in another way than by plain training: distilled, pruned, quantized, merged.

`distilling` gives a training loss against a teacher, `pruning` zeroes weights and keeps them zero, `quantizing` and
`merging` rewrite weights, `rewriting` is the loop of jobs without steps, and `comparing` measures what came of it
against its parents. Only modules that are imported by name import torch.
"""
