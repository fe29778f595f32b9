"""A trained model in Python: the numbers of `lit-het classify`, embeddings, other devices, and imported models."""

import dataclasses
import json
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

import lit_het
from lit_het.cli.main import main
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.models.model import Model
from lit_het.sharding import MeshConfig
from tests import tiny
from tests.cli.test_classify import NAMES, images  # noqa: F401  # pyright: ignore[reportUnusedImport]
from tests.weights.importing import GOLDEN


@pytest.fixture(scope="module")
def model(once_calibrated):
    return lit_het.load(once_calibrated)


@pytest.fixture
def squares():
    return list(np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8))


def test_a_prediction_is_that_of_the_command(model, once_calibrated, images, capsys):  # noqa: F811
    command = ["classify", *map(str, images), "--checkpoint", str(once_calibrated), "--labels", ",".join(NAMES)]
    assert main([*command, "--json", "--coverage", "0.9", "--prompts", "photo", "--seed", "3"]) == 0
    printed = json.loads(capsys.readouterr().out)
    found = model.classify(images, NAMES, coverage=0.9, prompts="photo", seed=3)
    assert [one.to_dict() for one in found] == printed
    alone = model.classify(Image.open(images[1]), NAMES, prompts=["a photo of a {c}."], seed=3)
    np.testing.assert_allclose(alone.to_numpy(), found[1].to_numpy(), rtol=1e-4)
    np.testing.assert_allclose(alone.band, found[1].band, rtol=1e-4)


def test_a_saved_model_predicts_as_before_with_noise_and_calibration(model, squares, tmp_path):
    model.save_pretrained(tmp_path / "folder", licence="apache-2.0")
    assert "apache-2.0" in (tmp_path / "folder" / "README.md").read_text()
    again = lit_het.load(tmp_path / "folder")
    expected, found = (one.classify(squares, NAMES, samples=4).to_numpy() for one in (model, again))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(again.noise(squares), model.noise(squares))
    assert str(again.calibration).startswith("calibrated on")
    with pytest.raises(lit_het.UserError, match="is not an empty folder"):
        model.save_pretrained(tmp_path / "folder")


def test_embeddings_are_those_of_the_predictions(model, squares):
    uncalibrated = lit_het.load(model.run.run_dir, calibrated=False)
    assert (str(model.calibration).startswith("calibrated on"), uncalibrated.calibration) == (True, "not calibrated")
    image_embeddings, texts = uncalibrated.encode_images(squares), uncalibrated.encode_texts(NAMES)
    np.testing.assert_allclose(np.linalg.norm(image_embeddings, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(texts, axis=1), 1, rtol=1e-5)
    logits = image_embeddings @ texts.T / float(model.run.task.temperature(model.run.params))
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    found = uncalibrated.classify(squares, NAMES, samples=0)
    np.testing.assert_allclose(found.to_numpy(), probabilities, rtol=1e-3)
    np.testing.assert_allclose(uncalibrated.noise(squares), [one.noise_norm for one in found], rtol=1e-5)
    assert found[0].noise_norm > 0


def test_one_image_or_text_has_one_result(model, squares):
    assert model.classify(squares[0], NAMES).labels == tuple(NAMES)
    np.testing.assert_allclose(model.encode_images(squares[0]), model.encode_images(squares)[0], atol=1e-6)
    np.testing.assert_allclose(model.encode_texts("red bar"), model.encode_texts(["red bar", "x"])[0], atol=1e-6)
    assert model.noise(squares[0]).shape == ()
    assert model.noise(np.stack(squares)).shape == (3,)


def test_many_images_have_a_progress_bar_and_few_have_none(model, squares, capfd):
    few = model.encode_images(squares)
    assert "images" not in capfd.readouterr().err
    many = model.encode_images(squares * 12)
    assert "encoding images: 36/36" in capfd.readouterr().err
    np.testing.assert_allclose(many[-3:], few, atol=1e-6)


@pytest.mark.slow
@pytest.mark.devices
@pytest.mark.parametrize("axes", [("rows",), ("data", "fsdp")])
def test_results_are_equal_on_any_mesh(model, squares, axes):
    shape = (3,) if len(axes) == 1 else (1, 2)
    devices = np.array(jax.devices()[2 : 2 + np.prod(shape)]).reshape(shape)
    other = lit_het.load(model.run.run_dir, mesh=jax.sharding.Mesh(devices, axes))
    np.testing.assert_allclose(other.encode_images(squares), model.encode_images(squares), rtol=1e-3, atol=1e-6)
    ours, theirs = (one.classify(squares, NAMES).to_numpy() for one in (model, other))
    np.testing.assert_allclose(theirs, ours, rtol=1e-3)


def test_a_model_of_another_library_is_loaded_without_a_run(squares, tmp_path):
    folder = tmp_path / "siglip"
    folder.mkdir()
    for file in (*(GOLDEN / "hf_siglip").iterdir(), *(GOLDEN / "hf_siglip_tokenizer").iterdir()):
        (folder / file.name).write_bytes(file.read_bytes())
    # The golden tokenizer has more pieces than the golden tower.
    (folder / "spiece.model").unlink()
    assert main(["import", "--from", str(folder), "--to", str(tmp_path / "run")]) == 0
    imported, loaded = lit_het.load(tmp_path / "run"), lit_het.load(folder, mesh=MeshConfig())
    np.testing.assert_array_equal(loaded.encode_images(squares), imported.encode_images(squares))
    assert not loaded.noise(squares).any()
    with pytest.raises(lit_het.UserError, match="has no tokenizer"):
        loaded.encode_texts("a cat")


def test_a_classifier_predicts_its_classes_and_encodes_features(upstream, data, squares):
    names = (data / "train" / "words.txt").read_text().split()
    classifier = lit_het.load(upstream)
    assert set(classifier.classify(squares[0], names)) == set(names)
    assert classifier.encode_images(squares).shape == (3, 64)
    assert (classifier.noise(squares) > 0).all()
    with pytest.raises(lit_het.UserError, match="cannot embed text: it is not an image-text model"):
        classifier.encode_texts("a cat")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": []}, "no labels; give at least one"),
        ({"labels": "a cat,a dog"}, r"labels = 'a cat,a dog' is not a list of texts"),
        ({"labels": None}, "labels = None is not a list of texts"),
        ({"labels": ["a cat", None]}, r"labels\[1\] = None is not a text"),
        ({"labels": [float("nan"), "a cat"]}, r"labels\[0\] = nan is not a text"),
        ({"labels": {"a cat", "a dog"}}, "labels = .* is not a list of texts"),
        ({"labels": ["", "a cat"]}, r"labels\[0\] = '' is blank"),
        ({"labels": ["a cat", "\ud800"]}, r"labels\[1\] = '.*ud800' is not valid Unicode"),
        ({"labels": {"a cat": 1, "a dog": 2}}, "labels = .* is not a list of texts"),
        ({"prompts": 5}, "prompts = 5 is not a list of texts"),
        ({"prompts": ["{c}", 1]}, r"prompts\[1\] = 1 is not a text"),
        ({"samples": -1}, "samples = -1 must be from 0 to 10,000"),
        ({"samples": 10**9}, "samples = 1000000000 must be from 0 to 10,000"),
        ({"samples": 1.5}, "samples = 1.5 must be a whole number"),
        ({"samples": True}, "samples = True must be a whole number"),
        ({"seed": None}, "seed = None must be a whole number"),
        ({"seed": 2**70}, "seed = 1180591620717411303424 must be from 0 to 4,294,967,295"),
        ({"prompts": ["a photo"]}, "lacks the placeholder"),
        ({"coverage": "0.9"}, "coverage = '0.9' must be a number"),
        ({"coverage": True}, "coverage = True must be a number"),
        ({"coverage": 2.0}, "coverage 2 has no stored threshold"),
        ({"images": ["nowhere.jpg"]}, "nowhere.jpg: cannot be read"),
        ({"images": {"nowhere.jpg"}}, "give an image, or a list of one or more"),
    ],
)
def test_wrong_arguments_are_one_line_errors(model, squares, arguments, message: str):
    with pytest.raises(lit_het.UserError, match=message):
        model.classify(**{"images": squares, "labels": NAMES, **arguments})


def test_texts_that_are_none_are_named(model):
    with pytest.raises(lit_het.UserError, match=r"texts\[1\] = nan is not a text"):
        model.encode_texts(["a cat", float("nan")])
    for texts, message in ((1, "texts = 1 is not a list"), ("  ", "'  ' is blank"), ("\ud800", "not valid Unicode")):
        with pytest.raises(lit_het.UserError, match=message):
            model.encode_texts(texts)


API: Any = lit_het  # without types, which forbid what follows


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: API.load(run, pretrained=5), "pretrained = 5 is not a path"),
        (lambda run: API.load(run, mesh="data"), "mesh = 'data' must be a mesh of JAX, MeshConfig"),
        (lambda run: API.load(run, mesh={}), "mesh = {} must be a mesh"),
        (lambda run: API.load(run, options={}), r"options = {} must be ImportOptions\(...\) or None"),
        (lambda run: API.load(run, calibrated="no"), "calibrated = 'no' must be True or False"),
        (lambda run: API.load("a\0b"), r"address = 'a.x00b' is not a path"),
        (lambda run: API.train("quickstart_upstream", resume="no"), "resume = 'no' must be True or False"),
        (lambda run: API.train("quickstart_upstream", allow_commands="no"), "allow_commands = 'no' must be"),
        (lambda run: API.evaluate([]), "no run; give at least one"),
        (lambda run: API.evaluate([run, 5]), r"run\[1\] = 5 is not a path"),
        (lambda run: API.evaluate(run, 5), "evaluations = 5 is not a list of configurations"),
        (lambda run: API.evaluate(run, ["zero_shot"]), r"evaluations\[0\] = 'zero_shot' must be a configuration"),
        (lambda run: API.evaluate(run, output=5), "output = 5 is not a path"),
        (lambda run: API.evaluate(run, pretrained=5), "pretrained = 5 is not a path"),
        (lambda run: API.evaluate(run, calibrated=0), "calibrated = 0 must be True or False"),
        (lambda run: API.embed(5, "out"), "tower = 5 is not a path"),
        (lambda run: API.embed(run, 5), "output = 5 is not a path"),
        (lambda run: API.embed(run, "out", data="data/train"), "data = 'data/train' is not a list of paths"),
        (lambda run: API.embed(run, "out", data=["a", 5]), r"data\[1\] = 5 is not a path"),
        (lambda run: API.embed(run, "out", dtype="int8"), "dtype = 'int8' is not one of 'float32'"),
        (lambda run: API.embed(run, "out", crops="1"), "crops = '1' must be a whole number"),
        (lambda run: API.embed(run, "out", part=5), "part = 5 is not a list"),
        (lambda run: API.embed(run, "out", part=(0,)), r"part = \(0,\) must be two numbers"),
        (lambda run: API.embed(run, "out", part=(0, "2")), "part = '2' must be a whole number"),
        (lambda run: API.embed(run, "out", texts="no"), "texts = 'no' must be True or False"),
        (lambda run: API.load(run).push_to_hub(5), "repository = 5 is not a text"),
        (lambda run: API.load(run).save_pretrained("x\0y"), r"folder = 'x.x00y' is not a path"),
        (lambda run: API.load(run).save_pretrained("out", licence=5), "licence = 5 must be a text or None"),
    ],
)
def test_every_function_names_the_parameter_that_is_wrong(trained_lit, tmp_path, monkeypatch, call, message: str):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(lit_het.UserError, match=message):
        call(trained_lit.run_dir)
    assert not [*tmp_path.iterdir()]


def test_generators_large_seeds_and_numbers_of_numpy_are_taken(model, squares):
    found = model.classify(squares[0], NAMES, samples=4, seed=2**32 - 1)
    again = model.classify(squares[0], (name for name in NAMES), samples=np.int64(4), seed=np.uint32(2**32 - 1))
    np.testing.assert_array_equal(again.noisy_mean, found.noisy_mean)
    assert (found.noisy_mean != model.classify(squares[0], NAMES, samples=4).noisy_mean).any()


def test_a_path_without_a_model_is_a_one_line_error(upstream, tmp_path):
    with pytest.raises(lit_het.UserError, match="does not exist; give a file, a folder or an address"):
        lit_het.load(tmp_path / "nowhere")
    wrongs: list[Any] = [None, 3, b"run"]
    for wrong in wrongs:
        with pytest.raises(lit_het.UserError, match=f"address = {wrong!r} is not a path"):
            lit_het.load(wrong)
        with pytest.raises(lit_het.UserError, match=f"run = {wrong!r} is not a path"):
            lit_het.evaluate(wrong)
    with pytest.raises(lit_het.UserError, match="does not exist"):
        lit_het.load("x" * 100_000)
    with pytest.raises(
        lit_het.UserError, match="is not a run directory, and has no locked parameters; leave out pretrained"
    ):
        lit_het.load(tmp_path, pretrained=upstream)


def test_training_embedding_and_evaluation_are_functions(lit_config, held_out, tmp_path, capsys):
    with tiny.untrained():
        trained = lit_het.train(dataclasses.replace(lit_config, calibration=None))
    assert trained == lit_config.run_dir
    assert isinstance(lit_het.load(trained), Model)
    shapes = ImageSet("shapes", str(held_out), split="")
    (found,) = lit_het.evaluate(trained, [ZeroShotConfig(shapes)])
    assert 0 <= found.figures["top1"] <= 1
    assert (trained / "evaluations" / "zero_shot_shapes.json").exists()
    lit_het.embed(trained, tmp_path / "embeddings")
    config = dataclasses.replace(
        lit_config,
        run_dir=tmp_path / "on_embeddings",
        calibration=None,
        data=dataclasses.replace(lit_config.data, embeddings=str(tmp_path / "embeddings")),
    )
    lit_het.embed(config, tmp_path / "embeddings")  # the same tower: all shards are there
    assert "2 of 2 shards already have embeddings" in capsys.readouterr().err
    with tiny.untrained():
        assert lit_het.train(config) == config.run_dir


def test_a_configuration_is_named_or_a_path(tmp_path, trained_lit):
    with pytest.raises(lit_het.UserError, match="no configuration file nowhere"):
        lit_het.train("nowhere")
    with pytest.raises(lit_het.UserError, match=r"the configuration of .* lists no evaluations"):
        lit_het.evaluate(str(trained_lit.run_dir))
    with pytest.raises(lit_het.UserError, match=r"config.json is missing"):
        lit_het.evaluate(tmp_path)


def test_importing_the_package_is_light_and_its_names_are_listed():
    script = "import sys, lit_het; print(sorted({'jax', 'numpy', 'rich'} & sys.modules.keys()), *dir(lit_het))"
    printed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert printed.startswith("[] ")
    assert {"load", "train", "evaluate", "embed", "Model", "UserError"} <= set(printed.split())
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        _ = lit_het.lode  # pyright: ignore[reportAttributeAccessIssue]


def test_the_version_is_printed_by_both_ways_to_start():
    module = subprocess.run([sys.executable, "-m", "lit_het", "--version"], check=True, capture_output=True, text=True)
    assert module.stdout == f"lit-het {lit_het.__version__}\n"
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
