"""Shards in, batches out: everything between files and the learner."""
