"""Every method of uncertainty with every loss, on towers that are trained and on finished ones, as a user runs them."""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import runpy
import shutil
import sys
from typing import Any

import numpy as np
import onnxruntime
import pytest
from PIL import Image

import lit_het
from lit_het.apps import noise
from lit_het.apps.demo.model import DemoModel, open_model
from lit_het.cli.main import main
from lit_het.configs.experiment import PretrainedConfig
from lit_het.data_pipelines.loader import Loader
from lit_het.errors import UserError
from lit_het.eval.fits import FewShotOptions
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ClassNamesConfig, FewShotConfig, RetrievalConfig, ShiftConfig, ZeroShotConfig
from lit_het.heads.bayes_vlm import BayesVLMContrastiveConfig
from lit_het.heads.contrastive import DeterministicContrastiveConfig, HetXLContrastiveConfig
from lit_het.heads.gaussian import GaussianContrastiveConfig
from lit_het.heads.mc_dropout import McDropoutContrastiveConfig
from lit_het.heads.prob_vlm import ProbVLMContrastiveConfig
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.runs.checks import check_data
from lit_het.runs.opening import open_run
from lit_het.runs.training import train
from lit_het.tasks.masking import MaskingConfig
from lit_het.tasks.mixing import Mixing
from tests import tiny
from tests.cli.conftest import refusal
from tests.cli.tiny_decoder import NAMES

METHODS = {
    "deterministic": DeterministicContrastiveConfig,
    "HET-XL": HetXLContrastiveConfig,
    "Gaussian": GaussianContrastiveConfig,
    "ProLIP": functools.partial(GaussianContrastiveConfig, variances="towers"),
    "ProbVLM": ProbVLMContrastiveConfig,
    "BayesVLM": BayesVLMContrastiveConfig,
    "MC dropout": McDropoutContrastiveConfig,
}
LOSSES = {"softmax": (SoftmaxLoss(), None), "sigmoid": (SigmoidLoss(), -3.0)}
# Every two of a method, a loss and how towers came to be, in half of all combinations. BayesVLM trains no tower.
TRAINED, FINISHED = (
    [(method, towers, loss) for method, loss in zip(METHODS, itertools.cycle(losses)) if method != "BayesVLM"]
    for towers, losses in (("trained", tuple(LOSSES)), ("finished", tuple(LOSSES)[::-1]))
)
# Those that are drawn and benchmarked as well: one of each method.
BENCHMARKED = [*TRAINED, ("BayesVLM", "finished", "softmax")]
WAYS = [*BENCHMARKED, *FINISHED, ("BayesVLM", "finished", "sigmoid")]
IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8))


def with_uncertainty_tokens(task, head):
    """Returns a task with ProLIP's towers, and its masking; all parameters are trained."""
    image_tower = dataclasses.replace(task.image_tower, uncertainty_token=True)
    text_tower = dataclasses.replace(
        task.text_tower, embedding_size=image_tower.embedding_size, pooling="class_token", uncertainty_token=True
    )
    masking = MaskingConfig(every=2, mask_token=63, padding_token=0)
    changed = {"image_tower": image_tower, "text_tower": text_tower, "masking": masking, "locked": ()}
    return dataclasses.replace(task, head=head, **changed)


@pytest.fixture(scope="module")
def configured(trained_lit, tmp_path_factory):
    """Returns a function that returns the configuration of a method, for a fresh directory."""

    def configure(method, loss, towers):
        folder = tmp_path_factory.mktemp("method")
        form, bias = LOSSES[loss]
        head, plain = METHODS[method](initial_bias=bias), trained_lit.task
        if method == "ProLIP":
            plain = with_uncertainty_tokens(plain, head)
        task = dataclasses.replace(plain, head=head, loss=form)
        config = dataclasses.replace(trained_lit, run_dir=folder / "lit", task=task, calibration=None)
        source = trained_lit.run_dir
        if method == "ProLIP":
            config = dataclasses.replace(config, pretrained=None)
        if towers == "trained":
            return config
        if method == "ProLIP":
            source = folder / "prolip"
            tiny.finish_untrained(dataclasses.replace(config, run_dir=source))
        locked = ("image_tower/.*", "text_tower/.*")
        task = dataclasses.replace(config.task, locked=locked, masking=None)
        pretrained = PretrainedConfig(run=source, pattern="(image|text)_tower/.*")
        return dataclasses.replace(config, task=task, pretrained=pretrained)

    return configure


@pytest.fixture(scope="module")
def finished(request, configured, pairs):
    """Returns one of the ways, and its run, which tests only read.

    Both tests of a run come one after the other, so that the second finds what the first has compiled.
    """
    method, towers, loss = request.param
    config = configured("deterministic" if method == "BayesVLM" else method, loss, towers)
    # Each head is trained with the towers once: with finished ones its initial parameters do.
    with tiny.untrained() if towers == "finished" else contextlib.nullcontext():
        train(config)
    if method != "BayesVLM":
        return request.param, config.run_dir
    output = config.run_dir.with_name("posterior")
    noise.add_noise(str(config.run_dir), str(pairs), output, ["--task.head", "bayes_vlm", "--calibration", "None"])
    return request.param, output


@pytest.mark.slow
@pytest.mark.parametrize("finished", WAYS, ids="-".join, indirect=True)
def test_a_method_trains_calibrates_classifies_and_is_evaluated(finished, held_out, tmp_path):
    (method, towers, loss), run_dir = finished
    run_dir = shutil.copytree(run_dir, tmp_path / "run")
    assert main(["calibrate", str(run_dir), "--data", str(held_out)]) == 0
    calibration = open_run(run_dir).calibration
    assert calibration is not None
    assert (calibration.monte_carlo is not None) == (method != "deterministic")

    model = lit_het.load(run_dir)
    found = model.classify(IMAGE, NAMES)
    assert sum(found.values()) == pytest.approx(1, abs=1e-5)
    assert (found.noisy_mean is not None) == (model.noise(IMAGE) > 0) == (method != "deterministic")
    shapes = ImageSet("shapes", str(held_out), split="")
    names = ClassNamesConfig("photos", certain_prompts=2 if method in ("Gaussian", "ProLIP") else None)
    zero_shot, retrieval = lit_het.evaluate(
        run_dir, [ZeroShotConfig(shapes, names, samples=4), RetrievalConfig(shapes)]
    )
    assert np.isfinite(list(zero_shot.figures.values())).all()
    assert 0 <= retrieval.figures["image_to_text_recall1"] <= 1
    if (method, towers, loss) in BENCHMARKED:  # drawing takes seconds, and does not depend on the towers
        assert main(["report", str(run_dir), "--output", str(tmp_path / "report.html")]) == 0

    model.save_pretrained(tmp_path / "folder")
    again = lit_het.load(tmp_path / "folder")
    np.testing.assert_array_equal(again.classify(IMAGE, NAMES).to_numpy(), found.to_numpy())


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
@pytest.mark.parametrize("finished", BENCHMARKED, ids="-".join, indirect=True)
def test_a_method_is_benchmarked_joined_shifted_shown_and_exported(finished, few, tmp_path, capsys, monkeypatch):
    (method, _, _), run_dir = finished
    page, images = tmp_path / "page.html", {"--corrupted": few / "corrupted", "--training": few / "train"}
    flags = [part for flag in {"--output": page, "--samples": 2, **images}.items() for part in flag]
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    line = ["benchmark-uncertainty", f"two={run_dir}+{copy}", "--data", f"few={few}/test", *flags]
    assert main(list(map(str, line))) == 0
    two = json.loads(page.with_suffix(".json").read_text())["two"]
    assert ("severity/contrast/noise_norm" in two) == (method != "deterministic")
    assert np.isfinite(list(two.values())).all()

    data, fit = ImageSet("few", str(few)), FewShotOptions(shots=(1,), seeds=(0,))
    configs = [ShiftConfig(data, str(few / "corrupted"), samples=2), FewShotConfig(data, fit=fit)]
    shift, few_shot = lit_het.evaluate(run_dir, configs, calibrated=False)
    best = "few/quiet/nll" if method == "deterministic" else "few/sampled/nll"
    assert two[best] == pytest.approx(shift.figures["clean/nll"], abs=1e-4)
    assert np.isfinite(list(shift.figures.values())).all()
    assert 0 <= few_shot.figures["1_shot"] <= 1

    demo, stream = open_model(run_dir, str(few / "captions.txt")), io.BytesIO()
    assert isinstance(demo, DemoModel)
    IMAGE.save(stream, "png")
    _, features = demo.see(stream.getvalue(), "image.png")
    labels, answered, _ = demo.answer(features, ", ".join(NAMES), "photo", 2, 0)
    assert labels == tuple(NAMES)
    assert (answered.samples is not None) == (demo.noise(features)[0] > 0) == (method != "deterministic")
    assert {caption for caption, _ in demo.nearest(features)} == set(NAMES)
    if method in ("Gaussian", "ProLIP", "ProbVLM", "BayesVLM", "MC dropout"):
        assert_onnx_has_the_scores_without_noise(run_dir, tmp_path, capsys, monkeypatch)


def assert_onnx_has_the_scores_without_noise(run_dir, tmp_path, capsys, monkeypatch):
    assert main(["export", "--checkpoint", str(run_dir), "--to", "onnx", "--output", str(tmp_path / "out")]) == 0
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
def test_a_method_trains_with_pseudo_positives_and_mixed_images(configured):
    config = configured("Gaussian", "sigmoid", "trained")
    task = dataclasses.replace(config.task, loss=SigmoidLoss(pseudo_positives=0.1), mixing=Mixing(0.5))
    config = dataclasses.replace(config, task=task)
    train(config)
    found = lit_het.load(config.run_dir).classify(IMAGE, NAMES)
    assert sum(found.values()) == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_stored_embeddings_hold_the_variances_of_uncertainty_tokens(configured, tmp_path):
    config = configured("ProLIP", "sigmoid", "finished")
    store = tmp_path / "embeddings"
    line = ["embed", "--tower", str(config.pretrained.run), "--output", str(store), "--dtype", "float32"]
    assert main(line) == 0
    data = dataclasses.replace(config.data, embeddings=str(store))
    losses = []
    for changed in (config, dataclasses.replace(config, run_dir=tmp_path / "stored", data=data)):
        train(changed)
        records = (changed.run_dir / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(record)["train/loss"] for record in records])
    np.testing.assert_allclose(*losses, rtol=1e-5)


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
def test_masking_that_does_not_fit_the_data_is_refused_before_anything_is_computed(configured, changes, fields, line):
    config = configured("ProLIP", "sigmoid", "trained")
    tokenizer = config.tokenizer.build()
    loader = Loader(config.data, tokenizer)
    check_data(config, loader, tokenizer)
    task = dataclasses.replace(config.task, masking=dataclasses.replace(config.task.masking, **changes))
    config = dataclasses.replace(config, task=task, data=dataclasses.replace(config.data, **fields))
    with pytest.raises(UserError, match=line):
        check_data(config, loader, tokenizer)


@pytest.mark.slow
def test_prompts_of_gaussian_names_are_joined_by_mean_and_variance(configured):
    config = configured("Gaussian", "softmax", "trained")
    tiny.finish_untrained(config)
    model = lit_het.load(config.run_dir)
    found = model.classify(IMAGE, NAMES, prompts=["{c}"])
    one = found.to_numpy()
    assert found.band is not None
    assert (found.band[1] > found.band[0]).all()  # in closed form without noise, but its samples scatter
    np.testing.assert_allclose(model.classify(IMAGE, NAMES, prompts=["{c}", "{c}"]).to_numpy(), one, rtol=1e-4)
    np.testing.assert_allclose(model.classify(IMAGE, NAMES).to_numpy(), one, rtol=1e-4)


@pytest.mark.slow
def test_gaussian_embeddings_do_not_leave_for_formats_without_variances(capsys, configured, tmp_path):
    config = configured("Gaussian", "sigmoid", "trained")
    tiny.finish_untrained(config)
    for to in ("huggingface", "npz"):
        line = refusal(capsys, "export", "--checkpoint", config.run_dir, "--to", to, "--output", tmp_path / "out")
        assert "export with --to lit-het" in line
        assert not (tmp_path / "out").exists()


def test_a_posterior_is_not_trained(configured):
    with pytest.raises(UserError, match="nothing to train: train with"):
        train(configured("BayesVLM", "softmax", "trained"))
