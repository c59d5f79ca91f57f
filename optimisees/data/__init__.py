"""Data sets: how they are found, read, split and sampled."""
