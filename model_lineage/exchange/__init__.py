"""Import and export of the lineage, and model cards for Hugging Face's hub."""
