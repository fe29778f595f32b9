"""Evaluators: a configuration each, and what measures a model on the sets that it names."""
