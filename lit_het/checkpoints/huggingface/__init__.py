"""Folders of Hugging Face transformers: read and written."""
