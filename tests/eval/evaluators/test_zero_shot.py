"""The evaluator of classification, on shards."""

import io
import json
import shutil
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import special

from lit_het.data_pipelines.shards import write_tar
from lit_het.errors import UserError
from lit_het.eval import scores
from lit_het.eval.evaluators.zero_shot import ZeroShot
from lit_het.eval.features import ReadingTime, read_features
from lit_het.eval.predictions import Predictions
from lit_het.eval.sets import ImageSet, parse_set
from lit_het.eval.suite import ClassNamesConfig, ZeroShotConfig
from lit_het.types import Batch, ImageFeatures
from tests.eval.fake_model import FakeModel

NAMES = ("tench", "kit fox", "crane", "lantern", "plate", "cup", "fork")


@pytest.fixture
def perfect(make_encoder):
    """Seven images, one of each class, on the axes; captions are the bare names."""
    return make_encoder(np.eye(7), dict(zip(NAMES, np.eye(7), strict=True)), temperature=0.01)


def test_padding_rows_are_left_out_for_any_label(perfect, make_batches):
    for padding_label in (-1, 0, 10_000):
        batches = make_batches([0, 1, 2, 3, 4], batch_size=4, padding_label=padding_label)()
        [found] = read_features([perfect.features], batches, lambda count: None, "a set")
        assert found.labels.tolist() == found.positions.tolist() == found.values[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_progress_counts_valid_images(perfect, make_batches):
    done = []
    read_features([perfect.features], make_batches([0, 1, 2, 3, 4])(), done.append, "a set")
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


def test_a_set_without_valid_images_is_an_error(perfect, make_batches):
    batches: list[Batch] = [replace(batch, valid=np.zeros(4, bool)) for batch in make_batches([0, 1, 2, 3])()]
    for empty in (batches, []):
        with pytest.raises(UserError, match="a set: the set has no valid image"):
            read_features([perfect.features], empty, lambda count: None, "a set")


def test_features_that_are_not_finite_are_an_error(perfect, make_batches):
    broken = replace(perfect.features, extract=lambda view: np.full((len(view), 1), np.inf))
    with pytest.raises(UserError, match="a set: an embedding is not finite"):
        read_features([broken], make_batches([0])(), lambda count: None, "a set")


def test_figures_are_named_after_the_set_and_both_kinds_of_predictions_stand_side_by_side(
    write_set, sets, make_encoder, unit_vectors
):
    data = write_set("glyphs", [{"cls": number % 3} for number in range(9)], NAMES[:3])
    noise = np.random.default_rng(0).normal(size=(9, 4, 6))
    names = dict(zip(NAMES, unit_vectors(3, 6), strict=False))
    encoder, deterministic = (
        make_encoder(unit_vectors(9, 6, seed=1), names, noise=noise, has_noise_norm=has) for has in (True, False)
    )
    found = ZeroShotConfig(data, samples=4).build(sets)(encoder)
    figures = found.metrics()
    assert set(figures) >= {f"zero_shot/glyphs/{part}nll" for part in ("", "calibrated/", "noisy/")}
    assert figures["zero_shot/glyphs/nll"] != figures["zero_shot/glyphs/noisy/nll"]
    assert set(found.errors) >= {"top1", "ece", "noisy/top1"}
    for quiet in (
        ZeroShotConfig(data).build(sets)(encoder),
        ZeroShotConfig(data, samples=4).build(sets)(deterministic),
    ):
        assert not [name for name in quiet.figures if name.startswith("noisy/")]
    assert quiet.figures["nll"] == found.figures["nll"]


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


def predictions(evaluator: ZeroShot, model: FakeModel) -> Predictions:
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
    [("[[0]]", "of the set's 2 images"), ("[[0], [7]]", "entry 1 is not a list of class"), ("[[0], 1]", "entry 1")],
)
def test_reassessed_labels_of_another_set_are_rejected(write_set, sets, tmp_path, content, message):
    data = write_set("real", [{"cls": 0}, {"cls": 1}], NAMES)
    (tmp_path / "real.json").write_text(content)
    with pytest.raises(UserError, match=message):
        ZeroShotConfig(data, relabels=tmp_path / "real.json").build(sets)


def vector(*classes: int) -> bytes:
    """A member with ones for these of three classes."""
    buffer = io.BytesIO()
    np.save(buffer, np.isin(range(3), classes).astype(np.int8))
    return buffer.getvalue()


VECTORS = np.array([[2.0, 1, 0], [0, 2, 1], [1, 0, 2]])
TARGETS = np.array([[1.0, 1, 0], [0, 1, 0], [0, 0, 1]])


@pytest.fixture
def several(write_set):
    """Images with several classes, as vectors and in the words of their captions."""
    words = ("tench cup", "cup", "fork")
    members = [
        {"npy": vector(*np.flatnonzero(row).tolist()), "txt": text} for row, text in zip(TARGETS, words, strict=True)
    ]
    data = write_set("voc", members, ("tench", "cup", "fork"))
    Path(data.directory, "words.txt").write_text("tench\ncup\nfork\n")
    return replace(data, multi_label=True)


def test_images_with_several_labels_have_a_mean_average_precision(several, sets, make_encoder):
    encoder = make_encoder(VECTORS, dict(zip(("tench", "cup", "fork"), np.eye(3), strict=True)))
    found = ZeroShotConfig(several).build(sets)(encoder)
    assert found.metrics() == {"zero_shot/voc/mean_average_precision": 1.0}


def test_a_model_with_a_sigmoid_loss_has_probabilities_of_every_class_too(several, sets, make_encoder):
    noise = np.random.default_rng(0).normal(size=(3, 4, 3))
    encoder = make_encoder(VECTORS, dict(zip(("tench", "cup", "fork"), np.eye(3), strict=True)), 1.0, noise)
    model = replace(encoder, has_class_probabilities=True)
    found = ZeroShotConfig(several, samples=4).build(sets)(model)
    for part, logits in (("", VECTORS[:, None]), ("noisy/", VECTORS[:, None] + noise)):
        probability = special.expit(logits).mean(axis=1)
        losses = -np.log(np.where(TARGETS > 0, probability, 1 - probability))
        assert found.figures[f"{part}binary_nll"] == pytest.approx(losses.mean(), rel=1e-5)
        assert found.figures[f"{part}mean_average_precision"] == 1
        assert f"{part}binary_nll" in found.errors
    quiet = ZeroShotConfig(several).build(sets)(model).figures
    assert quiet == {name: value for name, value in found.figures.items() if not name.startswith("noisy/")}


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
    with pytest.raises(UserError, match="give one of --multi-label and --caption-words"):
        replace(several, caption_words=True)


def test_noise_samples_of_several_labels_need_probabilities_of_every_class(several, sets, make_encoder):
    encoder = make_encoder(VECTORS, dict(zip(("tench", "cup", "fork"), np.eye(3), strict=True)), has_noise_norm=False)
    evaluator = ZeroShotConfig(several, samples=4).build(sets)
    with pytest.raises(UserError, match="several labels per image: --samples needs a probability of every class"):
        evaluator.check(encoder)
    evaluator.check(replace(encoder, has_class_probabilities=True))


def test_the_alignment_of_noise_is_measured_and_drawn_with_one_label_or_several(several, write_set, sets, make_encoder):
    encoder = make_encoder(VECTORS, dict(zip(("tench", "cup", "fork"), np.eye(3), strict=True)))
    cosines = np.array([[0.5, 0.25], [0.7, 0.25], [0.6, 0.25]])
    model = replace(encoder, alignment=lambda _: cosines)
    for data in (several, write_set("one", [{"cls": number} for number in range(3)], ("tench", "cup", "fork"))):
        found = ZeroShotConfig(data).build(sets)(model)
        assert found.figures["kernel_alignment"] == pytest.approx(0.6)
        assert found.errors["kernel_alignment"] == pytest.approx(0.1 / 3**0.5)
        assert found.chance["kernel_alignment"] == pytest.approx(0.25)
        np.testing.assert_allclose(found.draw().arrays["kernel_alignment"], cosines)


def test_the_drawing_indexes_its_images_by_row(write_set, sets, perfect):
    data = write_set("glyphs", [{"cls": number} for number in (0, 1, 2, 4, 3)], NAMES)
    drawing = ZeroShotConfig(data).build(sets)(perfect).draw()
    arrays = drawing.arrays
    assert arrays["worst"].tolist() == [[3, 4, 1, 1], [4, 3, 1, 1]]
    assert arrays["image"][:, 0, 0, 0].tolist() == arrays["row"].tolist() == [0, 1, 2, 3, 4]
    assert arrays["label"].tolist() == [0, 1, 2, 4, 3]
    assert arrays["top_classes"][:, 0].tolist() == [0, 1, 2, 3, 4]
    assert arrays["reliability/plain"].shape == (4, 15)
    assert drawing.texts["class_names"] == NAMES


def test_sets_and_errors_by_confidence_are_measured_and_drawn_with_and_without_noise(
    write_set, sets, make_encoder, unit_vectors
):
    data = write_set("glyphs", [{"cls": number % 3} for number in range(20)], NAMES[:3])
    names = dict(zip(NAMES, unit_vectors(3, 6), strict=False))
    noise = np.random.default_rng(0).normal(size=(20, 4, 6))
    model = make_encoder(unit_vectors(20, 6, seed=1), names, noise=noise)
    found = ZeroShotConfig(data, samples=4).build(sets)(model)
    plain = scores.decision_figures(predictions(ZeroShotConfig(data).build(sets), model))[0]
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


def test_with_one_image_per_class_the_most_confident_errors_are_the_worst_classes(write_set, sets, make_encoder):
    data = write_set("glyphs", [{"cls": number} for number in range(3)], NAMES[:3])
    answers = np.array([[0.45, 0.55, 0], [0, 1, 0], [0.9, 0, 0.1]])
    encoder = make_encoder(answers, dict(zip(NAMES, np.eye(3), strict=False)))
    arrays = ZeroShotConfig(data).build(sets)(encoder).draw().arrays
    assert arrays["worst"].tolist() == [[2, 0, 1, 1], [0, 1, 1, 1]]


def test_a_set_whose_embeddings_are_missing_is_refused_when_it_is_opened(write_set, sets, tmp_path):
    data = write_set("glyphs", [{"cls": 0}], NAMES)
    with pytest.raises(UserError, match="nowhere"):
        ZeroShotConfig(replace(data, embeddings=str(tmp_path / "nowhere"))).build(sets)


def test_a_negative_number_of_noise_samples_is_refused(write_set):
    with pytest.raises(UserError, match=r"ZeroShotConfig: samples = -1 must be at least 0"):
        ZeroShotConfig(write_set("glyphs", [{"cls": 0}], NAMES), samples=-1)


def test_broken_images_end_an_evaluation_unless_some_are_allowed(write_set, sets, perfect):
    data = write_set("glyphs", [{"cls": 0}, {"cls": 1, "png": b"no image"}, {"cls": 2}], NAMES)
    with pytest.raises(UserError, match=r"bad of 3 samples.*max_bad_fraction"):
        ZeroShotConfig(data).build(sets)(perfect)
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
    assert evaluator.relabels == ((0,), (2,), (1,))
    assert evaluator(perfect).figures["relabelled_top1"] == 1


def test_reassessed_labels_of_a_set_with_repeated_keys_are_refused(write_set, sets, tmp_path):
    data = write_set("real", [{"cls": 0}], NAMES)
    shutil.copy(tmp_path / "real" / "test" / "shard-000000.tar", tmp_path / "real" / "test" / "shard-000001.tar")
    (tmp_path / "real.json").write_text("[[0], [0]]")
    with pytest.raises(UserError, match=r"real\.json: its entries follow the keys .* where s0000000 occurs twice"):
        ZeroShotConfig(data, relabels=tmp_path / "real.json").build(sets)


def soft(*probabilities: float) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array(probabilities, np.float32))
    return buffer.getvalue()


def test_human_label_distributions_are_scored_with_and_without_noise(write_set, sets, make_encoder, unit_vectors):
    answers = [(0.5, 0.5, 0), (0, 1, 0), (0.1, 0.2, 0.7), (1, 0, 0)]
    data = write_set("human", [{"cls": int(np.argmax(row)), "soft.npy": soft(*row)} for row in answers], NAMES[:3])
    noise = np.random.default_rng(0).normal(size=(4, 4, 6))
    names = dict(zip(NAMES, unit_vectors(3, 6), strict=False))
    model = make_encoder(unit_vectors(4, 6, seed=1), names, noise=noise)
    evaluator = ZeroShotConfig(data, samples=4).build(sets)
    found = evaluator(model)
    log_p = predictions(evaluator, model).log_probabilities
    by_image = -(np.array(answers) * log_p).sum(axis=1)
    assert found.figures["soft_nll"] == pytest.approx(by_image.mean(), rel=1e-5)
    assert found.errors["soft_nll"] == pytest.approx(by_image.std(ddof=1) / 2, rel=1e-5)
    assert found.chance["soft_nll"] == pytest.approx(np.log(3))
    assert len({found.figures[name] for name in ("soft_nll", "calibrated/soft_nll", "noisy/soft_nll")}) == 3


def test_sets_without_human_labels_have_no_figure_of_them(write_set, sets, perfect):
    found = ZeroShotConfig(write_set("hard", [{"cls": 0}, {"cls": 1}], NAMES)).build(sets)(perfect)
    assert "soft_nll" not in {*found.figures, *found.chance}


def test_human_labels_are_those_of_the_images_that_can_be_read(write_set, sets, perfect):
    certain = [soft(*np.eye(7)[number]) for number in range(3)]
    members = [{"cls": number, "soft.npy": certain[number]} for number in range(3)]
    members[1]["png"] = b"no image"
    data = replace(write_set("human", members, NAMES), max_bad_fraction=0.5)
    assert ZeroShotConfig(data).build(sets)(perfect).figures["soft_nll"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "missing member"),
        (b"no array", "soft label is not a NumPy array"),
        (soft(0.5, 0.5), "soft label is not a distribution .expected 3 probabilities"),
        (soft(0.5, 0.6, 0), "soft label is not a distribution"),
        (soft(-1, 1, 1), "soft label is not a distribution"),
        (soft(np.nan, 1, 0), "soft label is not a distribution"),
    ],
)
def test_human_labels_that_are_missing_or_broken_are_named(write_set, sets, content, message):
    broken = {"cls": 1} if content is None else {"cls": 1, "soft.npy": content}
    data = write_set("human", [{"cls": 0, "soft.npy": soft(1, 0, 0)}, broken], NAMES[:3])
    with pytest.raises(UserError, match=rf"s0000001\.soft\.npy: {message}.*; prepare the set again"):
        ZeroShotConfig(data).build(sets)


def test_several_labels_are_not_reassessed(several, tmp_path):
    with pytest.raises(UserError, match="--relabels is for images with one label; leave it out"):
        ZeroShotConfig(several, relabels=tmp_path / "real.json")
