"""Models as evaluators see them: the number of devices changes nothing, not by a bit."""

from collections.abc import Iterator

import jax
import numpy as np
import pytest

from lit_het import sharding
from lit_het.eval.features import Features, read_features
from lit_het.eval.metrics import scores
from lit_het.eval.predictions import Predictor, class_scores, member_blocks, predict
from lit_het.eval.sets.recognition import embed_class_names
from lit_het.models.opening import Run, open_run
from lit_het.models.predictor import Programs
from lit_het.sharding import MeshConfig
from lit_het.types import Batch

pytestmark = pytest.mark.devices
NUM_IMAGES = 2_500  # four batches on eight devices, the last of which is filled up
NAMES = ("red bar", "green bar", "red square", "blue square")


def batches(size: int) -> Iterator[Batch]:
    """Random images in batches, the last of which is filled up."""
    images = np.random.default_rng(0).integers(0, 256, (NUM_IMAGES, 32, 32, 3), dtype=np.uint8)
    labels = np.random.default_rng(1).integers(0, len(NAMES), NUM_IMAGES, dtype=np.int32)
    for start in range(0, NUM_IMAGES, size):
        rows = np.arange(start, start + size)
        within = np.minimum(rows, NUM_IMAGES - 1)
        yield Batch(valid=rows < NUM_IMAGES, image=images[within], label=labels[within])


def evaluate(run: Run, num_devices: int) -> tuple[Features, dict[str, float], dict[str, float]]:
    """Features, and figures without and with noise, each device taking 96 images at a time."""
    mesh = MeshConfig().build(jax.devices()[:num_devices])
    params = jax.device_put(run.params, sharding.tree_shardings(run.params, mesh))
    model = Programs(run.task, mesh, run.tokenizer).model(params, "a tower")
    assert model.features.num_shards == num_devices
    [features] = read_features([model.features], batches(96 * num_devices), lambda count: None, "random")
    names = embed_class_names(model, NAMES)
    quiet, noisy = (scores.figures(predict(Predictor(model, len(NAMES), names, s), features))[0] for s in (0, 3))
    return features, quiet, noisy


@pytest.mark.slow
def test_thousands_of_images_give_the_same_figures_on_one_device_and_on_eight(trained_lit):
    run = open_run(trained_lit.run_dir)
    one, eight = (evaluate(run, num_devices) for num_devices in (1, 8))
    assert len(one[0].labels) == NUM_IMAGES
    for field in ("values", "labels", "positions"):
        np.testing.assert_array_equal(getattr(one[0], field), getattr(eight[0], field))
    assert one[1:] == eight[1:]


@pytest.mark.slow
def test_a_classifier_with_noise_predicts_the_same_on_one_device_and_on_eight(upstream):
    run = open_run(upstream)
    values = np.random.default_rng(0).normal(size=(3000, run.task.features.size)).astype(np.float32)
    images = Features(values, np.zeros(len(values), np.int32), np.arange(len(values)))

    def said(num_devices: int) -> list[np.ndarray]:
        mesh = MeshConfig().build(jax.devices()[:num_devices])
        params = jax.device_put(run.params, sharding.tree_shardings(run.params, mesh))
        model = Programs(run.task, mesh, None).model(params, "a tower")
        assert model.num_classes
        predictor = Predictor(model, model.num_classes, samples=3)
        members = np.concatenate([block_logits for block_logits, _ in member_blocks(predictor, images)])
        return [*vars(predict(predictor, images)).values(), members, class_scores(predictor, images)]

    for one, eight in zip(said(1), said(8), strict=True):
        np.testing.assert_array_equal(one, eight)
