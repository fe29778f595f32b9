"""``lit-het quickstart``: data, an upstream tower, LiT runs, their evaluation and a report."""

from lit_het.moved import names_of

__getattr__ = names_of("lit_het.apps.quickstart.running")
