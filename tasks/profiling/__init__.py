"""How fast each job runs under each technique: trials on the real devices, kept and shared."""
