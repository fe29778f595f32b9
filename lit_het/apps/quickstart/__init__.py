"""``lit-het quickstart``: data, an upstream tower, LiT runs, their evaluation and a report."""
