"""Figures and tables of results."""
