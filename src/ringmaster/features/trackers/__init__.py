"""Curves, hyperparameters and final metrics of jobs in TensorBoard, Trackio and Weights & Biases, beside MLflow."""
