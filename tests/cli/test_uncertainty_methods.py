"""Methods of uncertainty, as a user runs them: added to a finished model, or trained with its towers."""

import functools
import io
import json
import runpy
import shutil
import sys
from typing import Any

import jax
import numpy as np
import onnxruntime
import pytest
from PIL import Image

import lit_het
from lit_het.apps.demo.model import DemoModel, open_model
from lit_het.cli.main import main
from lit_het.configs.experiment import PretrainedConfig
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.errors import UserError
from lit_het.eval.fits import FewShotOptions
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ClassNamesConfig, FewShotConfig, RetrievalConfig, ShiftConfig, ZeroShotConfig
from lit_het.heads.bayes_vlm import BayesVLMContrastiveConfig
from lit_het.heads.contrastive import DeterministicContrastiveConfig
from lit_het.heads.gaussian import GaussianContrastiveConfig
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.models.opening import open_run
from lit_het.objectives.masking import MaskingConfig
from lit_het.objectives.mixing import Mixing
from lit_het.random import keys_at
from lit_het.training.train import train
from tests import tiny
from tests.cli.conftest import changed, refusal, run_command
from tests.cli.tiny_decoder import NAMES

# Heads that are added to models of these losses. HET-XL, which most tests of commands use, is left out.
ADDED = {"gaussian": "softmax", "prob_vlm": "sigmoid", "bayes_vlm": "softmax", "mc_dropout": "sigmoid"}
METHODS = ("prolip", *ADDED)
LOSSES = {"softmax": (SoftmaxLoss(), None), "sigmoid": (SigmoidLoss(), -3.0)}
SHORT = ("--length", "4 steps", "--data.batch-size", 16, "--schedule.warmup", "1 steps")
IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8))


@pytest.fixture(scope="module")
def prolip(trained_lit, tmp_path_factory):
    """ProLIP's towers, masking and pseudo-positives, and mixed images; all parameters would be trained."""
    plain = trained_lit.task
    image_tower = changed(plain.image_tower, uncertainty_token=True)
    task = changed(
        plain,
        image_tower=image_tower,
        text_tower__embedding_size=image_tower.embedding_size,
        text_tower__pooling="class_token",
        text_tower__uncertainty_token=True,
        head=GaussianContrastiveConfig(initial_bias=-3.0, variances="towers"),
        loss=SigmoidLoss(pseudo_positives=0.1),
        masking=MaskingConfig(every=2, mask_token=63, padding_token=0),
        mixing=Mixing(0.5),
        locked=(),
    )
    run_dir = tmp_path_factory.mktemp("prolip") / "run"
    return changed(trained_lit, run_dir=run_dir, task=task, pretrained=None, calibration=None)


@pytest.fixture(scope="module")
def models(trained_lit, tmp_path_factory):
    """Runs without noise, of each loss; tests only read them."""
    folder = tmp_path_factory.mktemp("models")
    towers = PretrainedConfig(run=trained_lit.run_dir, pattern="(image|text)_tower/.*")
    for name, (loss, bias) in LOSSES.items():
        head = DeterministicContrastiveConfig(initial_bias=bias)
        config = changed(trained_lit, run_dir=folder / name, pretrained=towers, calibration=None)
        tiny.finish_untrained(changed(config, task__head=head, task__loss=loss))
    return folder


@pytest.fixture(scope="module")
def run_of(prolip, models, pairs, tmp_path_factory):
    """Returns a function that returns the run of a method, which tests only read."""
    folder = tmp_path_factory.mktemp("methods")

    @functools.cache
    def run(method):
        if method == "prolip":
            tiny.finish_untrained(prolip)  # tests/frozen/steps.py trains it
            return prolip.run_dir
        if method not in ("gaussian", "bayes_vlm"):  # which has embeddings of its own; the others share theirs
            shutil.copytree(run("gaussian") / "embeddings", folder / method / "embeddings")
        given = ("--model", models / ADDED[method], "--data", pairs, "--output", folder / method)
        flags = () if method == "bayes_vlm" else SHORT
        with tiny.untrained():  # heads that are added are trained by the tests of add-noise
            run_command("add-noise", *given, "--task.head", method, "--calibration", "None", *flags)
        return folder / method

    return run


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_calibrated_classifies_is_evaluated_and_saved(run_of, models, held_out, tmp_path, method):
    run_dir = shutil.copytree(run_of(method), tmp_path / "run")
    run_command("calibrate", run_dir, "--data", held_out)
    calibration = open_run(run_dir).calibration
    assert calibration is not None
    assert calibration.monte_carlo is not None

    model = lit_het.load(run_dir)
    found = model.classify(IMAGE, NAMES)
    assert sum(found.values()) == pytest.approx(1, abs=1e-5)
    assert found.noisy_mean is not None
    assert model.noise(IMAGE) > 0
    if method in ADDED:  # the means of the model stay
        expected = lit_het.load(models / ADDED[method]).encode_images(IMAGE)
        np.testing.assert_allclose(model.encode_images(IMAGE)[: len(expected)], expected, atol=1e-6)
    shapes = ImageSet("shapes", str(held_out), split="")
    names = ClassNamesConfig("photos", certain_prompts=2 if method in ("gaussian", "prolip") else None)
    zero_shot, retrieval = lit_het.evaluate(
        run_dir, [ZeroShotConfig(shapes, names, samples=4), RetrievalConfig(shapes)]
    )
    assert np.isfinite(list(zero_shot.figures.values())).all()
    assert 0 <= retrieval.figures["image_to_text_recall1"] <= 1

    model.save_pretrained(tmp_path / "folder")
    again = lit_het.load(tmp_path / "folder").run
    assert again.task.config == changed(model.run.task.config, locked=())
    assert again.calibration == changed(calibration, data=(held_out.name,))
    jax.tree.map(np.testing.assert_array_equal, again.params, model.run.params)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Images to classify in test/, images to learn from in train/, and corrupted copies of the former in corrupted/."""
    root = tiny.write_data(tmp_path_factory.mktemp("few"), num_samples=32, seed=8)
    shutil.copytree(tiny.write_data(root / "others", num_samples=16, seed=9) / "train", root / "test")
    shutil.copy(root / "test" / "classnames.txt", root)
    copies = ["--corruptions", "contrast", "--severities", "5"]
    assert main(["data", "corrupt", str(root / "test"), str(root / "corrupted"), *copies]) == 0
    (root / "captions.txt").write_text("\n".join(NAMES))
    return root


@pytest.mark.slow
@pytest.mark.parametrize("method", ["prolip", "bayes_vlm"])
def test_a_method_is_benchmarked_joined_and_shifted(run_of, few, tmp_path, method):
    """One in closed form, and one whose samples are those of all images."""
    run_dir, page = run_of(method), tmp_path / "page.html"
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    images = ("--data", f"few={few}/test", "--corrupted", few / "corrupted", "--training", few / "train")
    run_command("benchmark-uncertainty", f"two={run_dir}+{copy}", *images, "--output", page, "--samples", 2)
    two = json.loads(page.with_suffix(".json").read_text())["two"]
    assert "severity/contrast/noise_norm" in two
    assert np.isfinite(list(two.values())).all()

    data, fit = ImageSet("few", str(few)), FewShotOptions(shots=(1,), seeds=(0,))
    configs = [ShiftConfig(data, str(few / "corrupted"), samples=2), FewShotConfig(data, fit=fit)]
    shift, few_shot = lit_het.evaluate(run_dir, configs, calibrated=False)
    assert two["few/sampled/nll"] == pytest.approx(shift.figures["clean/nll"], abs=1e-4)
    assert np.isfinite(list(shift.figures.values())).all()
    assert 0 <= few_shot.figures["1_shot"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["prolip", "bayes_vlm"])
def test_a_method_is_shown_and_exported_without_its_noise(run_of, few, tmp_path, capsys, monkeypatch, method):
    run_dir = run_of(method)
    demo, stream = open_model(run_dir, str(few / "captions.txt")), io.BytesIO()
    assert isinstance(demo, DemoModel)
    IMAGE.save(stream, "png")
    _, features = demo.see(stream.getvalue(), "image.png")
    labels, answered, _ = demo.answer(features, ", ".join(NAMES), "photo", 2, 0)
    assert labels == tuple(NAMES)
    assert answered.samples is not None
    assert demo.noise(features)[0] > 0
    assert {caption for caption, _ in demo.nearest(features)} == set(NAMES)

    run_command("export", "--checkpoint", run_dir, "--to", "onnx", "--output", tmp_path / "out")
    assert "exported without its noise" in capsys.readouterr().err
    model, pixels = lit_het.load(run_dir), np.asarray(IMAGE)[None]
    found: Any = onnxruntime.InferenceSession(tmp_path / "out/image.onnx").run(None, {"image": pixels})
    np.testing.assert_allclose(found[0][0], model.encode_images(IMAGE), atol=1e-5)
    IMAGE.save(tmp_path / "image.png")
    monkeypatch.setattr(sys, "argv", ["classify.py", str(tmp_path / "image.png"), "--labels", ",".join(NAMES)])
    capsys.readouterr()
    runpy.run_path(str(tmp_path / "out/classify.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].endswith("noise norm left out")
    scores = {line.split("  ")[-1]: float(line.split()[1]) for line in printed.splitlines()[1:]}
    assert scores == pytest.approx(model.classify(IMAGE, NAMES, samples=0), abs=1e-5)


@pytest.mark.slow
def test_stored_embeddings_hold_the_variances_of_uncertainty_tokens(run_of, prolip, tmp_path):
    store, run = tmp_path / "embeddings", open_run(run_of("prolip"))
    run_command("embed", "--tower", run.run_dir, "--output", store, "--dtype", "float32")
    task = changed(prolip.task, locked=("image_tower/.*", "text_tower/.*"), masking=None, mixing=None)
    pretrained = PretrainedConfig(run=run.run_dir, pattern="(image|text)_tower/.*")
    images = changed(prolip, run_dir=tmp_path / "stored", task=task, pretrained=pretrained)
    stored = changed(images, data__embeddings=str(store))
    tiny.finish_untrained(stored)

    @jax.jit
    def losses(params, *batches):
        return [task.build().loss(params, batch, keys_at(0, 0))[0] for batch in batches]

    batches = [next(Loader(config.data, config.tokenizer.build()).epoch()) for config in (images, stored)]
    assert batches[1].image is None
    np.testing.assert_allclose(*losses(run.params, *batches), rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "fields", "line"),
    [
        ({"padding_token": 1}, {}, r"padding-token 1 is not the padding of the tokenizer, 0; .*--tokenizer.padding-id"),
        (
            {},
            {"text_embeddings": "texts"},
            r"--task.masking masks .*; leave it out, or leave out --data.text-embeddings",
        ),
        ({}, {"embeddings": "images"}, r"--task.masking masks .*; leave it out, or leave out --data.embeddings"),
    ],
)
def test_masking_that_does_not_fit_the_data_is_refused_before_anything_is_computed(prolip, changes, fields, line):
    tokenizer = prolip.tokenizer.build()
    loader = Loader(prolip.data, tokenizer)
    prolip.task.check_data(prolip, loader, tokenizer)
    task = changed(prolip.task, mixing=None, masking=changed(prolip.task.masking, **changes))
    config = changed(prolip, task=task, data=changed(prolip.data, **fields))
    with pytest.raises(UserError, match=line):
        config.task.check_data(config, loader, tokenizer)


@pytest.mark.slow
def test_prompts_of_gaussian_names_are_joined_by_mean_and_variance(run_of):
    model = lit_het.load(run_of("gaussian"))
    found = model.classify(IMAGE, NAMES, prompts=["{c}"])
    one = found.to_numpy()
    assert found.band is not None
    assert (found.band[1] > found.band[0]).all()  # in closed form without noise, but its samples scatter
    np.testing.assert_allclose(model.classify(IMAGE, NAMES, prompts=["{c}", "{c}"]).to_numpy(), one, rtol=1e-4)
    np.testing.assert_allclose(model.classify(IMAGE, NAMES).to_numpy(), one, rtol=1e-4)


@pytest.mark.slow
def test_gaussian_embeddings_do_not_leave_for_formats_without_variances(capsys, run_of, tmp_path):
    for to in ("huggingface", "npz"):
        line = refusal(capsys, "export", "--checkpoint", run_of("gaussian"), "--to", to, "--output", tmp_path / "out")
        assert "export with --to lit-het" in line
        assert not (tmp_path / "out").exists()


def test_a_posterior_is_not_trained(trained_lit, tmp_path):
    with pytest.raises(UserError, match="nothing to train: train with"):
        train(changed(trained_lit, run_dir=tmp_path / "run", task__head=BayesVLMContrastiveConfig()))
