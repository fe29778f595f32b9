"""A folder of ``--to onnx`` answers as ``lit-het classify``, in a program without JAX and without this package."""

import json
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import onnxruntime
import pytest
from flax import nnx
from PIL import Image

from lit_het.data_pipelines.texts.tokenizers import SentencePieceTokenizer, train_sentencepiece
from lit_het.errors import UserError
from lit_het.heads.contrastive import HetXLContrastiveConfig
from lit_het.heads.covariance import CovarianceConfig
from lit_het.models.opening import Run
from lit_het.tasks import quantities
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.weights.onnx import folder as onnx_folder
from tests import tiny
from tests.cli.conftest import changed, last_line, printed, refusal, run_command
from tests.cli.tiny_decoder import NAMES

WORDS = [*tiny.COLOURS, *tiny.SHAPES]
# Runs a script as a program, where the two packages cannot be imported.
WITHOUT_JAX = """
import runpy, sys
sys.modules |= {"jax": None, "lit_het": None}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def images(tmp_path):
    """Images of the model's size and others, upright and turned, opaque and not."""
    random = np.random.default_rng(0)
    for name, shape in (("same.png", (32, 32, 3)), ("twice.png", (64, 64, 4)), ("wide.jpg", (50, 120, 3))):
        pixels = np.clip(128 + 60 * random.normal(size=shape), 0, 255).astype(np.uint8)
        pixels[8:24, 14:18, :3] = 255, 0, 0
        Image.fromarray(pixels).save(tmp_path / name)
    Image.fromarray(pixels).save(
        tmp_path / "turned.png", exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\6\0\0\0"
    )
    return [str(tmp_path / name) for name in ("same.png", "twice.png", "wide.jpg", "turned.png")]


def export(run_dir, folder, *flags):
    run_command("export", "--checkpoint", run_dir, "--to", "onnx", "--output", folder, *flags)
    return folder


def by_classify(capsys, run_dir, images, labels, *flags):
    named = ("--labels", ",".join(labels), "--json", *flags)
    return printed(capsys, "classify", *images, "--checkpoint", run_dir, *named)


def by_script(folder, images, labels, *flags):
    """Returns what the script prints, as `by_classify` returns it, or the last line of its error."""
    given = ["--labels", ",".join(labels)] if labels else []
    command = [sys.executable, "-c", WITHOUT_JAX, folder / "classify.py", *images, *given, *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env={}, check=False)
    if done.returncode:
        return done.stderr.splitlines()[-1]
    answers = []
    for line in done.stdout.splitlines():
        if "noise norm" in line:
            image, _, norm = line.partition(": noise norm ")
            norm, _, information = norm.partition("  mutual information of members ")
            answers.append({"image": image, "noise_norm": float(norm), "labels": []})
            answers[-1]["mutual_information"] = float(information or 0)
        else:
            *columns, label = line.split("  ")
            answers[-1]["labels"].append(
                {"label": label} | {n: float(v) for n, v in (c.rsplit(" ", 1) for c in columns)}
            )
    return answers


def assert_equal(ours, theirs, figure="probability", column="probability", atol=1e-5):
    assert [answer["image"] for answer in ours] == [answer["image"] for answer in theirs]
    values = [{found["label"]: found[figure] for found in answer["labels"]} for answer in ours]
    others = [{found["label"]: found[column] for found in answer["labels"]} for answer in theirs]
    for one, other in zip(values, others, strict=True):
        assert one == pytest.approx(other, rel=0, abs=atol)
        assert max(one.values()) - min(one.values()) > 1e-3  # labels differ
    norms = {answer["image"]: answer["noise_norm"] for answer in ours}
    assert norms == pytest.approx({answer["image"]: answer["noise_norm"] for answer in theirs}, rel=0, abs=1e-5)


@pytest.mark.slow
def test_a_calibrated_run_has_equal_probabilities_and_noise(capsys, once_calibrated, images, tmp_path):
    folder = export(once_calibrated, tmp_path / "folder")
    ours = by_classify(capsys, once_calibrated, images, NAMES, "--samples", "2000")
    theirs = by_script(folder, images, NAMES, "--samples", "2000")
    assert min(answer["noise_norm"] for answer in ours) > 0.05
    assert_equal(ours, theirs)
    assert_equal(ours, theirs, "noisy_mean", "with noise", atol=0.02)
    as_trained = export(once_calibrated, tmp_path / "uncalibrated", "--uncalibrated")
    assert_equal(ours, by_script(as_trained, images, NAMES), "raw_probability")
    assert by_script(as_trained, images, NAMES) != by_script(folder, images, NAMES)


@pytest.mark.slow
def test_a_sigmoid_has_the_equal_probability_of_each_label_alone(capsys, sigmoid_lit, images, tmp_path):
    folder = export(sigmoid_lit, tmp_path / "folder")
    assert not (folder / "covariance.onnx").exists()
    ours = by_classify(capsys, sigmoid_lit, images, NAMES, "--samples", "0")
    said = by_script(folder, images, NAMES, "--samples", "8")
    assert str(said).endswith("this folder holds no covariance of the noise")
    theirs = by_script(folder, images, NAMES)
    assert_equal(ours, theirs)
    assert_equal(ours, theirs, "pair_probability", "fits")


@pytest.mark.slow
def test_a_classifier_has_equal_probabilities_of_its_classes_and_noise(capsys, upstream, images, tmp_path):
    folder = export(upstream, tmp_path / "folder")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "classify.py", "image.onnx", "model.json"]
    ours = by_classify(capsys, upstream, images, WORDS, "--samples", "0")
    assert ours[0]["noise_norm"] > 0
    (folder / "words").write_text("\ufeff" + "\n".join(WORDS) + "\n\n")
    assert_equal(ours, by_script(folder, images, ["words"]))
    assert_equal(ours, by_script(folder, images, [*WORDS, " "]))
    assert_equal(ours, by_script(folder, images, []))
    settings = json.loads((folder / "model.json").read_text())
    assert settings.pop("classes") == WORDS
    (folder / "model.json").write_text(json.dumps(settings))
    assert str(by_script(folder, images, [])).endswith("the names of the classes are not stored")
    assert str(by_script(folder, images, NAMES[:2])).endswith("--labels names 2 classes, and the classifier has 6")


def test_a_classifier_with_noise_does_not_leave_for_transformers(capsys, upstream, tmp_path):
    line = refusal(capsys, "export", "--checkpoint", upstream, "--to", "huggingface", "--output", tmp_path / "folder")
    assert "without noise only; export with --to lit-het" in line


@pytest.fixture
def build_run(lit_config, tmp_path):
    """Returns a function that builds a run with its initial parameters; arguments replace fields of the task."""

    def build(*, initialize=jax.jit, **fields):
        task = changed(lit_config.task, **fields).build()
        tokenizer = SentencePieceTokenizer(train_sentencepiece(NAMES, vocabulary_size=40), 6)
        config = changed(lit_config, task=task.config)
        params = initialize(task.initialize)(jax.random.key(0))
        return Run(tmp_path, config, task, params, tokenizer, 0)

    return build


@pytest.mark.slow
@pytest.mark.parametrize(
    "covariance",
    [
        CovarianceConfig(3),
        CovarianceConfig(3, "efficient"),
        CovarianceConfig(3, second_term="diagonal"),
        CovarianceConfig(0),
    ],
    ids=["full", "efficient", "diagonal", "no factors"],
)
def test_the_factors_make_the_covariance(build_run, covariance, tmp_path):
    run = build_run(head=HetXLContrastiveConfig(covariance, normalize_after_noise=True))
    onnx_folder.write(run, tmp_path / "folder", (), None)
    image = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
    embedding = run_file(tmp_path / "folder/image.onnx", image)["embedding"]
    found = run_file(tmp_path / "folder/covariance.onnx", embedding)
    covariance_of = nnx.merge(run.task.graph, run.params).head.image_covariance.covariance
    expected = jax.jit(covariance_of)(embedding)
    np.testing.assert_allclose(np.einsum("brd,bre->bde", found["factors"], found["factors"]), expected, atol=1e-5)
    np.testing.assert_allclose(found["noise_norm"] ** 2, np.trace(expected, axis1=1, axis2=2), rtol=1e-4)
    assert np.ptp(found["noise_norm"]) > 1e-3


def run_file(path, values) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {session.get_inputs()[0].name: values}), strict=True))


@pytest.mark.slow
def test_bfloat16_is_exported_as_float32(build_run, tmp_path):
    exact = build_run()
    run = build_run(image_tower__encoder__compute_type="bfloat16")
    onnx_folder.write(run, tmp_path / "folder", (), None)
    image = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)

    @jax.jit
    def embedding(params, image):
        return quantities.embeddings(exact.task.image_classifier(params), exact.task.features(params, image))

    expected = embedding(exact.params, image)
    np.testing.assert_allclose(run_file(tmp_path / "folder/image.onnx", image)["embedding"], expected, atol=1e-5)


def zeros(initialize):
    """Returns a function that returns zeros, as nothing is computed before a refusal."""
    return lambda key: jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(initialize, key))


EXPERTS = {"depth": 2, "experts": ExpertsConfig(num_experts=4, num_blocks=1)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {f"image_tower__encoder__{name}": value for name, value in EXPERTS.items()},
            "experts in image_tower.*--to lit-het",
        ),
        ({"head": HetXLContrastiveConfig(normalize_before_noise=False, normalize_after_noise=True)}, "normalize_after"),
    ],
)
def test_what_has_no_counterpart_is_refused_before_a_file_is_written(build_run, fields, message, tmp_path):
    with pytest.raises(UserError, match=message):
        onnx_folder.write(build_run(initialize=zeros, **fields), tmp_path / "folder", (), None)
    assert not (tmp_path / "folder").exists()


def test_a_run_without_a_tokenizer_is_refused(build_run, tmp_path):
    with pytest.raises(UserError, match="--tokenizer FILE"):
        onnx_folder.write(changed(build_run(initialize=zeros), tokenizer=None), tmp_path / "folder", (), None)


def test_without_onnx_the_extra_is_named_before_the_run_is_opened(capsys, trained_lit, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnx", None)
    flags = ("--checkpoint", trained_lit.run_dir, "--to", "onnx", "--output", tmp_path / "folder")
    assert last_line(capsys, "export", *flags).endswith("--to onnx needs onnx: pip install 'lit-het[onnx]'")
