"""Which model serves: moves aliases in the registry when a better one is found."""
