"""Python imports this module when it starts: PyTorch looks as if it were not installed."""

import sys

sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
