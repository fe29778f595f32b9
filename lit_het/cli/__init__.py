"""The composition root: the only place that joins learner, data, evaluation and configurations."""
