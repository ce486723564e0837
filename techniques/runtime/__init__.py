"""The runtime around a technique: starts and supervises the worker processes that train, and runs inside them."""
