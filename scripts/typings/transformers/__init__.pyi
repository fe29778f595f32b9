# To read what torch and transformers declare takes a quarter of the time of all types.
from typing import Any

def __getattr__(name: str) -> Any: ...
