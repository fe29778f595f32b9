"""Encoded images to arrays: checked, repaired, decoded, resized, augmented and corrupted."""

from lit_het.moved import names_of

__getattr__ = names_of("lit_het.data_pipelines.images.decoding")
