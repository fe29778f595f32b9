"""Candidate class names of predictions."""

import json
from collections.abc import Sequence
from pathlib import Path

import fsspec
import numpy as np
import pytest

from lit_het.data_pipelines.texts.prompts import FAMILIES
from lit_het.eval.features import Features
from lit_het.eval.predictions import class_scores
from lit_het.eval.sets.recognition import (
    LargerClassifier,
    Recognition,
    class_indices,
    embed_class_names,
    embed_texts,
    most_certain,
    read_classes,
    read_larger,
)
from lit_het.eval.suite import ClassNamesConfig
from lit_het.types import ImageFeatures
from tests.eval.fake_model import FakeModel, with_text
from tests.refusals import assert_refused

NAMES = ("tench", "kit fox", "crane", "lantern", "plate", "cup", "fork")


def test_templates_are_averaged_on_the_sphere(make_encoder):
    captions = {"a tench": np.array([1.0, 0.0]), "tench!": np.array([0.0, 1.0])}
    embedding = embed_class_names(make_encoder(np.eye(2), captions), ["tench"], ["a {c}", "{c}!"])
    np.testing.assert_allclose(embedding, [[np.sqrt(0.5), np.sqrt(0.5)]], rtol=1e-6)


def test_names_that_become_the_same_tokens_are_named(make_encoder, capsys):
    encoder = with_text(
        make_encoder(np.eye(2), ("a", "b")),
        tokenize=lambda texts: np.array([[len(text)] for text in texts]),  # a stand-in: equal lengths are equal
        embed=lambda tokens: np.tile(np.array([1, 0], np.float32), (len(tokens), 1)),
    )
    embed_class_names(encoder, ["cat", "owl", "Owl", "crane", "owl"])
    assert "3 labels cannot be told from others, such as owl from cat: their texts" in (said := capsys.readouterr().err)
    assert "the same 1 tokens (case may be ignored" in said
    embed_class_names(encoder, ["owl", "owl", "crane"])
    assert not capsys.readouterr().err


@pytest.mark.parametrize("num_shards", [1, 3])
def test_texts_are_embedded_in_batches_of_one_shape_and_all_are_counted(unit_vectors, make_encoder, num_shards: int):
    vectors = unit_vectors(600, 3)
    captions = [f"caption {number}" for number in range(600)]
    encoder = make_encoder(np.eye(3), dict(zip(captions, vectors, strict=True)), num_shards=num_shards)
    shapes, done = set(), []

    def text(tokens: np.ndarray) -> np.ndarray:
        shapes.add(tokens.shape)
        return encoder.text.embed(tokens)

    embeddings = embed_texts(with_text(encoder, embed=text), captions, done.append)
    np.testing.assert_array_equal(embeddings, vectors)
    assert len(shapes) == 1
    assert shapes.pop()[0] % num_shards == 0
    assert sum(done) == 600


@pytest.fixture
def trained(make_encoder, monkeypatch, tmp_path):
    """A model of two names with a cache for their embeddings."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return with_text(make_encoder(np.eye(2), ("a", "b")), tower="done")


def test_class_embeddings_of_a_trained_text_tower_are_cached(trained):
    def fail(tokens: np.ndarray) -> np.ndarray:
        raise AssertionError("the names were embedded before")

    first = embed_class_names(trained, ["a", "b"])
    np.testing.assert_array_equal(embed_class_names(with_text(trained, embed=fail), ["a", "b"]), first)
    for tower, names in (("another", ["a", "b"]), ("", ["a", "b"]), ("done", ["b", "a"])):
        with pytest.raises(AssertionError):
            embed_class_names(with_text(trained, embed=fail, tower=tower), names)


@pytest.mark.parametrize("count", [1, 3, 9])
def test_the_most_certain_prompts_are_those_of_a_loop(count: int):
    random = np.random.default_rng(0)
    prompts, variances = random.normal(size=(4, 5, 3)), random.random((4, 5))
    for name, found in enumerate(most_certain(prompts, variances, count)):
        threshold = sorted(variances[name])[: min(count, 5)][-1]
        expected = [prompts[name, t] for t in range(5) if variances[name, t] <= threshold]
        np.testing.assert_array_equal(found, expected)


def test_a_name_is_the_mean_of_its_most_certain_prompts(make_encoder, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # The last entry is the variance.
    captions = {"a tench": np.array([1.0, 0.0, 0.3]), "tench!": np.array([0.0, 1.0, 0.1])}
    encoder = with_text(make_encoder(np.eye(3), captions), tower="done", variances=lambda keys: keys[..., -1])
    templates = ["a {c}", "{c}!"]
    every = embed_class_names(encoder, ["tench"], templates)
    one = embed_class_names(encoder, ["tench"], templates, 1)
    np.testing.assert_allclose(one, [captions["tench!"] / np.linalg.norm(captions["tench!"])], rtol=1e-6)
    # Each choice is cached for itself.
    np.testing.assert_array_equal(embed_class_names(encoder, ["tench"], templates), every)
    np.testing.assert_array_equal(embed_class_names(encoder, ["tench"], templates, 2), every)
    assert np.abs(every - one).max() > 0.1


def test_prompts_are_chosen_by_variances_only_where_texts_have_some(trained):
    recognition = Recognition(("a", "b"), ("{c}",), ("a", "b"), certain_prompts=1)
    assert_refused("--certain-prompts needs the variances of texts", recognition.check, trained)
    assert_refused("certain_prompts = 0", ClassNamesConfig, certain_prompts=0)


@pytest.mark.parametrize("left", [0, 60, 140])
def test_truncated_cached_embeddings_are_recomputed(trained, tmp_path, left: int):
    first = embed_class_names(trained, ["a", "b"])
    [saved] = (tmp_path / "lit-het" / "names").iterdir()
    whole = saved.read_bytes()
    saved.write_bytes(whole[:left])
    np.testing.assert_array_equal(embed_class_names(trained, ["a", "b"]), first)
    assert saved.read_bytes() == whole


def test_a_class_missing_or_repeated_among_the_candidates_is_named(trained):
    first, second = np.array([0]), np.array([1])
    message = "'wolf' has images but is not among the 7 candidates"
    assert_refused(message, class_indices, second, ("tench", "wolf"), NAMES)
    assert_refused("'crane' is repeated", class_indices, first, ("crane",), ("crane", "cup", "crane"))
    assert class_indices(first, ("tench", "wolf"), NAMES).tolist() == [0]
    assert_refused("no class names", embed_class_names, trained, [])


def test_prompts_of_big_vision_reach_the_text_tower_in_its_form_and_answers_keep_the_names(
    write_set, sets, make_encoder
):
    names = ("French_Bulldog", "Jack-o'-lantern")
    data = write_set("dogs", [{"cls": 0}, {"cls": 1}], names)
    forms = [template.replace("{c:canonical}", "{}") for template in FAMILIES["clip_best"]]
    captions = {
        form.format(name): vector
        for form in forms
        for name, vector in zip(("french bulldog", "jackolantern"), np.eye(2), strict=True)
    }
    recognition = ClassNamesConfig("clip_best").build(sets.open(data))
    assert recognition.class_names == names
    # An encoder of these captions alone: any other would be an error.
    predictor = recognition.predictor(make_encoder(np.eye(2), captions))
    assert predictor.class_embeddings is not None
    np.testing.assert_allclose(predictor.class_embeddings, np.eye(2))


def test_a_set_of_imagenets_classes_by_other_names_takes_those_of_openai(write_set, sets, tmp_path):
    data = write_set("imagenet1k", [{"cls": 998}], [f"class {number}" for number in range(1000)])
    recognition = ClassNamesConfig(candidates=Path("imagenet")).build(sets.open(data))
    recognition.check_labels(sets.open(data))
    assert recognition.class_names[998] == "corn cob"
    features = Features(np.zeros((1, 1)), np.array([998]), np.array([0]))
    assert recognition.matched(features).labels.tolist() == [998]
    # The classes of a part of ImageNet are found by name.
    part = write_set("imagenet-a", [{"cls": 1}], ["stingray", "corn cob"])
    recognition = ClassNamesConfig(candidates=Path("imagenet")).build(sets.open(part))
    assert recognition.matched(Features(np.zeros((1, 1)), np.array([1]), np.array([0]))).labels.tolist() == [998]


def test_the_sets_own_templates_are_the_default(write_set, sets, tmp_path):
    opened, mine = sets.open(write_set("fish", [{"cls": 0}], ["tench"])), tmp_path / "mine.txt"
    assert ClassNamesConfig().build(opened).templates == ("{c}",)
    (tmp_path / "fish" / "zeroshot_classification_templates.txt").write_text("a {c}.\n")
    assert ClassNamesConfig().build(opened).templates == ("a {c}.",)
    assert ClassNamesConfig("bare").build(opened).templates == ("{c}",)
    assert len(ClassNamesConfig("photos").build(opened).templates) > 20
    mine.write_text("my {c}\nyour {c}\n")
    assert ClassNamesConfig(str(mine)).build(opened).templates == ("my {c}", "your {c}")
    rhymes = ClassNamesConfig("rhymes")
    assert_refused("--prompts rhymes is neither a file nor one of set, bare", rhymes.build, opened)
    mine.write_text("my {c}\nyours\n")
    message = r"mine\.txt: template 'yours' lacks the placeholder"
    assert_refused(message, ClassNamesConfig(str(mine)).build, opened)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"bird": ["crane"]}, "class 'dish' has no candidates"),
        ({"bird": "crane", "dish": []}, "class 'dish' has no candidates"),
        ({"bird": "crane", "dish": ["plate", "bowl"]}, r"'bowl' \(of class 'dish'\) is not among the 7 candidates"),
        ({"bird": [["crane"]], "dish": "cup"}, "class 'bird' has no candidates"),
        ({"bird": "crane", "dish": ["cup", "crane"]}, r"'crane' \(of class 'dish'\) is listed twice"),
        ({"bird": "crane", "dish": ["cup", "cup"]}, r"'cup' \(of class 'dish'\) is listed twice"),
        (["crane"], "not a JSON object"),
        (None, r"classes\.json: cannot be read as JSON"),
    ],
)
def test_an_inconsistent_file_of_classes_is_named_in_the_error(tmp_path, content, message):
    (tmp_path / "classes.json").write_text("{" if content is None else json.dumps(content))
    assert_refused(message, read_classes, f"{tmp_path}/classes.json", ("bird", "dish"), NAMES)


def test_candidates_of_a_class_are_summed_and_other_candidates_excluded(write_set, sets, make_encoder, tmp_path):
    """Two images: a cup, which counts as a dish; a fork, that the model takes for a cup among the mapped names."""
    data = write_set("things", [{"cls": 1}, {"cls": 0}], ["bird", "dish"])
    (tmp_path / "names.txt").write_text("".join(f"{name}\n" for name in NAMES))
    (tmp_path / "classes.json").write_text(json.dumps({"bird": "crane", "dish": ["plate", "cup"]}))
    config = ClassNamesConfig(candidates=tmp_path / "names.txt", classes=tmp_path / "classes.json")
    logits = np.log(np.array([[1, 1, 2, 1, 3, 5, 87], [1, 1, 6, 1, 1, 1, 89.0]]))
    encoder = make_encoder(logits, NAMES, temperature=1.0)
    opened = sets.open(data)
    recognition = config.build(opened)
    found = recognition.predict(recognition.predictor(encoder), opened.features(encoder.features))
    assert recognition.class_names == ("bird", "dish")
    np.testing.assert_allclose(np.exp(found.log_probabilities), [[0.2, 0.8], [0.75, 0.25]], rtol=1e-5)
    # The score of a class does not depend on other candidates.
    raw = class_scores(recognition.predictor(encoder), opened.features(encoder.features))
    np.testing.assert_allclose(np.exp(raw), [[2, 8], [6, 2]], rtol=1e-5)
    assert found.hits(1).tolist() == [1, 1]


def classifier(probabilities: Sequence[float]) -> FakeModel:
    return FakeModel(
        features=ImageFeatures(lambda view: view[:, 0, 0, :1].astype(np.float32), 1, 1, "a tower"),
        logits=lambda features, count, names: np.log([[probabilities]] * len(features)),
        num_classes=len(probabilities),
    )


def test_the_number_of_a_classifiers_classes_is_checked(write_set, sets):
    opened = sets.open(write_set("fish", [{"cls": 0}], ["tench", "crane"]))
    recognition, model = ClassNamesConfig().build(opened), classifier([0.5, 0.5])
    found = recognition.predict(recognition.predictor(model), opened.features(model.features))
    np.testing.assert_allclose(np.exp(found.log_probabilities), [[0.5, 0.5]], rtol=1e-6)
    message = r"the classifier has 3 classes and there are 2 candidates; give .* --candidates"
    assert_refused(message, recognition.predictor, classifier([1, 1, 1]))


@pytest.fixture
def subset(write_set, sets, tmp_path):
    """A set of two classes among those of a classifier of five, of which two share a name."""
    data = write_set("things", [{"cls": 1}, {"cls": 0}], ["Bird", "Dish"])
    (tmp_path / "things" / "candidates.txt").write_text("plate\ncrane\nlantern\ncrane\ncup\n")
    (tmp_path / "things" / "classes.json").write_text(json.dumps({"Bird": [3], "Dish": ["plate", 4]}))
    return sets.open(data)


def test_a_classifier_of_more_classes_is_read_by_the_files_of_the_set(subset):
    recognition, model = ClassNamesConfig().build(subset), classifier([0.2, 0.4, 0.1, 0.1, 0.2])
    recognition.check(model)
    found = recognition.predict(recognition.predictor(model), subset.features(model.features))
    # Of the other crane nothing counts: 0.1 against 0.2 + 0.2.
    np.testing.assert_allclose(np.exp(found.log_probabilities), [[0.2, 0.8], [0.2, 0.8]], rtol=1e-5)
    assert found.labels.tolist() == [1, 0]
    assert recognition.class_names == ("Bird", "Dish")


def test_other_models_choose_among_the_sets_own_names(subset, make_encoder):
    encoder = make_encoder(np.eye(2)[[1, 0]], ("Bird", "Dish"))
    recognition = ClassNamesConfig().build(subset)
    for model in (encoder, classifier([0.5, 0.5])):
        predictor = recognition.predictor(model)
        assert predictor.groups is None
        assert recognition.predict(predictor, subset.features(model.features)).num_classes == 2
    message = "the classifier has 3 classes and there are 2 candidates"
    assert_refused(message, recognition.check, classifier([1, 1, 1]))


def test_files_named_by_the_user_replace_those_of_the_set(subset, tmp_path):
    own = ClassNamesConfig(candidates=tmp_path / "things" / "classnames.txt").build(subset)
    assert own.larger is None
    message = "the classifier has 5 classes and there are 2 candidates"
    assert_refused(message, own.check, classifier([1] * 5))
    files = {"candidates": tmp_path / "things" / "candidates.txt", "classes": tmp_path / "things" / "classes.json"}
    named = ClassNamesConfig(**files).build(subset)
    assert named.groups == ((3,), (0, 4))
    named.check(classifier([1] * 5))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"Bird": [5], "Dish": [0]}, r"classes\.json: 5 \(of class 'Bird'\) is not among the 5 candidates"),
        ({"Bird": [-1], "Dish": [0]}, "-1 .* is not among the 5 candidates"),
        ({"Bird": [True], "Dish": [0]}, "class 'Bird' has no candidates"),
        ({"Bird": "crane", "Dish": [0]}, r"'crane' .* is the name of several candidates; give the number of one"),
        ({"Bird": 4, "Dish": ["plate", "cup"]}, "'cup' .* is listed twice"),
    ],
)
def test_a_set_whose_files_do_not_fit_together_is_refused(subset, tmp_path, content, message):
    (tmp_path / "things" / "classes.json").write_text(json.dumps(content))
    assert_refused(message, ClassNamesConfig().build, subset)
    (tmp_path / "things" / "classes.json").unlink()
    assert_refused(r"things/classes\.json: cannot be read as JSON", ClassNamesConfig().build, subset)


def test_the_files_of_a_set_are_read_from_a_url(subset, tmp_path):
    store = fsspec.filesystem("memory")
    for name in ("candidates.txt", "classes.json"):
        store.pipe_file(f"{tmp_path}/things/{name}", (tmp_path / "things" / name).read_bytes())
    found = read_larger(f"memory://{tmp_path}/things", ("Bird", "Dish"))
    assert found == LargerClassifier(5, ((3,), (0, 4)))
    assert read_larger(f"memory://{tmp_path}/elsewhere", ()) is None


def test_soft_labels_follow_the_names_of_the_candidates():
    recognition = Recognition(("cup", "crane", "fork"), ("{c}",), ("crane", "cup"))
    soft = np.array([[0.75, 0.25]], np.float32)
    assert recognition.matched_soft_labels(soft).tolist() == [[0.25, 0.75, 0]]
    names = ("crane", "cup")
    assert Recognition(names, ("{c}",), names).matched_soft_labels(soft) is soft
