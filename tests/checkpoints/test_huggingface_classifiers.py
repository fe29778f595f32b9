"""Exported classifiers have the probabilities of the run in transformers."""

import dataclasses
import json
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from lit_het.checkpoints.huggingface.classifiers import write_classifier
from lit_het.errors import UserError
from tests.checkpoints.huggingface_models import run
from tests.checkpoints.test_huggingface_export import IMAGE, IMAGES, MEAN, UINT8, fresh

NAMES = ("cat", "dog", "owl")
CASES = {name: IMAGES[name][0] for name in ("mean", "ViT with exact GELU", "DINOv2", "DINOv2 with registers")}


def classifier(image):
    """Returns the parameters of a tower with random logits."""
    random = np.random.default_rng(3)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)  # noqa: E731
    return {"image_tower": fresh(image)["image_tower"], "head": {"logits": {"kernel": draw(16, 3), "bias": draw(3)}}}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", CASES)
def test_every_classifier_has_the_same_logits_in_transformers(tmp_path, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    image, params = CASES[kind], classifier(CASES[kind])
    write_classifier(tmp_path, image, params, 0.5, NAMES, is_sigmoid=False)
    auto = transformers.AutoModelForImageClassification
    model, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        theirs = model(torch.tensor(np.moveaxis(UINT8 / 127.5 - 1, -1, 1), dtype=torch.float32)).logits
    head = params["head"]["logits"]
    ours = (run(image, params["image_tower"], UINT8).embedding @ head["kernel"] + head["bias"][None]) / 0.5
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-4)
    assert model.config.id2label == dict(enumerate(NAMES))


@pytest.mark.parametrize(("is_sigmoid", "kind"), [(True, "multi_label"), (False, "single_label")])
def test_the_loss_decides_between_sigmoids_and_a_softmax(tmp_path, is_sigmoid, kind):
    write_classifier(tmp_path, MEAN, classifier(MEAN), 1.0, (), is_sigmoid=is_sigmoid)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["problem_type"] == f"{kind}_classification"
    assert config["id2label"]["2"] == "LABEL_2"


def test_attention_pooling_is_refused(tmp_path):
    for image in (IMAGE, dataclasses.replace(MEAN, representation_size=16)):
        with pytest.raises(UserError, match="is not supported by image classification of transformers"):
            write_classifier(tmp_path, image, classifier(image), 1.0, (), is_sigmoid=False)
