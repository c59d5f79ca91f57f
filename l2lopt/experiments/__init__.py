"""Experiments from configs: the only folder that knows optimisees by name."""
