"""The server of a training endpoint: its HTTP routes, its store, and the scheduling of requests."""
