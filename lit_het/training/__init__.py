"""Training: a pure step, the loop around it, and what it writes."""
