"""Adaptations: models derived from others besides plain training (distilled, pruned, quantized, merged).

`distilling` defines a training loss against a teacher. `pruning` zeroes weights and keeps them zero. `quantizing` and
`merging` rewrite weights. `rewriting` runs the jobs without steps. `comparing` measures a resulting model beside its
parents. Importing the package imports no torch; some of its modules do.
"""
