"""Neural networks that learn to be optimisers."""
