"""Captions made of class names and prompt templates, as FLYP trains on."""

import collections
import dataclasses

import numpy as np
import pytest

from lit_het.apps.tokenizer import read_captions
from lit_het.data_pipelines.data_config import LoaderConfig, Streaming, WeightedShards
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.stream import Stream
from lit_het.data_pipelines.texts import openai_clip
from lit_het.data_pipelines.texts.captions import captions_in
from lit_het.data_pipelines.texts.captions_config import TextPlace, classes_of
from lit_het.data_pipelines.texts.prompts import TEMPLATES_FILE
from lit_het.errors import UserError
from tests.data_pipelines.conftest import IMAGE_SIZE, NUM_SAMPLES, take

TEMPLATES = ("a photo of {c}", "{c}, drawn", "one {c}")


def as_bytes(captions):
    """Stands for a tokenizer: the bytes of a caption."""
    return np.array([list(caption.ljust(24).encode()) for caption in captions], np.int32)


def texts(batch):
    return [bytes(row.astype(np.uint8)).decode().strip() for row in np.asarray(batch.text)]


@pytest.fixture(scope="module")
def config(tmp_path_factory, make_shards):
    shards = make_shards(tmp_path_factory.mktemp("classes"), s3={"cls": 4})
    (shards / TEMPLATES_FILE).write_text("\n".join(TEMPLATES))
    config = LoaderConfig((str(shards),), image_size=IMAGE_SIZE, batch_size=NUM_SAMPLES, threads=0, seed=5)
    return dataclasses.replace(config, captions=f"cls/{shards}")


def test_the_place_has_a_folder_and_prompts():
    assert classes_of("json/cls") is classes_of("txt") is None
    assert classes_of("cls/data/pets") == ("data/pets", "set")
    assert classes_of("cls/data/pets:clip80") == ("data/pets", "clip80")
    assert classes_of("cls/gs://bucket/pets") == ("gs://bucket/pets", "set")
    assert classes_of("cls/gs://bucket/pets:my/own.txt") == ("gs://bucket/pets", "my/own.txt")
    assert TextPlace("cls/data/pets:clip80").member == "cls"


def test_a_caption_is_a_template_with_the_name_of_the_class(config):
    (batch,) = Loader(config, as_bytes).epoch()
    labels = [4 if i == 3 else i for i in range(NUM_SAMPLES)]
    assert texts(batch) == [f"a photo of class {label}" for label in labels]  # evaluation takes the first
    assert captions_in("4\n", config.captions) == ["a photo of class 4", "class 4, drawn", "one class 4"]
    names = captions_in("4", f"{config.captions}:clip80")
    assert names == [template.replace("{c}", "class 4") for template in openai_clip.imagenet_templates()]


def test_training_draws_templates_by_seed_and_position_alone(config):
    epochs = take(Loader(config, as_bytes), 60)
    drawn = [sorted(texts(batch)) for batch in epochs]
    assert drawn[0] != drawn[1]
    of_class_7 = collections.Counter(text for batch in drawn for text in batch if "class 7" in text)
    assert of_class_7.keys() == {template.replace("{c}", "class 7") for template in TEMPLATES}
    # Resumed at the 30th batch, by hosts of another number and by threads.
    again = take(Loader(dataclasses.replace(config, threads=2), as_bytes), 30, 30 * NUM_SAMPLES)
    assert [texts(batch) for batch in again] == [texts(batch) for batch in epochs[30:]]
    other = take(Loader(dataclasses.replace(config, seed=6), as_bytes), 1)
    assert sorted(texts(other[0])) != drawn[0]


def test_equal_captions_are_duplicates_and_other_templates_of_a_class_are_not(config):
    (batch,) = Loader(config, as_bytes).epoch()
    ids = np.asarray(batch.text_id)
    assert (ids[3] == ids[4]).all()
    for batch in take(Loader(config, as_bytes), 20):
        _, of_text = np.unique(texts(batch), return_inverse=True)
        equal = (np.asarray(batch.text_id)[:, None] == np.asarray(batch.text_id)).all(axis=2)
        np.testing.assert_array_equal(equal, of_text[:, None] == of_text)


def test_class_names_mix_with_stored_captions_and_other_sets(config):
    mixed = dataclasses.replace(config, captions=f"{config.captions}=0.5,txt=0.5")
    found = {text for batch in take(Loader(mixed, as_bytes), 20) for text in texts(batch)}
    assert {"word7", "one class 7", "class 7, drawn"} <= found
    beside = dataclasses.replace(config, mixture=(WeightedShards(config.shards, captions="txt"),))
    found = [text for batch in take(Loader(beside, as_bytes), 10) for text in texts(batch)]
    assert sum(text.startswith("word") for text in found) == len(found) // 2
    assert read_captions(config.shards, [config.captions])[:2] == ["a photo of class 0", "class 0, drawn"]
    stream = Stream(dataclasses.replace(config, stream=Streaming(8)), as_bytes)
    assert {"one class 7", "class 7, drawn"} <= {text for batch in take(stream, 20) for text in texts(batch)}


def test_a_label_beyond_the_names_is_told(make_shards, tmp_path):
    shards = make_shards(tmp_path, s3={"cls": NUM_SAMPLES})
    config = LoaderConfig((str(shards),), image_size=IMAGE_SIZE, batch_size=NUM_SAMPLES, threads=0)
    loader = Loader(dataclasses.replace(config, captions=f"cls/{shards}:photo", max_bad_fraction=0.01), as_bytes)
    with pytest.raises(UserError, match=r"key s3: label is out of range \('23' is .*classnames.txt has too few names"):
        next(loader.epoch())


def test_what_is_missing_is_told_before_the_first_sample(config, tmp_path):
    def load(captions):
        Loader(dataclasses.replace(config, captions=captions), as_bytes)

    with pytest.raises(UserError, match="captions = 'cls': cls are numbers; add the folder of their names"):
        load("cls")
    with pytest.raises(UserError, match=r"nowhere/classnames\.txt: cannot be read .* check the path"):
        load("cls/nowhere")
    with pytest.raises(UserError, match=r"captions = .*: clip81 is neither a file nor one of set, bare, photo"):
        load(f"{config.captions}:clip81")
    (tmp_path / "classnames.txt").write_text("cat\n")
    with pytest.raises(UserError, match=rf"{tmp_path} has no {TEMPLATES_FILE}; name prompts, as captions = 'cls/"):
        load(f"cls/{tmp_path}")
    (tmp_path / TEMPLATES_FILE).write_text("a photo\n")
    with pytest.raises(UserError, match=r"template 'a photo' lacks the placeholder \{c\}"):
        load(f"cls/{tmp_path}")


def test_names_are_those_of_the_files_when_a_loader_is_made(tmp_path, make_shards):
    shards = make_shards(tmp_path)
    config = LoaderConfig((str(shards),), image_size=IMAGE_SIZE, batch_size=NUM_SAMPLES, threads=0, seed=5)
    config = dataclasses.replace(config, captions=f"cls/{shards}")
    for article in ("a", "the"):
        (shards / TEMPLATES_FILE).write_text(f"{article} {{c}}")
        (batch,) = Loader(config, as_bytes).epoch()
        assert texts(batch)[0] == f"{article} class 0"
