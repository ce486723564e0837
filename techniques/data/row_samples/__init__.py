"""Samples that are made of rows, one of each: the columns that are read, the tokens, the classes, and the padding."""
