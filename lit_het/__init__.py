"""LiT training with heteroscedastic heads in JAX.

``lit_het.load`` opens a trained model, and ``lit_het.train``, ``evaluate`` and ``embed`` are the commands of these
names; the API page of the site describes them. They are imported when they are used: ``import lit_het`` loads no JAX.
"""

from typing import TYPE_CHECKING, Any

from lit_het import moved
from lit_het.errors import UserError

if TYPE_CHECKING:
    from lit_het.api import Classification, Classifications, ImportOptions, Model, embed, evaluate, load, train

moved.install()

__version__ = "0.1.0"
__all__ = [
    "Classification",
    "Classifications",
    "ImportOptions",
    "Model",
    "UserError",
    "embed",
    "evaluate",
    "load",
    "train",
]


def __getattr__(name: str) -> Any:  # PEP 562
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lit_het import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
