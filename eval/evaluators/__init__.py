"""Evaluators: each has a configuration, and computes the metrics of a model on the configured sets."""
