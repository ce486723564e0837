"""Providers of a pool's nodes: what lends machines to a pool, such as Slurm or Ray."""
