"""Heads as estimators of scikit-learn, for tables of features such as frozen embeddings; see docs/heads.md."""

from lit_het.sklearn.classifier import HetXLClassifier

__all__ = ["HetXLClassifier"]
