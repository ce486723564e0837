"""The lineage for the command line: access to the records, views, row tracing, and bisection."""
