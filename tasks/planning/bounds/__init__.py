"""Lower bounds of plans, and certificates that prove them."""
