"""`quantize_base`: adapters on a frozen base in 4 bits."""
