# To read what a library this large declares takes a fifth of the time of all types, and it declares little.
from typing import Any

def __getattr__(name: str) -> Any: ...
