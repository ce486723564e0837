"""Training of adapters for clients that own their loops: losses, optimizer steps and samples, computed together."""
