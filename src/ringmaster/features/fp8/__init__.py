"""`precision: fp8`: the products of linear layers in 8-bit floating point, by torchao."""
