"""The lineage for the command line: where it is kept, how it is shown, and searched for what broke a model."""
