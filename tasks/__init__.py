"""The stages of a batch as plain functions. The Prefect tasks that call them are in `ringmaster.flows.train_batch`."""
