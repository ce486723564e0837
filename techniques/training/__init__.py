"""Training of one job: trainer, loops of segments and trials, losses, optimizers and precision."""
