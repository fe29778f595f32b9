"""Checkpoints of V-MoE and e3: read."""
