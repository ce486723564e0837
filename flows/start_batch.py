"""The entry point of deployments that earlier releases have made of the form of a batch."""

from ringmaster.flows.batch_form import train_batch as start_batch

__all__ = ["start_batch"]
