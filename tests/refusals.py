"""What is refused, and the message of it."""

from collections.abc import Callable
from typing import Any

import pytest

from lit_het.errors import UserError


def assert_refused(message: str, call: Callable[..., object], *arguments: Any, **options: Any) -> None:
    """Demands that a call ends with a user error of one line, which has the message."""
    with pytest.raises(UserError, match=message) as refusal:
        call(*arguments, **options)
    assert "\n" not in str(refusal.value)
