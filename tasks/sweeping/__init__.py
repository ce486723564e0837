"""Sweeps: a job under many values, which of them are tried next, which go on, and what came of it. No Prefect here."""
