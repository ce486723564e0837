"""Training of several adapters on one frozen base: one shared forward and backward, an optimizer update per adapter."""
