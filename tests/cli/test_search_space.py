"""Fields to search, and the settings that are tried: as a function of the trials so far."""

import dataclasses
import math
import sys

import numpy as np
import pytest

from lit_het.configs import glyph_classifier
from lit_het.errors import UserError
from lit_het.search import space
from lit_het.search.grid import Axis
from lit_het.search.space import Range, Search, Trial, next_setting, parse_field

CONFIG = glyph_classifier.get_config()
RATE, DECAY, HEAD = "schedule.learning-rate", "optimizer.layer-decay", "task.head"
FIELDS = (
    Range(RATE, 1e-4, 1e-1, logarithmic=True, whole=False),
    Range(DECAY, 0.5, 1.0, logarithmic=False, whole=False),
    Axis(HEAD, ("deterministic", "het_xl")),
)
SIZES = (Range("data.batch-size", 1, 3, logarithmic=False, whole=True), Axis(HEAD, ("deterministic", "het_xl")))


def search_of(tmp_path, fields=FIELDS, **options):
    return Search(CONFIG, fields, "supervised/val/nll", tmp_path, **options)


def quadratic(setting):
    """Returns a loss whose minimum is 0, at a learning rate of 0.005, a decay of 0.8 and HET-XL."""
    rate, decay = math.log10(float(setting[RATE]) / 0.005), float(setting[DECAY]) - 0.8
    return rate**2 + 16 * decay**2 + (0.3 if setting[HEAD] == "deterministic" else 0.0)


def searched(search, budget, objective=quadratic):
    """Returns the trials of a search with an objective in place of training; NaN has failed."""
    trials = []
    for number in range(budget):
        setting = next_setting(search, trials)
        if setting is None:
            break
        value = objective(setting)
        trials.append(Trial(number, setting, "failed" if math.isnan(value) else "finished", value))
    return trials


def test_ranges_and_values_are_parsed():
    assert parse_field(f"{RATE}=1e-4..1e-2:log", CONFIG) == Range(RATE, 1e-4, 1e-2, True, False)
    assert parse_field("--schedule.learning_rate = .5..2", CONFIG) == Range(RATE, 0.5, 2, False, False)
    assert parse_field(f"{RATE}=1..2", CONFIG) == Range(RATE, 1, 2, False, False), "the field has decimals"
    assert parse_field("data.batch-size=16..64:log", CONFIG) == Range("data.batch-size", 16, 64, True, True)
    assert parse_field("length=500..2000", CONFIG) == Range("length", 500, 2000, False, True)
    assert parse_field(f"{HEAD}=deterministic, het_xl", CONFIG) == Axis(HEAD, ("deterministic", "het_xl"))
    assert parse_field("data.shards=../a,../b", CONFIG) == Axis("data.shards", ("../a", "../b"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{RATE}=1e-2..1e-4", "the lower end must be below the upper one"),
        (f"{RATE}=1..1e999", "the lower end must be below the upper one"),
        (f"{RATE}=0..1:log", "a logarithmic range must lie above 0"),
        (f"{RATE}=1..x", "write a range as LOW..HIGH"),
        (f"{RATE}=1..2:ln", "write a range as LOW..HIGH"),
        ("=1..2", "write a range as LOW..HIGH"),
        (RATE, "write FIELD=LOW..HIGH"),
        (f"{RATE}=1,,2", "write FIELD=LOW..HIGH"),
        (f"{RATE}=1,1", "with different values"),
        ("schedule.rate=1..2", "unknown flag --schedule.rate"),
    ],
)
def test_other_fields_are_refused(text, expected):
    with pytest.raises(UserError, match=expected) as caught:
        parse_field(text, CONFIG)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "options", "expected"),
    [
        ((), {}, "give --field"),
        ((FIELDS[0], FIELDS[0]), {}, "once for each field"),
        ((Axis("schedule.rate", ("1",)),), {}, r"--field schedule.rate=1: unknown flag --schedule.rate"),
        ((Axis(HEAD, ("deterministic", "hat")),), {}, "--field task.head=hat: --task.head hat is not one of"),
        ((Range("data.batch-size", 0, 3, False, True),), {}, "batch-size 0 must be at least 1"),
        (FIELDS, {"method": "grid"}, f"--method grid tries every value, and {RATE} has a range"),
        ((Range("length", 1, 1e6, False, True),), {"method": "grid"}, "has 1,000,000 settings"),
    ],
)
def test_unsuitable_fields_are_refused(tmp_path, fields, options, expected):
    with pytest.raises(UserError, match=expected):
        space.check_fields(search_of(tmp_path, fields, **options))


def test_a_search_without_optuna_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r"needs optuna .*pip install 'lit-het\[tune\]'"):
        space.check_fields(search_of(tmp_path))
    grid = search_of(tmp_path, SIZES, method="grid")
    space.check_fields(grid)
    assert len(searched(grid, 9, lambda _: 1.0)) == 6


def test_bayes_finds_the_optimum_within_the_budget_and_comes_closer_than_random(tmp_path):
    best = {
        method: [
            min(quadratic(trial.setting) for trial in searched(search_of(tmp_path, method=method, seed=seed), 30))
            for seed in range(5)
        ]
        for method in ("bayes", "random")
    }
    assert max(best["bayes"]) < 0.1, "a factor of 2 in the learning rate costs 0.09"
    assert np.mean(best["bayes"]) < 0.5 * np.mean(best["random"])


def test_bayes_climbs_where_higher_is_better(tmp_path):
    search = search_of(tmp_path, lower=False)
    values = [-trial.value for trial in searched(search, 30, lambda setting: -quadratic(setting))]
    assert min(values) < 0.1
    assert values == [trial.value for trial in searched(dataclasses.replace(search, lower=True), 30)]


def test_bayes_avoids_settings_that_fail(tmp_path):
    def fails_often(setting):
        return math.nan if float(setting[RATE]) > 1e-3 else 1.0

    late = {
        method: sum(
            trial.state == "failed" for trial in searched(search_of(tmp_path, method=method), 40, fails_often)[15:]
        )
        for method in ("bayes", "random")
    }
    assert late["bayes"] < 0.5 * late["random"], late


def test_settings_depend_on_the_trials_and_the_seed_alone(tmp_path):
    trials = searched(search_of(tmp_path), 14)
    assert next_setting(search_of(tmp_path), trials[:12]) == trials[12].setting
    assert next_setting(search_of(tmp_path, seed=1), trials[:12]) != trials[12].setting


@pytest.mark.parametrize("method", ["bayes", "random", "grid"])
def test_no_setting_is_tried_twice_and_the_search_ends_when_all_were(tmp_path, method):
    settings = [trial.setting for trial in searched(search_of(tmp_path, SIZES, method=method), 9, lambda _: 1.0)]
    assert len(settings) == 6
    assert {(setting["data.batch-size"], setting[HEAD]) for setting in settings} == {
        (size, head) for size in "123" for head in ("deterministic", "het_xl")
    }


def test_a_running_trial_is_not_suggested_to_another_process(tmp_path):
    search = search_of(tmp_path)
    trials = searched(search, 20)
    running = Trial(20, next_setting(search, trials) or {}, "running")
    assert next_setting(search, [*trials, running]) not in (None, running.setting)


@pytest.mark.parametrize("method", ["bayes", "random"])
def test_a_narrow_range_has_no_repeats(tmp_path, method):
    narrow = (Range(DECAY, 0.999, 0.9999, logarithmic=False, whole=False),)
    trials = searched(search_of(tmp_path, narrow, method=method), 16, lambda setting: float(setting[DECAY]))
    assert len({trial.setting[DECAY] for trial in trials}) == 16


def test_a_search_ends_when_only_repeats_are_left(tmp_path):
    last = math.nextafter(math.nextafter(1.0, 2.0), 2.0)
    three = (Range(RATE, 1.0, last, logarithmic=False, whole=False),)
    trials = searched(search_of(tmp_path, three, method="random"), 9, lambda _: 1.0)
    assert 1 < len(trials) == len({trial.setting[RATE] for trial in trials}) <= 3


@pytest.mark.parametrize(
    ("metric", "lower"),
    [
        ("supervised/val/nll", True),
        ("captioning/val/perplexity", True),
        ("captioning/val/log_perplexity", True),
        ("supervised/val/noisy/aurc", True),
        ("supervised/val/excess_aurc", True),
        ("supervised/val/set_size90", True),
        ("retrieval/val/image_to_text_median_rank", True),
        ("out_of_distribution/val/near/other/entropy/fpr95", True),
        ("train/loss", True),
        ("train/distillation_loss", True),
        ("supervised/val/top1", False),
        ("few_shot/val/10_shot", False),
        ("retrieval/val/text_to_image_recall1", False),
    ],
)
def test_the_name_of_a_metric_tells_which_values_are_better(tmp_path, metric, lower):
    assert dataclasses.replace(search_of(tmp_path), metric=metric).minimizes == lower


@pytest.mark.parametrize("metric", ["train/gradient_norm", "supervised/val/coverage90", "train/nothing_known"])
def test_a_metric_whose_name_does_not_tell_needs_a_direction(tmp_path, metric):
    search = dataclasses.replace(search_of(tmp_path), metric=metric)
    with pytest.raises(UserError, match=f"^--metric {metric}: add --direction lower or higher"):
        assert search.minimizes
    assert dataclasses.replace(search, lower=True).minimizes


def test_values_have_four_digits_and_stay_in_their_range():
    field = Range(RATE, 0.00012345, 0.5, logarithmic=True, whole=False)
    assert field.text(0.0034567) == "0.003457"
    assert field.text(0.00012345) == "0.00012345", "0.0001234 lies below"
    assert Range("length", 1, 10**6, False, True).text(123456) == "123456"
    assert Range(DECAY, 0.999, 0.9999, False, False).text(0.99912345678) == "0.9991235"
    assert [Range(DECAY, -1.0, 2.0, False, False).text(value) for value in (0.0, 2.0)] == ["0", "2"]


def test_a_trial_below_the_median_of_five_finished_ones_is_hopeless(tmp_path):
    search = search_of(tmp_path)
    settings = [trial.setting for trial in searched(search, 6)]
    finished = [
        Trial(number, setting, "finished", 0.5, {10: 1.0 + number, 20: 0.5})
        for number, setting in enumerate(settings[:5])
    ]

    def hopeless(history, others=finished, search=search):
        trials = [*others, Trial(len(others), settings[5], "running", history=history)]
        return space.should_prune(search, trials, len(others))

    assert hopeless({10: 3.1})
    assert not hopeless({10: 2.9})
    assert not hopeless({10: 3.1}, finished[:4]), "too few to compare with"
    assert hopeless({10: 2.9}, search=search_of(tmp_path, lower=False))
    assert not hopeless({}), "nothing is known yet"
