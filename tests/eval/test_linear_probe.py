"""The linear probe against plain NumPy, and its invariances."""

import dataclasses
import math

import numpy as np
import pytest

from lit_het.eval import linear_probe
from lit_het.eval.fits import LinearProbeOptions
from lit_het.eval.linear_probe import train_linear_probe
from lit_het.eval.views import Examples
from tests.refusals import assert_refused

SMALL = LinearProbeOptions(learning_rates=(0.1,), weight_decays=(0.01,), epochs=(2,), images_per_step=16)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Trainings of 16 and of 32 steps run one program."""
    monkeypatch.setattr(linear_probe, "_STEPS_PER_CHUNK", 16)


def clusters(count: int = 132, classes: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    centres = 3 * np.random.default_rng(100).normal(size=(classes, 5))
    labels = np.arange(count) % classes
    noise = np.random.default_rng(seed).normal(size=(count, 5))
    return (centres[labels] + noise).astype(np.float32), labels


def train_slowly(features, labels, rows_of_batches, rate, decay, bias):
    """Plain momentum: v = 0.9 v + g; w -= schedule (rate v + decay w)."""
    classes = labels.max() + 1
    batches = [(features[rows], np.eye(classes)[labels[rows]]) for rows in rows_of_batches]
    return train_on_targets(batches, rate, decay, bias)


def train_on_targets(batches, rate, decay, bias):
    (features, targets), total = batches[0], len(batches)
    classes = targets.shape[1]
    weights = np.concatenate([np.zeros((features.shape[1], classes)), np.full((1, classes), bias)])
    velocity, warmup = np.zeros_like(weights), total // 10
    for step, (features, targets) in enumerate(batches):
        x = np.concatenate([features, np.ones((len(features), 1))], axis=1).astype(np.float64)
        error = 1 / (1 + np.exp(-x @ weights)) - targets
        velocity = 0.9 * velocity + x.T @ error / len(features)
        progress = (step - warmup) / (total - warmup)
        schedule = step / warmup if step < warmup else 0.5 * (1 + np.cos(np.pi * progress))
        decayed = np.concatenate([decay * weights[:-1], np.zeros((1, classes))])
        weights = weights - schedule * (rate * velocity + decayed)
    return weights[:-1], weights[-1]


def test_the_probe_agrees_with_plain_gradient_descent_with_momentum(monkeypatch):
    features, labels = clusters()
    seen, plan_of = [], linear_probe._plan

    def watched(rows, options):
        seen.append((rows, plan_of(rows, options)))
        return seen[-1][1]

    monkeypatch.setattr(linear_probe, "_plan", watched)
    probe = train_linear_probe(features, labels, 3, dataclasses.replace(SMALL, epochs=(4,)))
    [(rows, plan)] = seen
    batches = plan.images
    # Three images are held out; every epoch has an order of its own of the others, of which one fills no batch.
    assert len(set(rows.tolist())) == 132 - 3
    epochs = batches.reshape(4, 128).tolist()
    assert all(len(set(epoch)) == 128 and set(epoch) < set(rows.tolist()) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4
    kernel, bias = train_slowly(features, labels, batches, 0.1, 0.01, -6.9)
    np.testing.assert_allclose(probe.kernel, kernel, atol=1e-5)
    np.testing.assert_allclose(probe.bias, bias, atol=1e-5)


def test_views_of_mixed_images_are_trained_on_both_labels_and_those_that_cannot_be_read_are_left_out():
    features, labels = clusters()
    options = dataclasses.replace(SMALL, epochs=(4,), crops=("random",))
    random, batches = np.random.default_rng(1), []

    def views(crop, plan):
        assert crop == "random"
        for steps in plan.chunks():
            rows = plan.images[steps]
            seen = random.normal(size=(*rows.shape, 5)).astype(np.float32)
            both = np.stack([labels[rows], np.roll(labels[rows], 1, axis=1)], axis=-1)
            own = random.uniform(0.5, 1, rows.shape)
            is_read = random.random(rows.shape) < 0.8
            weights = (is_read[:, :, None] * np.stack([own, 1 - own], axis=-1)).astype(np.float32)
            targets = (np.eye(3)[both] * weights[..., None]).sum(axis=2)
            batches.extend((x[valid], t[valid]) for x, t, valid in zip(seen, targets, is_read, strict=True))
            # What is not read may be anything.
            yield Examples(np.where(is_read[:, :, None], seen, 1e6).astype(np.float32), both, weights)

    probe = train_linear_probe(features, labels, 3, options, views=views)
    kernel, bias = train_on_targets(batches, 0.1, 0.01, -6.9)
    np.testing.assert_allclose(probe.kernel, kernel, atol=1e-5)
    np.testing.assert_allclose(probe.bias, bias, atol=1e-5)


def test_the_crops_are_an_axis_of_the_grid_and_the_best_of_all_is_chosen_on_views_of_evaluation():
    features, labels = clusters()
    options = dataclasses.replace(SMALL, epochs=(2, 4), crops=("whole", "random", "inception"))
    scales = {"random": -1.0, "inception": 1.0}  # of the mirror image nothing is learned

    def views(crop, plan):
        for steps in plan.chunks():
            rows = plan.images[steps]
            yield Examples(scales[crop] * features[rows], labels[rows][:, :, None], np.ones((*rows.shape, 1)))

    steps = []
    probe = train_linear_probe(features, labels, 3, options, steps.append, views)
    assert sum(steps) == options.num_steps(132) == 3 * 6 * (129 // 16)
    assert [setting.crop for setting in probe.grid] == ["whole"] * 2 + ["random"] * 2 + ["inception"] * 2
    whole, random, inception = probe.grid[::2]
    assert inception == dataclasses.replace(whole, crop="inception")
    assert random.accuracy < 0.5 < probe.best.accuracy
    assert probe.best.crop == "whole"  # a tie goes to the first


def test_untrained_probes_give_every_class_a_low_probability():
    features, labels = clusters()
    probe = train_linear_probe(features, labels, 3, dataclasses.replace(SMALL, learning_rates=(0.0,)))
    np.testing.assert_allclose(probe.logits(features), -6.9, rtol=1e-6)
    assert probe.best.accuracy == pytest.approx(1 / 3)
    assert probe.best.loss == pytest.approx(3 * np.log1p(np.exp(-6.9)) + 6.9, rel=1e-5)


def test_the_best_setting_of_the_whole_grid_classifies_new_images_and_no_setting_affects_another():
    features, labels = clusters(150)
    options = LinearProbeOptions(learning_rates=(0.0, 0.1, 1e-4), epochs=(2, 4), images_per_step=16, minival=0.1)
    steps = []
    probe = train_linear_probe(features, labels, 3, options, steps.append)
    assert sum(steps) == options.num_steps(150) == 6 * (135 // 16)
    assert len(probe.grid) == 3 * 2 * 2
    assert len({(s.learning_rate, s.weight_decay, s.epochs) for s in probe.grid}) == 12
    assert probe.best in probe.grid
    assert probe.best.accuracy == max(setting.accuracy for setting in probe.grid)
    assert probe.best.learning_rate == 0.1
    test, test_labels = clusters(300, seed=1)
    assert (probe.logits(test).argmax(axis=1) == test_labels).mean() > 0.95
    for one in (probe.grid[0], probe.grid[2], probe.grid[-1]):
        alone = dataclasses.replace(
            options, learning_rates=(one.learning_rate,), weight_decays=(one.weight_decay,), epochs=(one.epochs,)
        )
        assert train_linear_probe(features, labels, 3, alone).best.loss == pytest.approx(one.loss, rel=1e-5)


def test_the_probe_depends_on_the_seed_and_not_on_block_sizes(monkeypatch):
    features, labels = clusters()
    probe = train_linear_probe(features, labels, 3, SMALL)
    monkeypatch.setattr(linear_probe, "_STEPS_PER_CHUNK", 3)
    monkeypatch.setattr(linear_probe, "_BLOCK_ROWS", 7)
    again = train_linear_probe(features, labels, 3, SMALL)
    np.testing.assert_allclose(probe.kernel, again.kernel, atol=1e-6)
    assert probe.best.loss == pytest.approx(again.best.loss)
    np.testing.assert_allclose(probe.logits(features), again.logits(features), atol=1e-5)
    other = train_linear_probe(features, labels, 3, dataclasses.replace(SMALL, seed=1))
    assert np.abs(probe.kernel - other.kernel).max() > 1e-4


def test_half_precision_features_and_classes_without_images_are_accepted():
    features, labels = clusters()
    probe = train_linear_probe(features.astype(np.float16), labels, 5, SMALL)
    assert probe.kernel.shape == (5, 5)
    assert (probe.logits(features.astype(np.float16)).argmax(axis=1) == labels).mean() > 0.9


def test_a_handful_of_images_is_one_batch(monkeypatch):
    monkeypatch.setattr(linear_probe, "_STEPS_PER_CHUNK", 1)
    features, labels = clusters(3)
    options = LinearProbeOptions()
    assert options.num_steps(3) == 14
    assert len(train_linear_probe(features, labels, 3, options).grid) == 18


def test_a_setting_that_diverges_is_never_the_best():
    features, labels = clusters()
    options = LinearProbeOptions(learning_rates=(1e38, 0.1), epochs=(2,), images_per_step=16)
    probe = train_linear_probe(1e3 * features, labels, 3, options)
    assert probe.best.learning_rate == 0.1
    assert not np.isfinite(probe.grid[0].loss)


def test_invalid_training_inputs_are_one_line_errors():
    features, labels = clusters()
    for message, count, classes in (
        ("label 2 lies outside the 2 classes", 120, 2),
        ("no valid example", 0, 3),
        ("one training image", 1, 3),
    ):
        assert_refused(message, train_linear_probe, features[:count], labels[:count], classes, SMALL)
    broken = np.full_like(features, np.nan)
    assert_refused("no setting has a finite loss", train_linear_probe, broken, labels, 3, SMALL)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"learning_rates": ()}, "learning_rates is empty"),
        ({"weight_decays": (-1.0,)}, "weight_decays = -1.0 must be at least 0"),
        ({"learning_rates": (0.1, math.nan)}, "learning_rates = nan must be at least 0.0, and finite"),
        ({"initial_bias": math.nan}, "initial_bias = nan must be finite"),
        ({"mixup": math.inf}, "mixup = inf must be finite"),
        ({"seed": -1}, "seed = -1 must be at least 0"),
        ({"epochs": (0,)}, "epochs = 0 must be at least 1"),
        ({"minival": 1.0}, "minival = 1.0 must lie between 0 and 1"),
        ({"crops": ()}, "crops is empty"),
        ({"crops": ("whole", "whole")}, "names a value twice"),
        ({"crops": ("centre",)}, "crops = 'centre' must be one of whole, random, inception"),
        ({"mixup": -0.1}, "mixup = -0.1 must be at least 0"),
        ({"images_per_step": 0}, "images_per_step = 0 must be at least 1"),
    ],
)
def test_options_out_of_range_are_refused(changed, message):
    assert_refused(message, LinearProbeOptions, **changed)
