"""Captions to token ids."""
