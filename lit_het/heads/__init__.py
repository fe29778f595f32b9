"""Heads: embeddings in, a distribution of logits or embeddings out."""
