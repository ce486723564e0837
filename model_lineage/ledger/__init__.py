"""The MLflow ledger: runs, profiles, models and the registry."""
