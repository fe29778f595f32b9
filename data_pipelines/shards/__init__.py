"""Shards of samples: written, indexed, and read in any order or as a stream."""
