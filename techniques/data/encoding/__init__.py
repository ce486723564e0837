"""Tokenizers, and the encoding of long text in pieces."""
