"""`target` and `may_vary`: jobs that end at a value of a metric, and may change their batch size on the way."""
