"""Imports and exports big_vision's ``.npz`` files."""
