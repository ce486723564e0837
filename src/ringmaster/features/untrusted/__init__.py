"""Nodes that are not trusted: their work is repeated and compared by samples."""
