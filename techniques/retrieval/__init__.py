"""Knowledge stores: passages with their embeddings, which models read while they train and answer."""
