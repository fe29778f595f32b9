"""Imports checkpoints of V-MoE and e3."""
