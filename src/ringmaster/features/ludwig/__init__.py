"""Jobs that are described by Ludwig configurations."""
