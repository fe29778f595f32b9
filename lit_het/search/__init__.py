"""Searches for settings: grids, ``lit-het tune``, and sweeps over the shape of a tower."""
