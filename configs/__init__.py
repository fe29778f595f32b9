"""Shipped experiments, one Python module each, and their format, `experiment`."""
