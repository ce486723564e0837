"""The Prefect flows that a person or a schedule starts, and the command line."""
