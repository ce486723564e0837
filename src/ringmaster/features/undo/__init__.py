"""The command `ringmaster lineage undo`: models are trained again as if a row, a data set or a version had not been."""
