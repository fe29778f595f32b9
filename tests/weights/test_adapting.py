"""Towers that start from those of another form: BatchEnsemble, MIMO, experts of a ViT (e3 App. B, H.3)."""

import dataclasses

import numpy as np
import pytest

from lit_het import parameters
from lit_het.configs import experiment
from lit_het.configs.experiment import PretrainedConfig
from lit_het.errors import UserError
from lit_het.models import pretrained
from lit_het.sharding import MeshConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.mimo import MimoConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.rank_one import RankOneConfig
from lit_het.towers.stem_config import StemConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.training.initialization import initial_params
from lit_het.weights import adapting, formats
from lit_het.weights.big_vision.exporting import write_npz
from lit_het.weights.importing import ImportOptions, import_weights
from tests.towers import models
from tests.towers.models import run, shapes, with_encoder
from tests.weights.importing import GOLDEN

VIT = ViTConfig(8, 4, EncoderConfig(width=8, depth=4, mlp_width=12, num_heads=2), pooling="mean", members="apart")
EXPERTS = ExpertsConfig(num_experts=4, num_selected=2, blocks=(1, 2), dispatch="ragged")
IMAGES = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8)
BATCH_ENSEMBLE = ExpertsConfig(3, 1, num_members=3, blocks=(1, 2), rank_one=RankOneConfig())


def with_experts(experts, tower=VIT):
    return with_encoder(tower, experts=experts)


def drawn(tower):
    return parameters.flatten(models.drawn(shapes(tower)))


def embed(tower, params):
    return np.asarray(run(tower, parameters.unflatten(params), IMAGES).embedding)


def test_a_batch_ensemble_of_vectors_of_ones_is_the_vit_that_it_starts_from():
    tower, params = with_experts(BATCH_ENSEMBLE), drawn(VIT)
    found = adapting.adapted(params, VIT, tower)
    new = {path: np.ones_like(x) for path, x in drawn(tower).items() if path not in found}
    assert {path.split("/")[-2] for path in new} == {"vectors"}
    members = embed(tower, {**found, **new}).reshape(4, 3, 8)
    for member in range(3):
        np.testing.assert_allclose(members[:, member], embed(VIT, params), atol=1e-5)


def test_experts_of_a_vit_are_copies_of_its_mlps():
    # With all experts selected the gates sum to 1.
    tower, params = with_experts(dataclasses.replace(EXPERTS, num_selected=4)), drawn(VIT)
    found = adapting.adapted(params, VIT, tower)
    new = {path: x for path, x in drawn(tower).items() if path not in found}
    assert list(new) == ["encoder/expert_blocks/mixture/router/kernel"]
    np.testing.assert_allclose(embed(tower, {**found, **new}), embed(VIT, params), atol=1e-5)


@pytest.mark.parametrize("inputs_as", ["channels", "patches", "channels of a hybrid"])
def test_equal_inputs_of_mimo_give_the_embedding_of_the_image(inputs_as):
    inputs_as, *hybrid = inputs_as.split(" of ")
    source = dataclasses.replace(VIT, stem=StemConfig((1,), 32)) if hybrid else VIT
    tower, params = dataclasses.replace(source, num_inputs=3, inputs_as=inputs_as), drawn(source)
    found = embed(tower, adapting.adapted(params, source, tower))
    np.testing.assert_allclose(found, embed(source, params), atol=1e-3 if hybrid else 1e-5)


def test_class_tokens_start_from_the_one_of_the_source():
    single = dataclasses.replace(VIT, pooling="class_token")
    tower, params = dataclasses.replace(single, num_class_tokens=2), drawn(single)
    found = embed(tower, adapting.adapted(params, single, tower))
    assert found.shape[1] == 2 * VIT.encoder.width
    first, second = np.split(found, 2, axis=1)
    np.testing.assert_allclose(first, second, atol=1e-5)
    assert adapting.is_adapted(single, tower)


@pytest.mark.slow
def test_the_order_of_experts_changes_members_but_not_a_single_model():
    single, params = with_experts(EXPERTS), drawn(with_experts(EXPERTS))
    permuted = with_experts(dataclasses.replace(EXPERTS, permutation=1))
    found = adapting.adapted(params, single, permuted)
    moved = [path for path, array in found.items() if (array != params[path]).any()]
    assert moved
    assert all("/mixture/" in path for path in moved)
    np.testing.assert_allclose(embed(single, found), embed(single, params), atol=1e-5)
    pair = with_experts(dataclasses.replace(EXPERTS, num_members=2))
    assert np.abs(embed(pair, found) - embed(pair, params)).max() > 1e-3


@pytest.mark.parametrize(("k", "m"), [(1, 2), (2, 2), (1, 4)])
def test_another_k_and_m_than_upstream_take_the_parameters_as_they_are(k, m):
    """The mismatch of e3 Table 19: upstream K = 2, M = 1."""
    upstream, downstream = (
        with_experts(dataclasses.replace(EXPERTS, **changes)) for changes in ({}, {"num_selected": k, "num_members": m})
    )
    assert not adapting.is_adapted(upstream, downstream)
    assert embed(downstream, drawn(upstream)).shape == (4 * m, 8)


VIT_FILE = str(GOLDEN / "hf_vit")
FORMS = {
    "BatchEnsemble": {"experts": ExpertsConfig(2, 1, num_members=2, num_blocks=1, rank_one=RankOneConfig())},
    "V-MoE": {"experts": ExpertsConfig(4, 2, num_blocks=1)},
    "MIMO": {"num_inputs": 2},
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run with the weights of the file."""
    run_dir = tmp_path_factory.mktemp("runs") / "vit"
    import_weights(VIT_FILE, run_dir, ImportOptions())
    return run_dir


@pytest.mark.parametrize("source", ["file", "run"])
@pytest.mark.parametrize("form", FORMS)
def test_training_starts_from_a_vit_of_a_file_and_of_a_run(form, source, run_dir):
    config = experiment.load(run_dir / "config.json")
    assert isinstance(config.task, ClassificationConfig)
    plain = config.task.image_tower
    assert isinstance(plain, ViTConfig)
    tower = dataclasses.replace(
        plain,
        encoder=dataclasses.replace(plain.encoder, experts=FORMS[form].get("experts")),
        num_inputs=FORMS[form].get("num_inputs", 1),
        members="apart",
        weights=VIT_FILE if source == "file" else None,
    )
    heads = {"num_heads": 2, "mimo": MimoConfig()} if form == "MIMO" else {}
    task = dataclasses.replace(config.task, image_tower=tower, **heads)
    config = dataclasses.replace(config, task=task, pretrained=PretrainedConfig(run_dir) if source == "run" else None)
    _, params = initial_params(config, task.build(), MeshConfig().build())
    ours = parameters.flatten(params["image_tower"])
    theirs = parameters.flatten(formats.load_part(formats.open_weights(VIT_FILE), "image_tower", shapes(plain)))
    expected = adapting.adapted({path: np.asarray(x) for path, x in theirs.items()}, plain, tower)
    for path, array in expected.items():
        np.testing.assert_array_equal(ours[path], array)
    assert all(("/router/" in path) or ("/vectors/" in path) for path in ours.keys() - expected.keys())


def test_kernels_of_rank_one_are_those_of_another_model():
    with_ones = with_experts(dataclasses.replace(BATCH_ENSEMBLE, num_experts=6))
    without = with_experts(dataclasses.replace(EXPERTS, num_experts=6))
    assert "encoder.experts.rank_one.type" in pretrained._differences(with_ones, without)
    other_start = dataclasses.replace(BATCH_ENSEMBLE, num_experts=6, rank_one=RankOneConfig("normal", 2.0))
    assert pretrained._differences(with_ones, with_experts(other_start)) == {}


def test_a_tower_of_several_inputs_has_no_layout_in_big_vision(tmp_path):
    tower = dataclasses.replace(VIT, num_inputs=2)
    with pytest.raises(UserError, match="num_inputs"):
        write_npz(tmp_path / "x.npz", tower, None, {"image_tower": parameters.unflatten(drawn(tower))})


def test_a_router_that_no_source_determines_cannot_be_locked(run_dir):
    config = experiment.load(run_dir / "config.json")
    assert isinstance(config.task, ClassificationConfig)
    assert isinstance(config.task.image_tower, ViTConfig)
    tower = with_experts(ExpertsConfig(4, 2, num_blocks=1), config.task.image_tower)
    task = dataclasses.replace(config.task, image_tower=tower, locked=("image_tower/.*",))
    config = dataclasses.replace(config, task=task, pretrained=PretrainedConfig(run_dir))
    with pytest.raises(UserError, match="router/kernel is locked but"):
        initial_params(config, task.build(), MeshConfig().build())
