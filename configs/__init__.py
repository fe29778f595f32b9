"""Experiments worth naming: one plain Python module each."""
