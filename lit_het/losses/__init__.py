"""Losses: pure functions of what heads return."""
