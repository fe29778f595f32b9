"""Python imports this module when it starts: PyTorch is not found, as if it were not installed."""

import sys
from typing import Any


class _NoTorch:
    def find_spec(self, name: str, *_: Any) -> None:
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name=name)


sys.meta_path.insert(0, _NoTorch())  # pyright: ignore[reportArgumentType]
