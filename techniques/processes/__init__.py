"""Processes of a gang: fork server, workers, supervision and communication."""
