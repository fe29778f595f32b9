"""Evaluators, calibration measures and reports."""
