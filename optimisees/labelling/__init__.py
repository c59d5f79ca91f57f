"""Sequence labelling with deep bidirectional GRUs."""
