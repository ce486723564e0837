"""Bases in 4 bits below adapters (QLoRA)."""
