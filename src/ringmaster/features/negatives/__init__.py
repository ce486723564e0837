"""Hard negatives of a dense retriever that are mined again and again while it is trained."""
