"""Types that describe techniques: jobs, profiles, the `Technique` interface and its registry. Imports no torch."""
