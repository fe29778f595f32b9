"""Imports and exports folders of Hugging Face transformers."""
