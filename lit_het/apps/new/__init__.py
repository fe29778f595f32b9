"""``lit-het new``: a project for one's own pairs, or for a first image tower."""
