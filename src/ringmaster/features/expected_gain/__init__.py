"""The gain that more trials of a sweep can be expected to bring, and the rule that ends a sweep where it is small."""
