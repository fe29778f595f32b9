"""Applications: quickstart, demo, classification, data preparation, reports and sweeps."""
