"""Image and text towers: arrays in, `TowerOutput` out."""
