import pytest

from lit_het.errors import UserError
from lit_het.training.durations import Duration, RunLength


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("300", Duration(300)),
        ("300 steps", Duration(300)),
        ("900_000_000 examples", Duration(900_000_000, "examples")),
        ("1e9 examples", Duration(1e9, "examples")),
        ("  0.5   epochs ", Duration(0.5, "epochs")),
        ("20 percent", Duration(20, "percent")),
    ],
)
def test_durations_are_texts(text, duration):
    assert Duration.parse(text) == duration
    assert Duration.parse(str(duration)) == duration


@pytest.mark.parametrize("text", ["", "many", "3 weeks", "-1 steps", "steps", "1 2 steps", "nan", "1e999 steps"])
def test_other_texts_are_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"is not a duration; .* such as '90 epochs'"):
        Duration.parse(text)


@pytest.mark.parametrize(
    ("duration", "steps"),
    [
        (Duration(7), 7),
        (Duration(900_000_000, "examples"), 27_465),  # of 32,768: 27,465.8
        (Duration(90, "epochs"), 27),  # 90 · 10,000 / 32,768 = 27.5
        (Duration(0.1, "epochs"), 0),
        (Duration(20, "percent"), 200),
        (Duration(0.7, "percent"), 7),  # in floating point 0.7 / 100 · 1000 is 6.999...
        (Duration(1e9, "examples"), 30_517),
    ],
)
def test_a_fraction_of_a_step_is_left_out(duration, steps):
    assert RunLength(1000, 32_768, 10_000).steps(duration, "length") == steps


def test_a_run_is_as_long_as_papers_say():
    """HET-XL App. N.1: 90 epochs of 12.8 M images at batch 4,096 are 281,250 steps."""
    assert RunLength.resolve(Duration(90, "epochs"), 4096, 12_800_000) == RunLength(281_250, 4096, 12_800_000)


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (Duration(2, "epochs"), "--length 2 epochs: a stream has no epochs; give steps or examples"),
        (Duration(7, "examples"), "--length 7 examples is less than one batch of 8 examples"),
        (Duration(0), "--length 0 steps is less than one batch of 8 examples"),
    ],
)
def test_lengths_without_a_number_of_steps_are_refused(length, message):
    with pytest.raises(UserError, match=message):
        RunLength.resolve(length, 8, None)
