"""The commands of the lineage: questions, the search for what broke a model, and changes of what is kept."""
