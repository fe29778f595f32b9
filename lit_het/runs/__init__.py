"""A run's directory: opened, trained, and its model as evaluators see it."""
