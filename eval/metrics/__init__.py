"""Metrics: functions of arrays."""
