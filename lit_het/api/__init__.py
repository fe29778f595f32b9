"""The names of ``import lit_het``, which loads this package when one of them is used."""

from lit_het.api.model import Model, load
from lit_het.api.results import Classification, Classifications
from lit_het.api.work import embed, evaluate, train
from lit_het.runs.importing import ImportOptions

__all__ = ["Classification", "Classifications", "ImportOptions", "Model", "embed", "evaluate", "load", "train"]
