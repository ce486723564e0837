"""Estimates of memory and time of a config, made before anything runs."""
