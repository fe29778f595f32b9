"""A model of images of any shape (NaFlex), from training to its export."""

import dataclasses
import io
import json

import numpy as np
import pytest
from PIL import Image

import lit_het
from lit_het.apps.data import index
from lit_het.apps.demo.model import open_model
from lit_het.apps.embed.images import EmbedOptions, embed
from lit_het.configs import quickstart_lit_deterministic, quickstart_upstream
from lit_het.configs.experiment import PretrainedConfig
from lit_het.configs.parsing import parse_tower
from lit_het.data_pipelines.images.augment import HorizontalFlip
from lit_het.data_pipelines.images.transforms import InceptionCrop, Preprocessing
from lit_het.data_pipelines.labels import ClassIndex
from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.errors import UserError
from lit_het.losses.classification import SoftmaxCrossEntropy
from lit_het.losses.contrastive import SigmoidLoss
from lit_het.models.opening import open_run
from lit_het.models.sizes import Sizes, with_sizes
from lit_het.objectives.mixing import Mixing
from lit_het.patches import cut
from lit_het.patches_config import Patches
from lit_het.training.log import read_metrics
from lit_het.training.train import train
from tests import tiny
from tests.cli.conftest import changed, printed, refusal, run_command
from tests.refusals import assert_refused
from tests.weights.importing import GOLDEN

pytestmark = pytest.mark.slow
PATCHES = Patches(8, 20)


def write_data(folder):
    """Shapes on images that are wide, high and square."""
    random = np.random.default_rng(0)
    names = [f"{colour} {shape}" for colour in tiny.COLOURS for shape in tiny.SHAPES]

    def samples():
        for number in range(tiny.NUM_SAMPLES):
            height, width = [(32, 90), (90, 32), (48, 48), (40, 56)][number % 4]
            label = number % len(names)
            image = random.integers(0, 60, (height, width, 3), np.uint8)
            colour = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (128, 128, 128)][label // 2]
            image[8:24, 4 : 28 if label % 2 == 0 else 10] = colour
            stream = io.BytesIO()
            Image.fromarray(image).save(stream, "PNG")
            yield {"__key__": f"{number:04}", "png": stream.getvalue(), "txt": names[label], "cls": label}

    tiny.write_data(folder)  # the tokenizer and the names
    write_shards(folder / "any", samples(), samples_per_shard=20)
    for name in ("classnames.txt", "words.txt"):
        (folder / "any" / name).write_text((folder / "train" / name).read_text())
    index([str(folder / "any")], workers=1)


@pytest.fixture(scope="session")
def any_shape(once):
    return once("any_shape", write_data)


def of_any_shape(config, folder):
    """Returns a configuration for images of any shape."""
    sizes = {"image_size": 32, "patch_size": 8, "max_patches": 20}
    tower = dataclasses.replace(config.task.image_tower, positions="learned", **sizes)
    preprocessing = Preprocessing(filter="bilinear", patches=tower.patches)
    config = changed(config, task__image_tower=tower, data__image_size=32, data__preprocessing=preprocessing)
    return changed(config, data__shards=(str(folder / "any"),))


def contrastive(folder, run_dir):
    config = of_any_shape(tiny.shrink(quickstart_lit_deterministic.get_config(), folder, run_dir), folder)
    tower = dataclasses.replace(config.task.image_tower, pooling="attention")
    loss, head = SigmoidLoss(duplicates="negatives"), dataclasses.replace(config.task.head, initial_bias=0.0)
    return changed(config, task__image_tower=tower, task__loss=loss, task__head=head, task__locked=(), pretrained=None)


@pytest.fixture(scope="module")
def run_dir(any_shape, own_copy):
    """A trained model; tests only read it."""
    return own_copy("any_shape_run", lambda folder: train(contrastive(any_shape, folder / "run"))) / "run"


def test_it_is_trained_with_crops_and_parts_of_batches_as_others_are(any_shape, tmp_path):
    config = contrastive(any_shape, tmp_path / "whole")
    config = changed(config, data__crop=InceptionCrop(0.5), data__augmentations=(HorizontalFlip(),))
    train(config)
    train(changed(config, run_dir=tmp_path / "parts", task__microbatches=2))
    whole, parts = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one["train/loss"], other["train/loss"], rtol=1e-4)


def test_a_classifier_is_trained_and_evaluated(any_shape, tmp_path):
    config = of_any_shape(tiny.classifier(quickstart_upstream.get_config(), any_shape, tmp_path / "run"), any_shape)
    classes = {"task__num_classes": len(tiny.COLOURS) * len(tiny.SHAPES), "data__labels": ClassIndex()}
    train(changed(config, task__loss=SoftmaxCrossEntropy(), **classes))
    data = ("--data", f"shapes={any_shape / 'any'}", "--split", ".", "--output", tmp_path / "figures.json")
    run_command("zero-shot", "--checkpoint", tmp_path / "run", *data)
    assert 0 <= json.loads((tmp_path / "figures.json").read_text())["supervised/shapes/top1"] <= 1


def picture(folder, shape=(50, 120)):
    path = folder / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)).save(path)
    return path


def test_its_evaluations_read_images_of_all_shapes(run_dir, any_shape, tmp_path):
    for command, split, key in (("zero-shot", ["--split", "."], "top1"), ("retrieval", [], "image_to_text_recall1")):
        data = ("--data", f"shapes={any_shape / 'any'}", *split, "--output", tmp_path / f"{command}.json")
        run_command(command, "--checkpoint", run_dir, *data)
        figures = json.loads((tmp_path / f"{command}.json").read_text())
        assert f"{command.replace('-', '_')}/shapes/{key}" in figures
    run_command("report", run_dir)  # with its images, of which each has a shape of its own


def test_images_are_classified_shown_and_embedded_as_the_tower_sees_them(run_dir, tmp_path, capsys):
    path = picture(tmp_path)
    labels = ("--labels", "red bar,blue bar", "--json")
    by_file = printed(capsys, "classify", path, "--checkpoint", run_dir, *labels)[0]["labels"]
    by_pixels = lit_het.load(run_dir).classify(np.asarray(Image.open(path)), ["red bar", "blue bar"])
    for found in by_file:
        np.testing.assert_allclose(by_pixels[found["label"]], found["probability"], rtol=1e-4)
    shown, features = open_model(run_dir, None).see(path.read_bytes(), path.name)
    assert shown.shape == (3 * 8, 6 * 8, 3)
    run = open_run(run_dir)
    np.testing.assert_allclose(
        features, np.asarray(run.task.features(run.params, cut(PATCHES, shown)[None]))[0], atol=1e-5
    )


def test_stored_embeddings_stand_for_the_images(any_shape, run_dir, tmp_path):
    folder = tmp_path / "embeddings"
    embed(run_dir, parse_tower(run_dir), str(folder), EmbedOptions(dtype="float32"))
    config = contrastive(any_shape, tmp_path / "images")
    config = changed(config, pretrained=PretrainedConfig(run_dir), task__locked=("image_tower/.*",))
    train(config)
    train(changed(config, run_dir=tmp_path / "stored", data__embeddings=str(folder)))
    images, stored = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("images", "stored"))
    for one, other in zip(images, stored, strict=True):
        np.testing.assert_allclose(one["train/loss"], other["train/loss"], rtol=1e-5)
    with pytest.raises(UserError, match="--tokens needs a ViT without"):
        embed(run_dir, parse_tower(run_dir), str(folder), EmbedOptions(tokens=True))


def test_other_patches_are_cut_of_the_images(run_dir, any_shape, tmp_path):
    run = with_sizes(open_run(run_dir), Sizes(patch=4, patches=60))
    assert run.config.task.require_image_tower().patches == Patches(4, 60)
    assert run.config.data.preprocessing.patches == Patches(4, 60)
    data = ("zero-shot", "--checkpoint", run_dir, "--data", f"shapes={any_shape / 'any'}", "--split", ".")
    run_command(*data, "--max-patches", "6", "--output", tmp_path / "figures.json")
    assert 0 <= json.loads((tmp_path / "figures.json").read_text())["zero_shot/shapes/top1"] <= 1


def test_a_fixed_resolution_and_what_needs_squares_is_refused_by_one_line(run_dir, any_shape, tmp_path, capsys):
    data = ("zero-shot", "--checkpoint", run_dir, "--data", f"shapes={any_shape / 'any'}", "--split", ".")
    line = refusal(capsys, *data, "--image-size", "32")
    assert "takes at most 20 patches of 8 pixels, of images of any shape; set --max-patches instead" in line
    for format, reason in (("onnx", "read squares; export with --to lit-het"), ("npz", "max_patches = 20")):
        line = refusal(capsys, "export", "--checkpoint", run_dir, "--to", format, "--output", tmp_path / "exported")
        assert reason in line
    config = contrastive(any_shape, tmp_path / "run")
    squares = changed(config, data__preprocessing=Preprocessing())
    assert_refused("set data.preprocessing.patches to Patches", train, squares)
    fixed = changed(config, data__preprocessing=Preprocessing(), pretrained=PretrainedConfig(run_dir))
    tower = dataclasses.replace(config.task.image_tower, max_patches=None)
    assert_refused("has max_patches = 20, but .* None", train, changed(fixed, task__image_tower=tower))
    with pytest.raises(UserError, match=r"task.mixing changes square images"):
        changed(config, task__mixing=Mixing())


def test_a_tower_of_squares_learns_any_shape(any_shape, tmp_path):
    squares = changed(contrastive(any_shape, tmp_path / "squares"), data__preprocessing=Preprocessing())
    tower = dataclasses.replace(squares.task.image_tower, max_patches=None)
    tiny.finish_untrained(changed(squares, task__image_tower=tower))
    config = contrastive(any_shape, tmp_path / "any")
    tiny.finish_untrained(changed(config, pretrained=PretrainedConfig(tmp_path / "squares", "image_tower/.*")))
    one, other = (open_run(tmp_path / name).params["image_tower"]["positions"] for name in ("squares", "any"))
    np.testing.assert_array_equal(one, other)


def test_its_export_is_a_siglip_2_with_its_logits(run_dir, tmp_path, transformers, capsys):
    torch = pytest.importorskip("torch")
    run_command("export", "--checkpoint", run_dir, "--to", "huggingface", "--output", tmp_path / "folder")
    theirs = transformers.Siglip2Model.from_pretrained(tmp_path / "folder").eval()
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "folder", backend="pil")
    images = [
        np.random.default_rng(n).integers(0, 256, (*shape, 3), np.uint8) for n, shape in enumerate([(24, 48), (40, 32)])
    ]
    inputs = processor(images, return_tensors="pt")
    run = open_run(run_dir)
    with torch.no_grad():
        found = theirs.get_image_features(**inputs).pooler_output.numpy()
    seen = np.stack([cut(PATCHES, image) for image in images])
    ours = np.asarray(run.task.features(run.params, seen))
    np.testing.assert_allclose(found, ours, atol=1e-5 * np.abs(ours).max())
    run_command("import", "--from", tmp_path / "folder", "--to", tmp_path / "imported")
    imported = open_run(tmp_path / "imported")
    assert imported.config.data.preprocessing.patches == PATCHES
    np.testing.assert_allclose(np.asarray(imported.task.features(imported.params, seen)), ours, atol=1e-5)
    line = refusal(capsys, "import", "--from", tmp_path / "folder", "--to", tmp_path / "fixed", "--image-size", "32")
    assert "takes at most 20 patches of 8 pixels, of images of any shape; leave out --image-size" in line


def test_big_visions_naflex_is_imported_for_images_of_any_shape_or_for_squares(tmp_path):
    path = GOLDEN / "naflex.npz"
    run_command("import", "--from", path, "--to", tmp_path / "any")
    run_command("import", "--from", path, "--to", tmp_path / "squares", "--image-size", "24")
    found, squares = (open_run(tmp_path / name) for name in ("any", "squares"))
    assert [run.config.data.preprocessing.patches for run in (found, squares)] == [Patches(8, 9), None]
    images = np.random.default_rng(0).integers(0, 256, (2, 24, 24, 3), np.uint8)
    seen = np.stack([cut(Patches(8, 9), image) for image in images])
    of_squares, of_any = squares.task.features(squares.params, images), found.task.features(found.params, seen)
    np.testing.assert_allclose(of_any, of_squares, atol=1e-5)
