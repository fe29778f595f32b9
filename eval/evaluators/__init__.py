"""Evaluators: each computes the metrics of a model on the sets of its configuration in `lit_het.eval.suite`."""
