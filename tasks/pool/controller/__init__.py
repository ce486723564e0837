"""The pool controller: the one process of a pool that leads, plans, starts segments and answers requests."""
