"""Encoded images to arrays: checked, repaired, decoded, resized, augmented and corrupted."""
