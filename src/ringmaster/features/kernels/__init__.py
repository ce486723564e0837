"""`numerics`: kernels of a step that change its last digits, where a job permits it."""
