"""Saves, verifies and restores the checkpoints of runs."""
