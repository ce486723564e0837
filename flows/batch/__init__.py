"""One batch from its form to its result: run context, run folder, flow runs and records."""
