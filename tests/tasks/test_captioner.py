"""A decoder that learns to write captions beside a contrastive loss (CoCa; SigLIP 2)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.heads.contrastive import DeterministicContrastiveConfig, HetXLContrastiveConfig
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.deterministic import DeterministicConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.sampling import SamplingConfig
from lit_het.losses.contrastive import SigmoidLoss
from lit_het.sharding import MeshConfig, batch_sharding, tree_shardings
from lit_het.tasks import captioner
from lit_het.tasks.captioner import CaptionerConfig
from lit_het.tasks.captioning import captioner_params, captioning_of
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.mixing import Mixing
from lit_het.towers.resnet import ResNetConfig
from lit_het.towers.text import TextConfig
from tests.tasks.test_captioning import BATCH, DECODER, ENCODER, KEYS, TOWER

TEXT = TextConfig(vocabulary_size=9, length=5, embedding_size=8, encoder=ENCODER, pooling="mean")
COCA = ContrastiveConfig(
    dataclasses.replace(TOWER, pooling="attention"), TEXT, captioner=CaptionerConfig(DECODER, weight=2.0), locked=()
)
SIGLIP2 = dataclasses.replace(
    COCA,
    head=DeterministicContrastiveConfig(initial_bias=-10.0),
    loss=SigmoidLoss(),
    captioner=CaptionerConfig(DECODER),
)
NOISY = dataclasses.replace(
    COCA,
    head=HetXLContrastiveConfig(CovarianceConfig(3), num_samples=4),
    captioner=CaptionerConfig(DECODER, HetXLConfig(CovarianceConfig(3), sampling=SamplingConfig(num_samples=4))),
)


@functools.cache
def start(config):
    task = config.build()
    return task, jax.jit(task.initialize)(jax.random.key(0))


def value_and_gradient(config, params, batch=BATCH):
    return jax.jit(jax.value_and_grad(lambda p: config.build().loss(p, batch, KEYS), has_aux=True))(params)


CLASS_TOKEN = dataclasses.replace(COCA, image_tower=dataclasses.replace(TOWER, pooling="class_token"))


@pytest.mark.parametrize(
    "config", [COCA, SIGLIP2, NOISY, CLASS_TOKEN], ids=["coca", "siglip2", "het_xl", "class token"]
)
def test_the_loss_and_its_gradient_are_the_sum_of_both_parts(config):
    _, params = start(config)
    (loss, metrics), gradient = value_and_gradient(config, params)
    alone = dataclasses.replace(config, captioner=None)
    others = {name: tree for name, tree in params.items() if name != "captioner"}
    (contrastive, _), of_contrastive = value_and_gradient(alone, others)
    captioning = captioning_of(config)
    assert captioning is not None
    captioning = dataclasses.replace(captioning, locked=())
    (caption, found), of_caption = value_and_gradient(captioning, captioner_params(captioning.build(), params))
    weight = config.captioner.weight
    assert float(loss) == pytest.approx(float(contrastive) + weight * float(caption), rel=1e-5)
    assert float(metrics["caption_loss"]) == pytest.approx(float(caption), rel=1e-5)
    assert float(metrics["caption_top1"]) == pytest.approx(float(found["top1"]))
    flat, one, other = (parameters.flatten(tree) for tree in (gradient, of_contrastive, of_caption))
    for path, value in flat.items():
        expected = one.get(path, 0.0) + weight * other.get(path.removeprefix("captioner/"), 0.0) * (
            path.startswith(("captioner/", "image_tower/"))
        )
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=2e-5, err_msg=path)


def test_a_locked_image_tower_learns_from_neither_part():
    config = dataclasses.replace(COCA, locked=("image_tower/.*",))
    task, params = start(config)
    locked, trainable = parameters.partition(params, task.locked)
    assert set(locked) == {"image_tower"}
    assert set(trainable) == {"text_tower", "captioner", *({"head"} & set(params))}
    above = parameters.flatten(task.layers_above(params))
    assert above["captioner/decoder/tokens/embedding"] == 2
    assert above["captioner/head/logits/kernel"] == 0


def test_a_locked_text_tower_leaves_the_decoder_as_it_is():
    config = dataclasses.replace(COCA, locked=("image_tower/.*", "text_tower/tokens/.*", "captioner/head/.*"))
    task, params = start(config)
    captioning = captioning_of(config)
    assert captioning is not None
    written = captioning.build()
    assert captioner_params(written, params).keys() == written.shapes.keys()
    assert task.trained


def test_eight_devices_give_the_loss_and_the_gradient_of_one():
    _, params = start(SIGLIP2)
    (loss, _), gradient = value_and_gradient(SIGLIP2, params)
    mesh = MeshConfig(data=4, fsdp=2).build()
    placed = jax.device_put(params, tree_shardings(params, mesh))
    batch = jax.device_put(BATCH, batch_sharding(mesh))
    with jax.set_mesh(mesh):
        (split, _), of_split = value_and_gradient(SIGLIP2, placed, batch)
    assert float(split) == pytest.approx(float(loss), rel=1e-5)
    for path, value in parameters.flatten(gradient).items():
        np.testing.assert_allclose(parameters.flatten(of_split)[path], value, atol=2e-5, err_msg=path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"image_tower": TOWER, "text_tower": dataclasses.replace(TEXT, embedding_size=TOWER.embedding_size)},
            "it needs a ViT with a pooling",
        ),
        (
            {"image_tower": ResNetConfig(), "text_tower": dataclasses.replace(TEXT, embedding_size=2048)},
            "it needs a ViT",
        ),
        ({"microbatches": 2}, "set task.microbatches to 1"),
        ({"mixing": Mixing(), "loss": SigmoidLoss()}, "leave out task.mixing"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(COCA, **changes)


def test_weights_are_positive_and_tied_logits_have_a_kernel():
    with pytest.raises(UserError, match="must be above 0"):
        CaptionerConfig(weight=0.0)
    tied = dataclasses.replace(DECODER, tied_output=True)
    with pytest.raises(UserError, match=r"set task\.captioner\.head\.zero_kernel to False"):
        CaptionerConfig(tied, DeterministicConfig(zero_kernel=True))


@pytest.mark.parametrize(
    "batch",
    [
        dataclasses.replace(BATCH, text_target=None),
        dataclasses.replace(BATCH, image=None, image_embedding=jnp.zeros((8, 8))),
    ],
)
def test_stored_embeddings_and_texts_without_targets_are_refused(batch):
    task, params = start(COCA)
    with pytest.raises(UserError, match="needs images, not their stored embeddings"):
        task.loss(params, batch, KEYS)


def test_blocks_of_tokens_leave_loss_and_gradient_as_they_are(monkeypatch):
    _, params = start(COCA)
    (whole, _), of_whole = value_and_gradient(COCA, params)
    monkeypatch.setattr(captioner, "_LOGITS_PER_BLOCK", 9 * 10)
    monkeypatch.setattr(captioner, "_LEAST_TOKENS_PER_BLOCK", 4)
    assert captioner.tokens_per_block(8 * 5, 9) == 10
    (in_blocks, _), of_blocks = value_and_gradient(COCA, params)
    assert float(in_blocks) == pytest.approx(float(whole), rel=1e-6)
    for path, value in parameters.flatten(of_whole).items():
        np.testing.assert_allclose(parameters.flatten(of_blocks)[path], value, atol=2e-6, err_msg=path)


def test_a_batch_without_divisors_is_one_block():
    assert captioner.tokens_per_block(13, 256_000) == 13
    assert captioner.tokens_per_block(1009, 256_000) == 1009
    assert captioner.tokens_per_block(64 * 64, 256_000) == 256
    assert captioner.tokens_per_block(512, 32_000) == 512
