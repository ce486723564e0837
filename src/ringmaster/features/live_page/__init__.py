"""A live page of the home's batches or of a pool: the plan over time, curves, a table of jobs, decisions, requests.

`ringmaster page` and `ringmaster run --page` serve it on this machine, and a pool serves it beside its metrics. What it
shows is what `ringmaster watch --json` prints.
"""
