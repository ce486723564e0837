"""`rewards: job:NAME`: completions are rewarded by a reward model that an earlier job of the batch trains."""
