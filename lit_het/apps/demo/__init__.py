"""A model on a local web page."""
