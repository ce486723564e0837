"""Training: trainer, loops of segments and trials, losses, optimizers, dropout, and groups of adapters on one base."""
