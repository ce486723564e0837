"""The pages of models in MLflow: cards, links and family pictures."""
