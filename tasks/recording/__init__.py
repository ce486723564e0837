"""Recording of a batch in MLflow, on a background thread."""
