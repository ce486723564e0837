"""Plans by prices and carbon intensities that change over time: objectives, their search, bounds and certificates."""
