"""Stored embeddings are read back, and files of other recipes or damaged files are refused."""

import dataclasses
import json

import numpy as np
import pytest
import safetensors

from lit_het.data_pipelines.data_config import LoaderConfig, WeightedShards
from lit_het.data_pipelines.embeddings import EmbeddingFolder, Recipe, describe, describe_captions
from lit_het.data_pipelines.images.augment import HorizontalFlip
from lit_het.data_pipelines.images.transforms import InceptionCrop, Preprocessing, Training
from lit_het.data_pipelines.shards.index import index_shard
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.writing import expand, write_shards
from lit_het.data_pipelines.texts.captions_config import TextPlace
from lit_het.types import Batch
from tests.data_pipelines.conftest import IMAGE_SIZE, NUM_SAMPLES, joined, take
from tests.refusals import assert_refused

SIZE = 3
PLAIN = Training(Preprocessing())
CROPPED = Training(Preprocessing(), InceptionCrop(), (HorizontalFlip(),))


def recipe(**changed) -> Recipe:
    images = describe(PLAIN, IMAGE_SIZE, random=False)
    fields = {"tower": "t", "inputs": images, "size": SIZE, "num_crops": 0, "dtype": "float32", "seed": 0}
    return Recipe(**{**fields, **changed})


RECIPE = recipe()


def embedding_of(number: int, crop: int = 0) -> np.ndarray:
    return np.array([number, crop, 0.1 * number], np.float32)


def safetensors_of(header: object) -> bytes:
    """A file with four bytes of data after a header, which is a string or becomes JSON."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + bytes(4)


def stored(batch: Batch) -> np.ndarray:
    return np.asarray(batch.image_embedding)


def numbers_of(batch: Batch) -> np.ndarray:
    """The numbers of the samples, from their captions."""
    return np.asarray(batch.text)[:, 0]


def write(folder, shards, how: Recipe = RECIPE, broken: tuple[int, ...] = ()):
    """Writes embeddings that encode the number of their sample."""
    output, views = EmbeddingFolder(str(folder), how), max(1, how.num_crops)
    for address in expand(shards):
        table = index_shard(address)
        numbers = [int(key[1:]) for key in table.keys.tolist()]
        rows = [[embedding_of(number, crop) for crop in range(views)] for number in numbers]
        embeddings = np.array(rows, np.float32)
        embeddings[[number in broken for number in numbers]] = np.nan
        output.write(table, embeddings)
    return folder


@pytest.fixture
def plain(shards, tmp_path):
    """A folder with embeddings of the shards."""
    return write(tmp_path / "e", shards)


def loader(shards, folder, **changed):
    config = LoaderConfig(shards=(str(shards),), image_size=IMAGE_SIZE, batch_size=8, threads=0, embeddings=str(folder))
    return Loader(dataclasses.replace(config, **changed), lambda texts: np.array([[int(t[4:] or 0)] for t in texts]))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_sample_has_its_own_embedding_and_caption(shards, tmp_path, dtype):
    write(tmp_path / "e", shards, recipe(dtype=dtype))
    batch = joined(list(loader(shards, tmp_path / "e").epoch()))
    numbers, embeddings = numbers_of(batch)[batch.valid], stored(batch)[batch.valid]
    assert batch.image is None
    assert embeddings.dtype == np.dtype(dtype)
    assert sorted(numbers) == list(range(NUM_SAMPLES))
    np.testing.assert_array_equal(embeddings, np.stack([embedding_of(n) for n in numbers]).astype(np.dtype(dtype)))


def test_the_order_of_training_is_that_of_the_images(shards, plain):
    both = (take(loader(shards, None, embeddings=folder), 6, 40) for folder in (str(plain), None))
    found, expected = ([numbers_of(batch).tolist() for batch in batches] for batches in both)
    assert found == expected


def test_samples_without_an_image_or_a_caption_do_not_move_the_others(make_shards, tmp_path):
    folder = make_shards(tmp_path / "holes", s3={"jpg": b""}, s11={"txt": b"\xff"})
    found = loader(folder, write(tmp_path / "e", folder, broken=(3,)), max_bad_fraction=0.5)
    batch = joined(list(found.epoch()))
    numbers, is_broken = np.arange(NUM_SAMPLES), np.isin(np.arange(NUM_SAMPLES), (3, 11))
    np.testing.assert_array_equal(numbers_of(batch)[:NUM_SAMPLES], np.where(is_broken, 0, numbers))
    np.testing.assert_array_equal(batch.valid[:NUM_SAMPLES], ~is_broken)
    assert found.faults.causes == {"no embedding": 1, "text is not UTF-8": 1}


def test_samples_without_an_image_are_excluded_as_without_embeddings(tmp_path):
    samples = [{"__key__": f"s{i}", "txt": f"word{i}", **({"png": b"x"} if i != 2 else {})} for i in range(5)]
    write_shards(tmp_path / "d", samples)
    table = index_shard(expand(tmp_path / "d")[0])
    output = EmbeddingFolder(str(tmp_path / "e"), RECIPE)
    output.write(table, np.array([[embedding_of(i)] for i in (0, 1, 3, 4)]))
    found = loader(tmp_path / "d", tmp_path / "e", max_bad_fraction=0.5)
    (batch,) = found.epoch()
    np.testing.assert_array_equal(numbers_of(batch)[:4], [0, 1, 3, 4])
    np.testing.assert_array_equal(stored(batch)[:4, 0], [0, 1, 3, 4])
    assert set(found.faults.causes) == {"no .jpg/jpeg/png/webp"}


def test_training_takes_one_of_the_crops_by_the_position_in_the_stream(shards, tmp_path):
    write(tmp_path / "e", shards, recipe(num_crops=4, inputs=describe(CROPPED, IMAGE_SIZE, random=True)))
    changes = {"crop": CROPPED.crop, "augmentations": CROPPED.augmentations}
    places = ((10, 0), (10, 0), (1, 72))
    batches = (take(loader(shards, tmp_path / "e", **changes), count, place) for count, place in places)
    first, again, from_the_middle = map(joined, batches)
    np.testing.assert_array_equal(stored(first), stored(again))
    np.testing.assert_array_equal(stored(first)[:, 0], numbers_of(first))
    assert set(stored(first)[:, 1].tolist()) == {0, 1, 2, 3}
    np.testing.assert_array_equal(stored(from_the_middle), stored(first)[72:])


def test_shards_and_embeddings_may_move(make_shards, tmp_path):
    folder = make_shards(tmp_path / "here" / "d")
    write(tmp_path / "here" / "e", folder)
    there = (tmp_path / "here").rename(tmp_path / "there")
    assert loader(there / "d", there / "e").num_samples == NUM_SAMPLES


def test_mixtures_read_the_embeddings_of_all_their_shards(make_shards, tmp_path):
    one, other = (make_shards(tmp_path / name / "train") for name in ("one", "other"))
    write(tmp_path / "e", one)
    mixed = loader(one, tmp_path / "e", mixture=(WeightedShards((str(other),)),))
    batch = next(mixed.batches())
    np.testing.assert_array_equal(stored(batch)[:, 0], numbers_of(batch))


def test_files_open_with_the_safetensors_library(plain):
    with safetensors.safe_open(min(plain.glob("*.safetensors")), "numpy") as file:
        embeddings, keys = file.get_tensor("embeddings"), file.get_tensor("keys")
    assert embeddings.shape == (10, 1, SIZE)
    assert [bytes(key).rstrip(b"\0").decode() for key in keys] == [f"s{i}" for i in embeddings[:, 0, 0].astype(int)]


def test_embeddings_lie_in_stores_too(shards):
    folder = write("memory://embeddings/of-a-test", shards)
    assert sum(batch.valid.sum() for batch in loader(shards, folder).epoch()) == NUM_SAMPLES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preprocessing": Preprocessing(filter="fast")}, r"preprocessing.filter = area, this run has fast"),
        ({"image_size": 16}, "image_size = 8, this run has 16"),
        ({"augmentations": (HorizontalFlip(),)}, r"augmentations = \[\], this run has \[\{'type': 'HorizontalFlip'"),
        ({"crop": InceptionCrop()}, "augmentations"),
    ],
)
def test_embeddings_of_other_images_are_refused(shards, plain, changes, message):
    assert_refused(message, loader, shards, plain, **changes)


def test_a_shard_that_was_written_again_has_no_embeddings(make_shards, tmp_path):
    folder = make_shards(tmp_path / "d")
    write(tmp_path / "e", folder)
    for shard in folder.glob("*.tar*"):
        shard.unlink()
    make_shards(folder, s12={"txt": "another caption"})
    message = r"shard-000001.tar: has no embeddings in .*, or changed after they were computed; run"
    assert_refused(message, loader, folder, tmp_path / "e")


def test_images_of_equal_size_and_name_are_distinguished_by_their_content(make_shards, tmp_path):
    first, second = make_shards(tmp_path / "a"), make_shards(tmp_path / "b")
    shard = second / "shard-000001.tar"
    content = bytearray(shard.read_bytes())
    place = content.index(b"\xff\xda") + 30  # among the entropy coded data of the shard's first image
    content[place] ^= 0x10
    shard.write_bytes(content)
    write(tmp_path / "e", first)
    assert_refused(r"b/shard-000001.tar: has no embeddings", loader, second, tmp_path / "e")
    assert loader(first, None, embeddings=None).digest != loader(second, None, embeddings=None).digest


def test_a_row_with_any_number_missing_is_invalid(shards, tmp_path):
    output = EmbeddingFolder(str(tmp_path / "e"), RECIPE)
    for address in expand(shards):
        table = index_shard(address)
        rows = np.ones((len(table.keys), 1, SIZE), np.float32)
        rows[0, 0, 1] = np.nan
        output.write(table, rows)
    assert sum(batch.valid.sum() for batch in loader(shards, tmp_path / "e", max_bad_fraction=1.0).epoch()) == 20


def test_a_folder_or_a_file_of_another_recipe_is_refused(shards, plain, tmp_path):
    message = "made for another model or another --task.head; choose another folder for"
    assert_refused(message, EmbeddingFolder, str(plain), recipe(tower="u"))
    message = "made with dtype = float32, not float16; choose another folder for them"
    assert_refused(message, EmbeddingFolder, str(plain), recipe(dtype="float16"))
    for path in write(tmp_path / "other", shards, recipe(tower="u")).glob("*.safetensors"):
        path.replace(plain / path.name)
    assert_refused(r"was made with another recipe than embeddings.json", loader, shards, plain)


ARRAY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
HEADERS = [
    "no JSON whatever",
    {},
    [],
    {"embeddings": {**ARRAY, "data_offsets": [0, 4, 8]}},
    {"embeddings": {**ARRAY, "dtype": ["F32"]}},
    {"embeddings": {**ARRAY, "shape": [10**9] * 10_000}},
    {"embeddings": ARRAY, "__metadata__": [1]},
    {"embeddings": ARRAY, "__metadata__": "x"},
    {"embeddings": 3},
    "[" * 10_000,
    " " * 2**21,
]


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, *map(safetensors_of, HEADERS)])
def test_a_damaged_or_truncated_file_is_a_one_line_error_with_its_path(shards, plain, content):
    first, *_, last = sorted(plain.glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1])
    assert_refused(rf"{last.name}: cannot be read .*; remove it and embed its shard again", loader, shards, plain)
    first.write_bytes(content)
    assert_refused(first.name, loader, shards, plain)


def test_a_recipe_says_whether_it_is_of_tokens_or_logits(tmp_path):
    pooled, tokens = recipe(), recipe(num_tokens=3)
    assert not {"num_tokens", "logits"} & json.loads(pooled.to_json()).keys(), "as in earlier versions"
    for how in (pooled, tokens, recipe(logits=True)):
        assert Recipe.from_json(how.to_json().encode()) == how
    EmbeddingFolder(str(tmp_path / "e"), tokens)
    assert_refused("holds tokens, not pooled embeddings", EmbeddingFolder, str(tmp_path / "e"), pooled)


INVALID = {"tower": [3], "images": [[]], "size": [2**40, "3", 0], "num_crops": [2**40, -1, True], "seed": [None]}
INVALID |= {
    "dtype": ["float8", [1]],
    "num_tokens": [-1, 2, None],
    "logits": [1, "yes", None],
    "version": [1],
    "more": [1],
}
WRONG = [json.dumps(json.loads(RECIPE.to_json()) | {name: value}) for name in INVALID for value in INVALID[name]]


@pytest.mark.parametrize("content", [*WRONG, "", "[" * 100_000, "3", '{"tower": "t"}', '{"size": ' + "9" * 5000 + "}"])
def test_an_invalid_or_damaged_recipe_is_a_one_line_error(shards, plain, content):
    (plain / "embeddings.json").write_text(content)
    assert_refused(r"embeddings.json cannot be read .*; lit-het embed writes it", loader, shards, plain)


def test_values_that_overflow_the_dtype_are_refused(shards, tmp_path):
    output, table = EmbeddingFolder(str(tmp_path / "e"), recipe(dtype="float16")), index_shard(expand(shards)[0])
    large = np.full((10, 1, SIZE), 1e6, np.float32)
    assert_refused("overflows float16; use --dtype bfloat16", output.write, table, large)


def test_embeddings_of_a_teacher_are_read_beside_images_and_captions_of_the_same_samples(make_shards, tmp_path):
    """Its images were preprocessed in another way, and its texts are those of the caption that is drawn."""
    folder = make_shards(tmp_path / "d", s3={"txt": b"word3\nword103"}, s5={"txt": b"word5\nword105"})
    images = recipe(num_crops=3, inputs=describe(CROPPED, 2 * IMAGE_SIZE, random=True))
    write(tmp_path / "images", folder, images, broken=(7,))
    texts = recipe(inputs=describe_captions(TextPlace("txt")), size=1)
    output = EmbeddingFolder(str(tmp_path / "texts"), texts)
    for address in expand(folder):
        table = index_shard(address)
        numbers = np.array([int(key[1:]) for key in table.keys.tolist()], np.float32)
        output.write(table, np.stack([numbers, 100 + numbers], axis=1)[:, :, None], "txt")
    teacher = {"teacher_embeddings": str(tmp_path / "images"), "teacher_text_embeddings": str(tmp_path / "texts")}
    found = loader(folder, None, embeddings=None, max_bad_fraction=0.5, **teacher)
    seen = set()
    for batch in take(found, 12):
        numbers = numbers_of(batch)
        assert batch.image is not None
        assert batch.image_embedding is None
        assert batch.teacher_image is not None
        assert batch.teacher_text is not None
        np.testing.assert_array_equal(batch.teacher_text[batch.valid, 0], numbers[batch.valid])
        np.testing.assert_array_equal(batch.teacher_image[batch.valid, 0], numbers[batch.valid] % 100)
        seen |= set(numbers.tolist()) | {("crop", crop) for crop in batch.teacher_image[:, 1].tolist()}
    assert {3, 103, 5, 105, ("crop", 0), ("crop", 1), ("crop", 2)} <= seen
    assert found.faults.causes.keys() == {"no embedding"}
    # As many crops of the model itself: each has the same number.
    own = {"crop": CROPPED.crop, "augmentations": CROPPED.augmentations, "max_bad_fraction": 0.5}
    of_model = recipe(num_crops=3, inputs=describe(CROPPED, IMAGE_SIZE, random=True))
    (batch,) = take(loader(folder, write(tmp_path / "own", folder, of_model), **own, **teacher), 1)
    assert batch.teacher_image is not None
    np.testing.assert_array_equal(batch.teacher_image[batch.valid], stored(batch)[batch.valid])
