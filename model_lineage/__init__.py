"""Which model came from which: the graph, and the MLflow ledger that records it."""
