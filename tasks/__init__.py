"""The stages of a batch as plain functions, and the retriable Prefect tasks that call them."""
