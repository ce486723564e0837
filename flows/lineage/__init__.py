"""The lineage for the command line: access to the records, views, and row tracing."""
