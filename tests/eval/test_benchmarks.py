"""Suites of benchmarks: their sets, where these are found, their means, and the figures that others printed."""

import csv
from pathlib import Path

import pytest

from lit_het.cli import benchmark
from lit_het.errors import UserError
from lit_het.eval.sets import ImageSet, published
from lit_het.eval.sets.benchmarks import (
    SUITES,
    VTAB_1K,
    Group,
    Suite,
    check_complete,
    find_sets,
    group_means,
    set_name,
)
from lit_het.eval.sets.published import read_published
from lit_het.eval.suite import ClassNamesConfig, FewShotConfig, RetrievalConfig, ShiftConfig, ZeroShotConfig
from tests.refusals import assert_refused


def write(directory: Path, shards: int = 1, names: bool = True, split: str = "test") -> Path:
    """Writes the files of a set that its finding looks at."""
    (directory / split).mkdir(parents=True)
    for number in range(shards):
        (directory / split / f"{number}.tar").touch()
    if names:
        (directory / "classnames.txt").write_text("a\nb\n")
    return directory


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("/data/wds/wds_cifar10", "cifar10"),
        ("/data/wds_vtab-cifar100/", "cifar100"),
        ("/data/wds/vtab/cifar100", "cifar100"),
        ("/data/wds_imagenet_sketch", "imagenet_sketch"),
        ("/data/wds_imagenet-a", "imagenet_a"),
        ("gs://bucket/wds_vtab-clevr_count_all", "clevr_count_all"),
        ("/hub/datasets--clip-benchmark--wds_vtab-caltech101/snapshots/5f1c2d", "caltech101"),
        ("/data/imagenet", "imagenet1k"),
        ("/data/imagenet-v2", "imagenetv2"),
        ("/data/uc_merced", "uc_merced"),
    ],
)
def test_sets_are_known_by_the_names_of_their_folders(folder: str, name: str):
    assert set_name(folder) == name


def test_sets_are_found_in_every_layout_and_in_the_order_of_the_suite(tmp_path: Path):
    write(tmp_path / "wds" / "wds_vtab-pets")
    write(tmp_path / "wds_cifar10")
    hub = write(tmp_path / "hub" / "datasets--x--wds_flickr8k" / "snapshots" / "0a1b", names=False)
    # No set of the suite; shards of a set's training split; a broken set that has its names alone.
    write(tmp_path / "food101")
    write(tmp_path / "wds_cifar10", split="train", names=False)
    (tmp_path / "dtd").mkdir()
    (tmp_path / "dtd" / "classnames.txt").write_text("a\n")
    found, others = find_sets(str(tmp_path), SUITES["clip_benchmark"])
    # The snapshot lies four folders below.
    assert list(found) == ["cifar10", "dtd", "pets"]
    assert found["pets"] == str(tmp_path / "wds" / "wds_vtab-pets")
    assert others == (str(tmp_path / "food101"),)
    found, _ = find_sets(str(tmp_path / "hub"), SUITES["clip_benchmark"])
    assert found == {"flickr8k": str(hub)}


def test_a_set_that_is_there_twice_is_refused(tmp_path: Path):
    write(tmp_path / "pets")
    write(tmp_path / "wds_vtab-pets")
    with pytest.raises(UserError, match=r"the set pets lies in .*/pets and in .*wds_vtab-pets; leave one"):
        find_sets(str(tmp_path), SUITES["vtab"])


def test_corrupted_copies_belong_to_imagenet(tmp_path: Path):
    clean = write(tmp_path / "imagenet")
    write(clean / "corrupted" / "fog", split="3")
    (clean / "corrupted" / "classnames.txt").write_text("a\nb\n")
    found, others = find_sets(str(tmp_path), SUITES["robustness"])
    assert found == {"imagenet1k": str(clean), "imagenet_c": str(clean)}
    assert others == ()
    alone = write(tmp_path / "alone" / "imagenet-c")
    assert find_sets(str(tmp_path / "alone"), SUITES["robustness"]) == ({}, (str(alone),))


def test_an_incomplete_download_is_refused(tmp_path: Path):
    data = ImageSet("pets", str(write(tmp_path / "pets", shards=2)))
    check_complete(data)
    (tmp_path / "pets" / "test" / "nshards.txt").write_text("2\n")
    check_complete(data)
    (tmp_path / "pets" / "test" / "nshards.txt").write_text("3\n")
    assert_refused(r"nshards\.txt says '3' shards, and there are 2; download the set again", check_complete, data)


def test_suites_have_the_sets_of_their_sources():
    vtab = SUITES["vtab"]
    assert [len(group.sets) for group in vtab.groups] == [7, 4, 8]
    everything = SUITES["clip_benchmark"]
    assert len(everything.groups_with_all[-1].sets) == 35
    assert len(everything.sets) == 35 + 1 + 3
    assert set(vtab.sets) < set(everything.sets)
    assert [group.figure for group in SUITES["fewshot"].groups] == ["1_shot", "5_shot", "10_shot", "25_shot"]
    assert len(SUITES["fewshot"].sets) == 9
    assert tuple(SUITES) == benchmark.SUITES
    for suite in SUITES.values():
        for group in suite.groups:
            assert len(set(group.sets)) == len(group.sets)


@pytest.mark.parametrize(
    ("suite", "name", "kind"),
    [
        ("clip_benchmark", "cifar10", ZeroShotConfig),
        ("clip_benchmark", "voc2007_multilabel", ZeroShotConfig),
        ("clip_benchmark", "flickr30k", RetrievalConfig),
        ("robustness", "imagenet_c", ShiftConfig),
        ("robustness", "imagenet1k", ZeroShotConfig),
        ("fewshot", "birds", FewShotConfig),
    ],
)
def test_the_figure_of_a_set_tells_its_evaluation(suite: str, name: str, kind: type):
    found = SUITES[suite].evaluation(name, "/data/x", ClassNamesConfig("clip80"), 4)
    assert type(found) is kind
    assert (found.data.name, found.data.directory) == (name, "/data/x")
    assert found.data.multi_label == (name == "voc2007_multilabel")
    if isinstance(found, ZeroShotConfig | ShiftConfig):
        # Those of several labels are evaluated without noise.
        assert (found.names.prompts, found.samples) == ("clip80", 0 if found.data.multi_label else 4)


def test_means_are_over_the_sets_that_are_known():
    group = Group("natural", "top1", ("cifar10", "pets", "dtd"))
    assert group_means(group, {"cifar10": 0.5, "pets": 0.2}) == {"mean": 0.35}
    assert group_means(group, {}) == {}
    assert group_means(Group("ImageNet", "top1", ("imagenet1k",)), {"imagenet1k": 0.5}) == {}
    shots = Group("1-shot", "1_shot", ("imagenet1k", "pets", "dtd"))
    means = group_means(shots, {"imagenet1k": 0.9, "pets": 0.4, "dtd": 0.2})
    assert means == {"mean": pytest.approx(0.5), "mean without imagenet1k": pytest.approx(0.3)}
    assert group_means(shots, {"imagenet1k": 0.9}) == {"mean": 0.9}


ALL = (*SUITES.values(), VTAB_1K)


def every(suite: Suite):
    return read_published(suite.published)


def test_published_figures_have_sources_and_belong_to_lines_of_a_suite():
    rows = {row for suite in ALL for row in every(suite)}
    titles = {"mean", "mean without imagenet1k"}
    lines = {(name, group.figure) for suite in ALL for group in suite.groups for name in group.sets}
    for row in rows:
        assert 0 < row.value < 1
        assert row.source
        assert row.protocol
        assert (row.set, row.figure) in lines or row.set in titles
    assert len({(row.model, row.set, row.figure) for row in rows}) == len(rows)
    for suite in ALL:
        assert {row.model for row in every(suite)} == set(suite.published)
    with Path(published.__file__).with_suffix(".csv").open(newline="") as file:
        models = {row["model"] for row in csv.DictReader(file)}
    assert models == {model for suite in ALL for model in suite.published}


def test_published_figures_are_those_that_were_printed():
    by_place = {(row.model, row.set, row.figure): row.value for suite in ALL for row in every(suite)}
    # HET-XL Table 6, SoViT Tables 2 and 3; e3 Tables 25 and 35, whose errors are 11.63 % and 14.29 %.
    assert by_place["LiT G/14 HET-XL", "imagenet1k", "top1"] == 0.8556
    assert by_place["SoViT-400m/14 probe", "objectnet", "top1"] == 0.687
    assert by_place["SoViT-400m/14", "uc_merced", "10_shot"] == 0.977
    assert by_place["e3 H/14", "imagenet1k", "top1"] == pytest.approx(1 - 0.1163)
    assert by_place["e3 H/14", "mean without imagenet1k", "10_shot"] == pytest.approx(1 - 0.1429)
    # SoViT prints no mean: of its nine sets it is 88.2 %.
    sovit = {row.set: row.value for row in every(SUITES["fewshot"]) if row.model == "SoViT-400m/14"}
    assert group_means(SUITES["fewshot"].groups[2], sovit)["mean"] == pytest.approx(0.8820, abs=5e-5)
    # Dosovitskiy et al. 2021 Table 9, and the means of all tasks as Table 2 prints them.
    assert by_place["ViT-H/14 JFT", "smallnorb_label_azimuth", "top1"] == 0.332
    for model, mean in (("ViT-H/14 JFT", 0.7763), ("ViT-L/16 JFT", 0.7628), ("ViT-L/16 I21k", 0.7272)):
        of_model = {row.set: row.value for row in every(VTAB_1K) if row.model == model}
        assert group_means(VTAB_1K.groups_with_all[-1], of_model)["mean"] == pytest.approx(mean, abs=1.5e-4)
