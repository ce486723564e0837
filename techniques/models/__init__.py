"""Models of jobs: building, export, conversion, adapters, and the rewriting of weights. Imports no torch by itself."""
