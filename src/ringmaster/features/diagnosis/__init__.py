"""The command `ringmaster diagnose`: versions, settings, states and logs in one file, without secrets."""
