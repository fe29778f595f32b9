"""Checks that configurations share."""

import dataclasses
from typing import Literal

import pytest

from lit_het.errors import UserError, pluralize, require_at_least, require_choice


@dataclasses.dataclass(frozen=True)
class Config:
    form: Literal["full", "efficient"] = "full"
    count: int = 1


def test_a_misspelt_choice_is_refused_with_the_choices():
    require_choice(Config("efficient"), "form")
    with pytest.raises(UserError, match=r"^Config: form = 'ful' is not one of 'full', 'efficient'$"):
        require_choice(Config("ful"), "form")  # pyright: ignore[reportArgumentType]


def test_a_number_below_the_least_is_refused():
    require_at_least(1, Config(), "count")
    with pytest.raises(UserError, match=r"^Config: count = 0 must be at least 1$"):
        require_at_least(1, Config(count=0), "count")


def test_numbers_and_nouns_agree():
    assert [pluralize(number, "image") for number in (0, 1, 2, 1000)] == [
        "0 images",
        "1 image",
        "2 images",
        "1,000 images",
    ]
    assert [pluralize(number, "class") for number in (1, 2)] == ["1 class", "2 classes"]


def test_a_long_path_leaves_the_cause_and_the_way_out_of_a_message():
    text = str(UserError(f"the folder {'x' * 10_000_000} does not exist; give another"))
    assert len(text) < 5000
    assert text.startswith("the folder xxx")
    assert text.endswith("xxx does not exist; give another")
