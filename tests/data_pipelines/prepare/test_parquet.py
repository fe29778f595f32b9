import builtins
import json

import numpy as np
import pytest

from lit_het.data_pipelines.prepare.parquet import Columns, read_parquet
from lit_het.errors import UserError
from tests.data_pipelines.prepare.conftest import labelled, labels_of, make_image, write
from tests.refusals import assert_refused

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
FEATURES = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["tench", "kit fox"]}}


@pytest.fixture
def save(tmp_path):
    def save(count: int = 7, name: str = "x.parquet", features=FEATURES, **changed):
        """A table in Hugging Face's form, in row groups of 3; colours and captions tell the row."""
        columns = {
            "image": [{"bytes": make_image(row), "path": f"{row}.jpg"} for row in range(count)],
            "label": [row % 2 for row in range(count)],
            "text": [f"caption {row}" for row in range(count)],
            **changed,
        }
        table = arrow.table({name: column for name, column in columns.items() if column is not None})
        if features is not None:
            table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, path, row_group_size=3)
        return path

    return save


@pytest.mark.parametrize("samples_per_shard", [2, 4, 100])
def test_class_labels_and_their_names_come_from_the_schema(tmp_path, save, samples_per_shard):
    dataset = read_parquet(save())
    assert dataset.class_names == ("tench", "kit fox")
    samples = write(dataset, tmp_path, "train", samples_per_shard=samples_per_shard, workers=2)
    assert labelled(samples) == [(row % 2, make_image(row)) for row in range(7)]
    assert all(sorted(sample.members) == ["cls", "jpg"] for sample in samples)


def test_captions_are_taken_from_the_column_that_is_named_and_bytes_need_no_structure(tmp_path, save):
    path = save(image=[make_image(row) for row in range(7)], features=None)
    dataset = read_parquet(path, "val", Columns(caption="text"))
    assert dataset.class_names is None
    found = [sample.members for sample in write(dataset, tmp_path, "val", samples_per_shard=3)]
    assert found == [{"jpg": make_image(row), "txt": b"caption %d" % row} for row in range(7)]


def test_each_of_several_captions_is_a_line(tmp_path, save):
    captions = [["first", "in two\nlines"], ["only", " "], [], None, [None, "late"], ["e"], ["f"]]
    samples = write(read_parquet(save(text=captions), columns=Columns(caption="text")), tmp_path, "train")
    assert [sample.members["txt"] for sample in samples] == [b"first\nin two lines", b"only", b"late", b"e", b"f"]


def test_one_text_with_line_breaks_is_one_caption(tmp_path, save):
    captions = ["A lamp with\na shade.\r\n\n It stands.\n", "\ufeffmarked", *"cdefg"]
    samples = write(read_parquet(save(text=captions), columns=Columns(caption="text")), tmp_path, "train")
    assert [sample.members["txt"] for sample in samples[:2]] == [b"A lamp with a shade. It stands.", b"marked"]


@pytest.mark.parametrize(
    "captions",
    [
        arrow.array(["a", "b", None]).dictionary_encode(),
        arrow.array(["a", "b", None], arrow.string_view()),
        arrow.array([b"a", b"b", None], arrow.binary_view()),
        arrow.array([["a"], ["b"], None], arrow.large_list(arrow.large_string())),
        arrow.array([["a"], ["b"], None], arrow.list_(arrow.string_view(), 1)),
        arrow.ListArray.from_arrays([0, 1, 2, 2], arrow.array(["a", "b"]).dictionary_encode()),
    ],
    ids=lambda column: str(column.type),
)
def test_captions_may_have_any_type_of_text(tmp_path, save, captions):
    dataset = read_parquet(save(3, text=captions), columns=Columns("image", caption="text"))
    samples = write(dataset, tmp_path, "train")
    assert [sample.members["txt"] for sample in samples] == [b"a", b"b"]


@pytest.mark.parametrize("kind", [arrow.string_view(), arrow.dictionary(arrow.int32(), arrow.string())], ids=str)
def test_images_and_labels_may_be_views_and_categories(tmp_path, save, kind):
    image = arrow.array([make_image(row) for row in range(3)], arrow.binary_view())
    path = save(3, image=image, label=arrow.array(["b", "a", "b"], kind), features=None)
    dataset = read_parquet(path, columns=Columns(label="label"))
    assert dataset.class_names == ("a", "b")
    assert labelled(write(dataset, tmp_path, "train")) == [
        (label, make_image(row)) for row, label in enumerate((1, 0, 1))
    ]


@pytest.mark.parametrize("is_list", [False, True])
def test_captions_that_training_would_refuse_are_left_out(tmp_path, save, is_list):
    captions = arrow.array([b"a", None, b"", b" \n", b"caf\xe9", "café".encode(), b"g"])
    not_all_utf8 = captions.cast(arrow.string(), safe=False)
    if is_list:
        not_all_utf8 = arrow.ListArray.from_arrays(list(range(8)), not_all_utf8)
    samples = write(read_parquet(save(text=not_all_utf8), columns=Columns(caption="text")), tmp_path, "train")
    assert [sample.members["txt"].decode() for sample in samples] == ["a", "café", "g"]


def test_captions_may_be_bytes_and_stand_beside_labels(tmp_path, save):
    path = save(text=arrow.array([b"caption"] * 7, arrow.large_binary()))
    samples = write(read_parquet(path, columns=Columns("image", caption="text")), tmp_path, "train")
    assert {sample.members["txt"] for sample in samples} == {b"caption"}
    samples = write(read_parquet(save(), columns=Columns(label="label", caption="text")), tmp_path / "both", "train")
    assert [(sample.label, sample.members["txt"]) for sample in samples[:2]] == [(0, b"caption 0"), (1, b"caption 1")]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"text": None}, r"train-00001-of-00002\.parquet: has no column 'text', only image, label"),
        ({"text": [1] * 7}, r"train-00001.*column 'text' holds int64, neither text nor lists of it; .* --caption"),
        ({"image": ["a.jpg"] * 7}, r"train-00001.*column 'image' holds no bytes of images"),
    ],
)
def test_a_later_file_of_a_split_that_differs_is_named(save, changed, message):
    save(7, "train-00000-of-00002.parquet")
    source = save(7, "train-00001-of-00002.parquet", **changed).parent
    assert_refused(message, read_parquet, source, columns=Columns(caption="text"))


def test_labels_that_are_text_become_classes_in_the_order_of_their_names(save):
    path = save(label=["b", "c", "a", "b", "b", "a", "c"], features=None)
    dataset = read_parquet(path, columns=Columns(label="label"))
    assert (dataset.class_names, labels_of(dataset, "train")) == (("a", "b", "c"), [1, 2, 0, 1, 1, 0, 2])


@pytest.mark.parametrize("labels", [["Cat", "cat "], ["k\u00e4se", "ka\u0308se"], ["red_cat", "red cat"]])
def test_names_of_one_class_are_refused(save, labels):
    path = save(2, label=labels, features=None)
    assert_refused("are of one class, as they differ only", read_parquet, path, columns=Columns(label="label"))


def with_names(*names: str):
    return {"label": {"_type": "ClassLabel", "names": list(names)}}


def test_files_whose_numbers_are_of_other_classes_are_refused(save):
    save(name="test.parquet", features=with_names("kit fox", "tench"))
    source = save(name="train.parquet").parent
    differ = r"train\.parquet: the class names of 'label', or their order, differ from those in .*test\.parquet"
    assert_refused(differ, read_parquet, source)
    assert read_parquet(source, "test").class_names == ("kit fox", "tench")
    save(name="test.parquet", features=None)
    assert_refused(
        r"test\.parquet: 0 .* this file names no numbers", read_parquet, source, columns=Columns(label="label")
    )


def test_names_and_numbers_of_classes_may_stand_in_different_files(save, capsys):
    source = save(2, "train.parquet").parent
    save(3, "test.parquet", label=["kit fox", "tench", "kit fox"], features=None)
    dataset = read_parquet(source, columns=Columns(label="label"))
    assert (labels_of(dataset, "train"), labels_of(dataset, "test")) == ([0, 1], [1, 0, 1])
    assert "test: 2 classes, with images: tench (1), kit fox (2)" in capsys.readouterr().err


def test_splits_come_from_file_names_and_may_have_several_files(tmp_path, save):
    for name, count in (("train-00000-of-00002.parquet", 4), ("train-00001-of-00002-ab12.parquet", 5)):
        source = save(count, name).parent
    save(3, "test-00000-of-00001.parquet")
    dataset = read_parquet(source)
    assert {name: split.num_samples for name, split in dataset.splits.items()} == {"test": 3, "train": 9}
    samples = write(dataset, tmp_path, "train", samples_per_shard=6)
    assert [sample.image for sample in samples] == [make_image(row) for row in (*range(4), *range(5))]
    assert list(read_parquet(source, "test").splits) == ["test"]
    assert_refused("has no split 'val', only test, train", read_parquet, source, "val")


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (("train/0000.parquet", "test/0000.parquet", "test/0001.parquet"), {"train": 3, "test": 6}),
        (("default/train/0000.parquet", "default/partial-test/0000.parquet"), {"train": 3, "test": 3}),
        (("data/train-00000-of-00001.parquet", "data/test-00000-of-00001-ab12.parquet"), {"train": 3, "test": 3}),
        (("train.parquet", "Validation.parquet"), {"train": 3, "validation": 3}),
        (("my-train_2.parquet", "my-train_1.parquet", "my-dev.parquet"), {"train": 6, "dev": 3}),
        (("train/00/a.parquet", "train/01/b.parquet"), {"train": 6}),
        (("2020/a.parquet", "2021/b.parquet"), {"train": 6}),
        (("split=train/0.parquet", "split=test/0.parquet"), {"train": 3, "test": 3}),
        (("train.parquet", "TEST.PARQUET"), {"train": 3, "test": 3}),
        (("train.parquet", ".ipynb_checkpoints/train-checkpoint.parquet", "__MACOSX/train.parquet"), {"train": 3}),
        (("test.parquet",), {"test": 3}),
        (("split_b-00000-of-00001.parquet", "train.parquet"), {"split_b": 3, "train": 3}),
        (("Train-00000-of-00001.parquet", "TEST-00000-of-00001.parquet"), {"train": 3, "test": 3}),
        (("train/part-00000-of-00002.parquet", "train/part-00001-of-00002.parquet"), {"train": 6}),
        (("test/cats-00000-of-00001.parquet", "test/dogs-00000-of-00002.parquet"), {"test": 6}),
        (("data-00000-of-00002.parquet", "data-00001-of-00002.parquet"), {"train": 6}),
    ],
)
def test_splits_are_named_as_on_the_hub(tmp_path, save, names, splits):
    for name in names:
        save(3, name)
    found = read_parquet(tmp_path / "source").splits
    assert {name: split.num_samples for name, split in found.items()} == splits


ANOTHER = r"is of another revision of the split train than .*\.parquet, or a copy; keep one of them"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("train.parquet", "more.parquet"), r"more\.parquet: names no split, other files do"),
        (("train/0.parquet", "validation_matched/0.parquet"), r"validation_matched/0\.parquet: names no split"),
        (("train/0.parquet", "train-test.parquet"), r"train-test\.parquet: names no split"),
        (("trainset.parquet", "testset.parquet"), r"testset\.parquet: may be of a split"),
        (
            ("en/train-00000-of-00001.parquet", "fr/train/0.parquet"),
            "the split train in en/ and in fr/train/; give one",
        ),
        (("train/0.parquet", "partial-train/0.parquet"), "the split train in partial-train/ and in train/"),
        (("train-00000-of-00001-aa.parquet", "train-00001-of-00002-bb.parquet"), ANOTHER),
        (("train-00000-of-00002-aa.parquet", "train-00000-of-00002-bb.parquet"), ANOTHER),
        (("train-00000-of-00001.parquet", "train-00000-of-00001 (1).parquet"), ANOTHER),
        (("part-00000-of-00001.parquet", "part-00000-of-00002.parquet"), ANOTHER),
        (("train.parquet", "train(1).parquet"), ANOTHER),
        (("train.parquet", "train-00000-of-00001.parquet"), ANOTHER),
    ],
)
def test_files_whose_split_is_not_clear_are_refused(tmp_path, save, names, message):
    for name in names:
        save(3, name)
    assert_refused(message, read_parquet, tmp_path / "source")


def test_missing_files_of_a_split_are_counted(save, capsys):
    source = save(3, "train-00000-of-00003.parquet").parent
    save(3, "train-00002-of-00003.parquet")
    assert read_parquet(source).splits["train"].num_samples == 6
    assert "holds 2 of 3 files of the split train; the others are missing" in capsys.readouterr().err


def test_a_single_file_and_a_folder_of_one_split_have_its_name(save):
    path = save(3, "test/0000.parquet")
    assert list(read_parquet(path.parent).splits) == ["test"]
    assert list(read_parquet(path.rename(path.with_name("val.parquet"))).splits) == ["val"]


def test_a_row_without_bytes_is_named(tmp_path, save):
    images = [{"bytes": None if row == 4 else make_image(row), "path": "somewhere"} for row in range(7)]
    assert_refused(
        r"x\.parquet: row 4: not an image \(0 bytes", write, read_parquet(save(image=images)), tmp_path, "train"
    )


NEITHER = "'label' is neither text nor a ClassLabel"


@pytest.mark.parametrize(
    ("changed", "columns", "message"),
    [
        ({}, Columns(image="photo"), "has no column 'photo', only image, label, text"),
        ({}, Columns(image="text"), "column 'text' holds no bytes of images"),
        ({}, Columns(caption="label"), "column 'label' holds int64, neither text nor lists of it"),
        ({"text": [[[1]]] * 7}, Columns(caption="text"), "column 'text' holds list<.*, neither text nor lists of it"),
        ({"image": None}, Columns(), r"0 columns hold images \(label, text\); name one with --image"),
        ({"mask": [b""] * 7}, Columns(), r"2 columns hold images \(image, label, text, mask\)"),
        (
            {"features": None},
            Columns(),
            r"0 columns hold classes .* name one with --label \(or captions with --caption\)",
        ),
        ({"features": None}, Columns(label="label"), NEITHER),
        ({"label": [[0]] * 7}, Columns(), r"\[0\] in column 'label' is none of 2 classes"),
        ({"label": [{"a": 0}] * 7, "features": None}, Columns(label="label"), NEITHER),
        ({"image": [{"bytes": "text"}] * 7}, Columns(image="image"), "column 'image' holds no bytes of images"),
        ({"features": []}, Columns(), "0 columns hold classes"),
        ({"features": {"label": 3}}, Columns(), "0 columns hold classes"),
        ({"features": {"label": {"_type": ["ClassLabel"]}}}, Columns(), "0 columns hold classes"),
        ({"features": {"elsewhere": FEATURES["label"]}}, Columns(), "0 columns hold classes"),
        ({"features": {"label": {**FEATURES["label"], "names": [[1], {}]}}}, Columns(), NEITHER),
        ({"label": [0, 1, 2, 0, 0, 0, 0]}, Columns(), "2 in column 'label' is none of 2 classes"),
        ({"label": [0, -1, None, 0, 0, 0, 0]}, Columns(), "-1 in column 'label' is none of 2 classes"),
    ],
)
def test_ambiguous_columns_are_refused(save, changed, columns, message):
    assert_refused(message, read_parquet, save(**changed), columns=columns)


@pytest.mark.parametrize("keep", [0, 100, -50])
def test_a_truncated_file_is_a_one_line_error(save, keep):
    path = save()
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused(r"x\.parquet: is not a parquet file, or truncated .*download it again", read_parquet, path)


def test_a_missing_file_is_a_one_line_error(tmp_path):
    assert_refused(r"holds no \*\.parquet files", read_parquet, tmp_path)
    assert_refused(r"none\.parquet: is not a parquet file", read_parquet, tmp_path / "none.parquet")


def test_without_pyarrow_the_error_names_the_extra(save, monkeypatch):
    path, imported = save(), builtins.__import__

    def without(name, *rest):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert_refused(r"parquet needs pyarrow; install it with pip install 'lit-het\[parquet\]'", read_parquet, path)


NOT_JSON = r"x\.parquet: is not a parquet file, or truncated \(.*JSON"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        *((content, "0 columns hold classes") for content in (b"[1]", b"3", b'{"info": 3}', b'{"info": []}')),
        *((content, NOT_JSON) for content in (b"{", b"[" * 100_000, b"\xff")),
    ],
    ids=str,
)
def test_metadata_of_another_form_have_no_class_names(save, metadata, message):
    path = save()
    parquet.write_table(parquet.read_table(path).replace_schema_metadata({"huggingface": metadata}), path)
    assert_refused(message, read_parquet, path)


def test_two_columns_with_the_same_name_are_a_one_line_error(save):
    path = save()
    columns = [arrow.array([make_image(0)]), arrow.array([make_image(1)])]
    parquet.write_table(arrow.Table.from_arrays(columns, names=["image", "image"]), path)
    assert_refused("two of the columns image, image have one name", read_parquet, path)


def test_damage_anywhere_in_a_file_is_a_one_line_error_or_harmless(save):
    path = save()
    content, random = path.read_bytes(), np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(content)
        for place in random.integers(0, len(content), 4).tolist():
            damaged[place] = random.integers(256)
        path.write_bytes(damaged)
        problem = ""
        try:
            split = read_parquet(path).splits["train"]
            assert len(list(split.read(range(split.num_samples)))) <= split.num_samples
        except UserError as error:
            problem = str(error)
        assert "\n" not in problem
