"""The specification of a sweep: its file, and its form in Prefect's UI."""
