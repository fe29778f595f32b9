"""Checkpoints of runs: saved asynchronously, checked, and restored on any number of devices."""
