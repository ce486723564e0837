"""Discrete-event simulation of the execution of plans."""
