"""The stages of a batch as plain functions. The Prefect tasks that call them are in `ringmaster.flows.train_batch`.

That of profiling without a run of a batch is in `ringmaster.tasks.profiling.task`.
"""
