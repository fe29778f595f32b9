"""Checkpoints: ours (Orbax)."""
