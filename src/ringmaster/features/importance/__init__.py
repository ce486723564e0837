"""Importance of the parameters of a sweep: how much each of them matters for the objective."""
