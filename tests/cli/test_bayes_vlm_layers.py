"""`lit-het add-noise --task.head bayes_vlm` of models whose towers end with a linear layer: CLIP's and SigLIP's."""

from pathlib import Path

import jax
import numpy as np
import onnxruntime
import pytest
import safetensors.numpy

import lit_het
from lit_het import parameters
from lit_het.configs import quickstart_lit_deterministic
from lit_het.heads import bayes_vlm_fit, laplace
from lit_het.models.opening import open_run
from lit_het.tasks.contrastive import ContrastiveConfig
from tests import tiny
from tests.cli.conftest import changed, refusal, run_command
from tests.cli.test_uncertainty_methods import IMAGE, NAMES

pytestmark = pytest.mark.slow
SIGLIP = Path(__file__).parents[1] / "golden" / "hf_siglip"
SIZES = {"clip": 32, "siglip": 24}  # of images
# Path of the last layer, its inputs without the bias, and whether it has one.
LAYERS = {
    "clip": {"image": ("projection", 64, False), "text": ("projection", 48, False)},
    "siglip": {"image": ("pooling/mlp/down", 40, True), "text": ("projection", 24, True)},
}


@pytest.fixture(scope="module")
def clip(data, tmp_path_factory):
    """A run with projections from 64 and from 48 to 16 numbers, without biases as CLIP's."""
    folder = tmp_path_factory.mktemp("runs") / "clip"
    config = tiny.shrink(quickstart_lit_deterministic.get_config(), data, folder)
    assert isinstance(config.task, ContrastiveConfig)
    image = changed(config.task.image_tower, pooling="class_token", projection_size=16)
    text = changed(config.task.text_tower, encoder__width=48, embedding_size=16)
    tiny.finish_untrained(changed(config, task__image_tower=image, task__text_tower=text, task__locked=()))
    return folder


@pytest.fixture(scope="module", params=["clip", "siglip"])
def fitted(request, clip, pairs, tmp_path_factory):
    """Returns the model's name, its run, the run with a posterior, and what the layers and the fit were given."""
    output = tmp_path_factory.mktemp("runs") / "posterior"
    model = [clip] if request.param == "clip" else [SIGLIP, "--tokenizer", pairs.with_name("tokenizer.model")]
    given, layers, fits = ["--data", pairs, "--output", output], [], []
    with pytest.MonkeyPatch.context() as patched:
        sums, fit = bayes_vlm_fit.pair_factors, laplace.fit
        patched.setattr(bayes_vlm_fit, "pair_factors", lambda *given: (layers.append(given[0]), sums(*given))[1])
        patched.setattr(laplace, "fit", lambda *given: (fits.append(given), fit(*given))[1])
        flags = ["--task.head", "bayes_vlm", "--calibration", "None"]
        run_command("add-noise", "--model", *model, *given, *flags)
    source = clip if request.param == "clip" else output / "model"
    return request.param, source, output, dict(zip(("image", "text"), zip(layers, fits, strict=True), strict=True))


def test_the_posterior_is_of_the_last_layers(fitted):
    name, _, output, sides = fitted
    params = open_run(output).params
    for side, (path, size, has_bias) in LAYERS[name].items():
        layer, (factors, squared_norm, *_) = sides[side]
        tower = parameters.flatten(params[f"{side}_tower"])
        kernel, bias = (np.asarray(tower[f"{path}/{part}"], np.float64) for part in ("kernel", "bias"))
        assert squared_norm == pytest.approx(np.sum(kernel**2) + np.sum(bias**2))
        # Stored as float16.
        g, phi = (np.asarray(part, np.float64) for part in layer)
        if path == "projection":
            np.testing.assert_allclose(phi[:, :-1] @ kernel + bias, g, atol=2e-2)
        inputs = phi[:, : size + has_bias]
        assert inputs.shape == (1000, size + has_bias)
        np.testing.assert_allclose(factors.inputs, inputs.T @ inputs / np.sqrt(1000), rtol=1e-3, atol=1e-2)
        root = np.asarray(params["head"][f"{side}_posterior"]["input_root"])
        assert root.shape == (size + 1, size + 1)
        assert np.any(root[-1]) == has_bias


def test_predictions_without_noise_are_those_of_the_model_and_folders_are_opened_again(fitted, tmp_path):
    _, source, output, _ = fitted
    old, new = lit_het.load(source), lit_het.load(output)
    np.testing.assert_allclose(new.encode_images(IMAGE), old.encode_images(IMAGE), atol=1e-6)
    np.testing.assert_allclose(new.encode_texts(NAMES), old.encode_texts(NAMES), atol=1e-6)
    expected, found = old.classify(IMAGE, NAMES).to_numpy(), new.classify(IMAGE, NAMES)
    np.testing.assert_allclose(new.classify(IMAGE, NAMES, samples=0).to_numpy(), expected, atol=1e-6)
    assert found.noisy_mean is not None
    assert np.abs(found.noisy_mean - expected).max() > 1e-4
    assert new.noise(IMAGE) > 0
    new.save_pretrained(tmp_path / "folder")
    again = lit_het.load(tmp_path / "folder").run
    assert again.task.config == changed(new.run.task.config, locked=())
    jax.tree.map(np.testing.assert_array_equal, again.params, new.run.params)


@pytest.mark.parametrize("to", ["huggingface", "npz", "onnx"])
def test_other_formats_hold_what_the_model_itself_gives(fitted, tmp_path, to):
    _, source, output, _ = fitted
    for run, name in ((source, "model"), (output, "posterior")):
        folder = tmp_path / (f"{name}.npz" if to == "npz" else name)
        run_command("export", "--checkpoint", run, "--to", to, "--output", folder, "--uncalibrated")
    if to == "huggingface":
        arrays = [safetensors.numpy.load_file(tmp_path / name / "model.safetensors") for name in ("model", "posterior")]
    elif to == "npz":
        arrays = [dict(np.load(tmp_path / f"{name}.npz")) for name in ("model", "posterior")]
    else:
        size = SIZES[fitted[0]]
        pixels = np.asarray(IMAGE.resize((size, size)))[None]
        sessions = [onnxruntime.InferenceSession(tmp_path / name / "image.onnx") for name in ("model", "posterior")]
        arrays = [{"image": np.asarray(session.run(None, {"image": pixels})[0])} for session in sessions]
    expected, found = arrays
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-6, err_msg=name)


def test_the_input_of_the_last_layer_is_for_this_head_only(capsys, clip, pairs, tmp_path):
    given = ("--model", clip, "--data", pairs, "--output", tmp_path / "run")
    line = refusal(capsys, "add-noise", *given, "--task.image-tower.layer-input", "True")
    assert "task.image_tower.layer_input does not fit task.head, which reads plain embeddings" in line
