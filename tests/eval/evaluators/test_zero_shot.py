"""The evaluator of classification, on shards."""

import io
import json
import shutil
import tarfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import special

from lit_het.data_pipelines.shards.writing import write_tar
from lit_het.errors import UserError
from lit_het.eval.evaluators.among_captions import AmongCaptions
from lit_het.eval.evaluators.zero_shot import ZeroShot
from lit_het.eval.features import ReadingTime, read_features
from lit_het.eval.metrics import scores
from lit_het.eval.predictions import Predictions
from lit_het.eval.sets import ImageSet
from lit_het.eval.sets.folders import parse_set
from lit_het.eval.suite import ClassNamesConfig, ZeroShotConfig
from lit_het.types import Batch, ImageFeatures
from tests.eval.fake_model import FakeModel
from tests.refusals import assert_refused

NAMES = ("tench", "kit fox", "crane", "lantern", "plate", "cup", "fork")


@pytest.fixture
def perfect(make_encoder):
    """Seven images, one of each class, on the axes; captions are the bare names."""
    return make_encoder(np.eye(7), NAMES, temperature=0.01)


def test_padding_rows_are_left_out_for_any_label_and_progress_counts_valid_images(perfect, make_batches):
    for padding_label in (-1, 0, 10_000):
        batches, done = make_batches([0, 1, 2, 3, 4], batch_size=4, padding_label=padding_label)(), []
        [found] = read_features([perfect.features], batches, done.append, "a set")
        assert found.labels.tolist() == found.positions.tolist() == found.values[:, 0].tolist() == [0, 1, 2, 3, 4]
        assert done == [4, 1]


def test_the_time_of_reading_is_counted_by_what_was_waited_for(perfect, make_batches, monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def after(seconds, made):
        nonlocal now
        now += seconds
        return made

    def batches():
        for batch in make_batches([0, 1, 2, 3, 4])():
            yield after(3, batch)

    tower = replace(perfect.features, extract=lambda view: after(5, perfect.features.extract(view)))
    spent = ReadingTime()
    read_features([tower], batches(), lambda count: after(100, None), "a set", spent)
    assert (spent.decoding, spent.tower, spent.num_images) == (2 * 3, 2 * 5, 5)


def test_a_set_without_valid_images_or_with_features_that_are_not_finite_is_an_error(perfect, make_batches):
    def read(tower, batches):
        read_features([tower], batches, lambda count: None, "a set")

    batches: list[Batch] = [replace(batch, valid=np.zeros(4, bool)) for batch in make_batches([0, 1, 2, 3])()]
    for empty in (batches, []):
        assert_refused("a set: the set has no valid image", read, perfect.features, empty)
    broken = replace(perfect.features, extract=lambda view: np.full((len(view), 1), np.inf))
    assert_refused("a set: an embedding is not finite", read, broken, make_batches([0])())


@pytest.fixture
def make_noisy(make_encoder, unit_vectors):
    """Makes a model of so many images and three names with noise."""

    def make(count: int, **options) -> FakeModel:
        noise = np.random.default_rng(0).normal(size=(count, 4, 6))
        names = dict(zip(NAMES[:3], unit_vectors(3, 6), strict=True))
        return make_encoder(unit_vectors(count, 6, seed=1), names, noise=noise, **options)

    return make


def test_images_are_read_once_per_tower(write_set, sets, perfect):
    data = write_set("glyphs", [{"cls": 0}, {"cls": 1}], NAMES)
    batches = []

    def extract(view: np.ndarray) -> np.ndarray:
        batches.append(len(view))
        return perfect.features.extract(view)

    tower = replace(perfect.features, extract=extract)
    evaluators = [ZeroShotConfig(data).build(sets), ZeroShotConfig(data, ClassNamesConfig("bare")).build(sets)]
    for evaluator in evaluators:
        evaluator(replace(perfect, features=tower))
    assert batches == [4]
    evaluators[0](replace(perfect, features=replace(tower, tower="after another step")))
    assert batches == [4, 4]


def test_a_config_reads_a_folder_in_the_layout_of_clip_benchmark(write_set, sets, tmp_path, make_encoder):
    data = write_set("tiny", [{"cls": 1}, {"cls": 1}, {"cls": 0}], ["kit fox", "tench"])
    (tmp_path / "tiny" / "zeroshot_classification_templates.txt").write_text("a {c}.\n")
    (tmp_path / "all.txt").write_text("tench\ncup\nkit fox\n")
    captions = {"a tench.": np.eye(3)[0], "a cup.": np.eye(3)[1], "a kit fox.": np.eye(3)[2]}
    encoder = make_encoder(np.eye(3)[[0, 0, 2]], captions)
    own = ZeroShotConfig(data).build(sets)(encoder)
    assert own.figures["top1"] == 1
    assert own.chance["top1"] == 1 / 2
    larger = ZeroShotConfig(data, ClassNamesConfig(candidates=tmp_path / "all.txt")).build(sets)(encoder)
    assert larger.figures["top1"] == 1
    assert larger.chance["top1"] == pytest.approx(1 / 3)


def predictions(evaluator: ZeroShot | AmongCaptions, model: FakeModel) -> Predictions:
    assert isinstance(evaluator, ZeroShot)
    predictor = evaluator.recognition.predictor(model)
    return evaluator.recognition.predict(predictor, evaluator.opened.features(model.features))


def test_two_classes_with_one_name_share_the_credit(write_set, sets, make_encoder):
    encoder = make_encoder(np.eye(3), {"crane": np.eye(3)[0], "cup": np.eye(3)[1]})
    data = write_set("twins", [{"cls": 0}, {"cls": 1}], ["crane", "cup", "crane"])
    assert predictions(ZeroShotConfig(data).build(sets), encoder).hits(1).tolist() == [0.5, 1.0]


def test_reassessed_labels_accept_any_of_their_classes_and_skip_images_without(write_set, sets, perfect, tmp_path):
    data = write_set("real", [{"cls": number} for number in range(4)], NAMES)
    (tmp_path / "real.json").write_text(json.dumps([[0, 5], [2], [], [3]]))
    found = ZeroShotConfig(data, relabels=tmp_path / "real.json").build(sets)(perfect)
    assert found.figures["top1"] == 1
    assert found.figures["relabelled_top1"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[0]]", "of the set's 2 images"),
        ("[[0], [7]]", "entry 1 is not a list of class"),
        ("[[0], 1]", "entry 1"),
        ("[[0], [0], [0], [0]]", r"real\.json: its entries follow the keys .* where s0000000 occurs twice"),
    ],
)
def test_reassessed_labels_of_another_set_are_rejected(write_set, sets, tmp_path, content, message):
    data = write_set("real", [{"cls": 0}, {"cls": 1}], NAMES)
    if "twice" in message:
        shutil.copy(tmp_path / "real" / "test" / "shard-000000.tar", tmp_path / "real" / "test" / "shard-000001.tar")
    (tmp_path / "real.json").write_text(content)
    assert_refused(message, ZeroShotConfig(data, relabels=tmp_path / "real.json").build, sets)


def array(values: Sequence[float], of: type = np.float32) -> bytes:
    """A member with these values."""
    buffer = io.BytesIO()
    np.save(buffer, np.array(values, of))
    return buffer.getvalue()


VECTORS = np.array([[2.0, 1, 0], [0, 2, 1], [1, 0, 2]])
TARGETS = np.array([[1.0, 1, 0], [0, 1, 0], [0, 0, 1]])
NOISE = np.random.default_rng(0).normal(size=(3, 4, 3))


@pytest.fixture
def several(write_set):
    """Images with several classes, as vectors and in the words of their captions."""
    words = ("tench cup", "cup", "fork")
    members = [{"npy": array(row, np.int8), "txt": text} for row, text in zip(TARGETS.tolist(), words, strict=True)]
    data = write_set("voc", members, ("tench", "cup", "fork"))
    Path(data.directory, "words.txt").write_text("tench\ncup\nfork\n")
    return replace(data, multi_label=True)


@pytest.fixture
def of_several(make_encoder) -> FakeModel:
    """A model of these images, without probabilities of every class."""
    return make_encoder(VECTORS, ("tench", "cup", "fork"), 1.0, NOISE)


def test_images_with_several_labels_have_a_mean_average_precision_and_losses(several, of_several, sets):
    metrics = ZeroShotConfig(several).build(sets)(of_several).metrics()
    assert metrics == {"zero_shot/voc/mean_average_precision": 1.0}
    # Of a model with a sigmoid loss.
    model = replace(of_several, has_class_probabilities=True)
    found = ZeroShotConfig(several, samples=4).build(sets)(model)
    for part, logits in (("", VECTORS[:, None]), ("noisy/", VECTORS[:, None] + NOISE)):
        probability = special.expit(logits).mean(axis=1)
        losses = -np.log(np.where(TARGETS > 0, probability, 1 - probability))
        assert found.figures[f"{part}binary_nll"] == pytest.approx(losses.mean(), rel=1e-5)
        assert found.figures[f"{part}mean_average_precision"] == 1
        assert f"{part}binary_nll" in found.errors
    quiet = ZeroShotConfig(several).build(sets)(model).figures
    assert quiet == {name: value for name, value in found.figures.items() if not name.startswith("noisy/")}


def test_a_classifier_with_a_sigmoid_loss_has_the_loss_of_its_labels(write_set, sets):
    """HET-XL Sec. 6.2: of one label per image, summed over classes, with noise and without."""
    labels, logits = [2, 0, 1, 2], np.random.default_rng(0).normal(0, 3, (4, 3)).astype(np.float32)
    noise = np.array([[0.0, 1.0, -2.0], [1.5, 0.0, 0.5]], np.float32)
    data = write_set("many", [{"cls": label} for label in labels], NAMES[:3])
    model = FakeModel(
        features=ImageFeatures(lambda view: view[:, 0, 0, :1].astype(np.float32), 1, 1, "a tower"),
        logits=lambda features, count, classes: (
            logits[features[:, 0].astype(int)][:, None] + (noise[None] if count else 0)
        ),
        num_classes=3,
        has_class_probabilities=True,
        noise_norm=lambda features: np.ones(len(features), np.float32),
    )
    found = ZeroShotConfig(data, samples=2).build(sets)(model)
    for part, samples in (("", logits[:, None]), ("noisy/", logits[:, None] + noise)):
        p = special.expit(samples.astype(np.float64)).mean(axis=1)
        losses = -np.log(np.where(np.eye(3)[labels] > 0, p, 1 - p)).sum(axis=1)
        assert found.figures[f"{part}sigmoid_nll"] == pytest.approx(np.mean(losses), rel=1e-5)
        assert found.errors[f"{part}sigmoid_nll"] == pytest.approx(np.std(losses, ddof=1) / 2, rel=1e-5)
    without = ZeroShotConfig(data).build(sets)(replace(model, has_class_probabilities=False))
    assert "sigmoid_nll" not in without.figures


def test_words_of_captions_are_labels(several, sets):
    model = FakeModel(
        features=ImageFeatures(lambda view: view[:, 0, 0, :1].astype(np.float32), 1, 1, "a tower"),
        logits=lambda features, count, classes: VECTORS[features[:, 0].astype(int)][:, None],
        num_classes=3,
        has_class_probabilities=True,
    )
    words = replace(several, multi_label=False, caption_words=True)
    found = [ZeroShotConfig(data).build(sets)(model) for data in (several, words)]
    assert found[0].figures == found[1].figures
    assert found[0].kind == "supervised"
    assert parse_set(f"x={several.directory}/test", ImageSet("", "", caption_words=True)).directory == several.directory
    Path(several.directory, "words.txt").unlink()
    with pytest.raises(UserError, match=r"no words\.txt in .*voc/test or its parent"):
        parse_set(f"{several.directory}/test", ImageSet("", "", caption_words=True))
    assert_refused("give one of --multi-label and --caption-words", replace, several, caption_words=True)


def test_the_alignment_of_noise_is_measured_and_drawn_with_one_label_or_several(several, of_several, write_set, sets):
    cosines = np.array([[0.5, 0.25], [0.7, 0.25], [0.6, 0.25]])
    model = replace(of_several, alignment=lambda _: cosines)
    for data in (several, write_set("one", [{"cls": number} for number in range(3)], ("tench", "cup", "fork"))):
        found = ZeroShotConfig(data).build(sets)(model)
        assert found.figures["kernel_alignment"] == pytest.approx(0.6)
        assert found.errors["kernel_alignment"] == pytest.approx(0.1 / 3**0.5)
        assert found.chance["kernel_alignment"] == pytest.approx(0.25)
        np.testing.assert_allclose(found.draw().arrays["kernel_alignment"], cosines)


def test_the_drawing_indexes_its_images_by_row(write_set, sets, perfect, make_encoder):
    data = write_set("glyphs", [{"cls": number} for number in (0, 1, 2, 4, 3)], NAMES)
    drawing = ZeroShotConfig(data).build(sets)(perfect).draw()
    arrays = drawing.arrays
    assert arrays["worst"].tolist() == [[3, 4, 1, 1], [4, 3, 1, 1]]
    assert arrays["image"][:, 0, 0, 0].tolist() == arrays["row"].tolist() == [0, 1, 2, 3, 4]
    assert arrays["label"].tolist() == [0, 1, 2, 4, 3]
    assert arrays["top_classes"][:, 0].tolist() == [0, 1, 2, 3, 4]
    assert arrays["reliability/plain"].shape == (4, 15)
    assert drawing.texts["class_names"] == NAMES
    # With one image per class the most confident errors are the worst classes.
    data = write_set("three", [{"cls": number} for number in range(3)], NAMES[:3])
    encoder = make_encoder(np.array([[0.45, 0.55, 0], [0, 1, 0], [0.9, 0, 0.1]]), NAMES[:3])
    arrays = ZeroShotConfig(data).build(sets)(encoder).draw().arrays
    assert arrays["worst"].tolist() == [[2, 0, 1, 1], [0, 1, 1, 1]]


def test_predictions_with_and_without_noise_are_measured_and_drawn_side_by_side(write_set, sets, make_noisy):
    data = write_set("glyphs", [{"cls": number % 3} for number in range(20)], NAMES[:3])
    model, deterministic = make_noisy(20), make_noisy(20, has_noise_norm=False)
    quiet, noisy = ZeroShotConfig(data).build(sets), ZeroShotConfig(data, samples=4).build(sets)
    found = noisy(model)
    assert set(found.metrics()) >= {f"zero_shot/glyphs/{part}nll" for part in ("", "calibrated/", "noisy/")}
    assert found.figures["nll"] != found.figures["noisy/nll"]
    assert set(found.errors) >= {"top1", "ece", "noisy/top1"}
    for one in (quiet(model), noisy(deterministic)):
        assert not [name for name in one.figures if name.startswith("noisy/")]
        assert one.figures["nll"] == found.figures["nll"]
    plain = scores.decision_figures(predictions(quiet, model))[0]
    assert {name: found.figures[name] for name in plain} == plain
    assert found.figures["noisy/aurc"] != plain["aurc"]
    assert found.chance["aurc"] == pytest.approx(2 / 3)
    arrays = found.draw().arrays
    # Ten images in a half suffice for coverages up to 10/11.
    assert arrays["sets/noisy"][0].tolist() == [0.5, 0.6, 0.7, 0.8, 0.9]
    assert arrays["sets/plain"][1:3, 4].tolist() == [plain["coverage90"], plain["set_size90"]]
    assert arrays["risk/plain"].shape == (2, 20)
    assert arrays["risk/plain"][1].mean() == pytest.approx(plain["aurc"])
    # The noise norm of image n is n: the first images are answered first.
    wrong = 1 - arrays["correct"]
    np.testing.assert_allclose(arrays["risk/noise_norm"][1], wrong.cumsum() / np.arange(1, 21))


def test_configurations_that_do_not_fit_are_refused_before_anything_is_read(
    write_set, sets, several, of_several, tmp_path
):
    data = write_set("glyphs", [{"cls": 0}], NAMES)
    missing = replace(data, embeddings=str(tmp_path / "nowhere"))
    assert_refused("nowhere", ZeroShotConfig(missing).build, sets)
    assert_refused(r"ZeroShotConfig: samples = -1 must be at least 0", ZeroShotConfig, data, samples=-1)
    message = "--relabels is for images with one label; leave it out"
    assert_refused(message, ZeroShotConfig, several, relabels=tmp_path / "real.json")
    check = ZeroShotConfig(several, samples=4).build(sets).check
    assert_refused("several labels per image: --samples needs a probability of every class", check, of_several)
    check(replace(of_several, has_class_probabilities=True))


def test_broken_images_end_an_evaluation_unless_some_are_allowed(write_set, sets, perfect):
    data = write_set("glyphs", [{"cls": 0}, {"cls": 1, "png": b"no image"}, {"cls": 2}], NAMES)
    assert_refused(r"bad of 3 samples.*max_bad_fraction", ZeroShotConfig(data).build(sets), perfect)
    evaluator = ZeroShotConfig(replace(data, max_bad_fraction=0.5)).build(sets)
    assert predictions(evaluator, perfect).positions.tolist() == [0, 2]
    assert evaluator(perfect).figures["top1"] == 1


def test_reassessed_labels_follow_the_keys_and_not_the_shards(write_set, sets, perfect, tmp_path):
    """Shards are read as 0, 10, 2: the third image of the source comes first after the first."""
    data = write_set("real", [{"cls": number} for number in range(3)], NAMES)
    with tarfile.open(tmp_path / "real" / "test" / "shard-000000.tar") as shard:
        members = {member.name: (shard.extractfile(member) or io.BytesIO()).read() for member in shard}
    (tmp_path / "real" / "test" / "shard-000000.tar").unlink()
    for name, number in (("0", 0), ("10", 2), ("2", 1)):
        key = f"s{number:07d}"
        sample = {"__key__": key, "png": members[f"{key}.png"], "cls": number}
        write_tar(tmp_path / "real" / "test" / f"{name}.tar", [sample])
    (tmp_path / "real.json").write_text(json.dumps([[0], [1], [2]]))
    evaluator = ZeroShotConfig(data, relabels=tmp_path / "real.json").build(sets)
    assert isinstance(evaluator, ZeroShot)
    assert evaluator.relabels == ((0,), (2,), (1,))
    assert evaluator(perfect).figures["relabelled_top1"] == 1


def test_human_label_distributions_are_scored_with_and_without_noise(write_set, sets, make_noisy):
    answers = [(0.5, 0.5, 0), (0, 1, 0), (0.1, 0.2, 0.7), (1, 0, 0)]
    data = write_set("human", [{"cls": int(np.argmax(row)), "soft.npy": array(row)} for row in answers], NAMES[:3])
    model, evaluator = make_noisy(4), ZeroShotConfig(data, samples=4).build(sets)
    found = evaluator(model)
    log_p = predictions(evaluator, model).log_probabilities
    by_image = -(np.array(answers) * log_p).sum(axis=1)
    assert found.figures["soft_nll"] == pytest.approx(by_image.mean(), rel=1e-5)
    assert found.errors["soft_nll"] == pytest.approx(by_image.std(ddof=1) / 2, rel=1e-5)
    assert found.chance["soft_nll"] == pytest.approx(np.log(3))
    assert len({found.figures[name] for name in ("soft_nll", "calibrated/soft_nll", "noisy/soft_nll")}) == 3


def test_human_labels_are_those_of_the_images_that_can_be_read_and_sets_without_any_have_no_figure_of_them(
    write_set, sets, perfect
):
    members = [{"cls": number, "soft.npy": array(np.eye(7)[number])} for number in range(3)]
    members[1]["png"] = b"no image"
    data = replace(write_set("human", members, NAMES), max_bad_fraction=0.5)
    assert ZeroShotConfig(data).build(sets)(perfect).figures["soft_nll"] == pytest.approx(0, abs=1e-6)
    found = ZeroShotConfig(write_set("hard", [{"cls": 0}, {"cls": 1}], NAMES)).build(sets)(perfect)
    assert "soft_nll" not in {*found.figures, *found.chance}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "missing member"),
        (b"no array", "soft label is not a NumPy array"),
        (array([0.5, 0.5]), "soft label is not a distribution .expected 3 probabilities"),
        (array([0.5, 0.6, 0]), "soft label is not a distribution"),
        (array([-1, 1, 1]), "soft label is not a distribution"),
        (array([np.nan, 1, 0]), "soft label is not a distribution"),
    ],
)
def test_human_labels_that_are_missing_or_broken_are_named(write_set, sets, content, message):
    broken = {"cls": 1} if content is None else {"cls": 1, "soft.npy": content}
    data = write_set("human", [{"cls": 0, "soft.npy": array([1, 0, 0])}, broken], NAMES[:3])
    message = rf"s0000001\.soft\.npy: {message}.*; prepare the set again"
    assert_refused(message, ZeroShotConfig(data).build, sets)
