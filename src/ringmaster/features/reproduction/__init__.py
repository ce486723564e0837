"""The command `ringmaster reproduce`: a model is trained again from its lineage, and every tensor is compared."""
