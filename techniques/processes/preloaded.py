"""What a fork server computes once for all of its children, when it imports this module."""

from ringmaster.compat.transformers import fill_caches

fill_caches()
