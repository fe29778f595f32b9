"""A trained model: opened, as evaluators see it, as Python sees it, and calibrated."""
