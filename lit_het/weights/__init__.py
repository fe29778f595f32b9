"""Checkpoints of runs (Orbax), and imports and exports of the weights of other programs."""
