"""Training: a pure step, the loop around it, its log, and the lock of the run's directory."""
