"""Fits the temperatures and posteriors of a trained run, and splits its data for them."""
