"""Metric learning on sequences, with siamese and coupled GRUs."""
