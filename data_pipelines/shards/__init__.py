"""Shards of samples: written, indexed, and read in any order or as a stream."""

from lit_het.moved import names_of

__getattr__ = names_of("lit_het.data_pipelines.shards.writing")
