"""The report of `ringmaster diagnose`: what is collected of a home and a pool for a bug report, without secrets."""
