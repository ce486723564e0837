"""Models of jobs: building, export, conversion, and adapters. Imports no torch by itself."""
