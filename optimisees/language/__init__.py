"""Language models by word."""
