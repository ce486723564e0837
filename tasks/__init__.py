"""The stages of a batch, as plain functions and as retriable Prefect tasks over them."""
