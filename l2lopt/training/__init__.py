"""Meta-training of learned optimisers, and training of optimisees to their end."""
