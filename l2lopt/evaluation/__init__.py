"""Free runs of optimisers side by side, and their comparison."""
