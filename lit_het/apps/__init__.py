"""Programs made of the rest: the quickstart, the demo, sweeps."""
