"""Quantization-aware training: models that learn with the rounding of 4 bits, by torchao."""
