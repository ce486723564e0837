"""Behavioural tests of models: cases of their own, and changes of them that should, or should not, matter."""
