"""Starts, supervises and is the worker processes that train: the harness around a technique."""
