"""``lit-het data filter``: samples to leave out of training, by rules for captions, images and scores."""
