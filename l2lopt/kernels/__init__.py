"""Fast twins of the learned optimisers: the same numbers, sharing φ with a reference that never knows them."""
