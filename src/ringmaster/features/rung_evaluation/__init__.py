"""`evaluation_error`: trials of a sweep, evaluated at rungs part by part until it is certain which continue."""
