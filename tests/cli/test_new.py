"""`lit-het new`: from a tower and shards to a trained, calibrated model that classifies."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lit_het import parameters
from lit_het.configs import fine_tune_pair
from lit_het.configs.experiment import load_module_config
from lit_het.data_pipelines.images.decoding import encode_jpeg
from lit_het.data_pipelines.labels import CaptionWords, ClassIndex
from lit_het.data_pipelines.shards.portions import ALL, Portion
from lit_het.data_pipelines.shards.writing import expand, write_shards
from lit_het.losses.classification import SigmoidCrossEntropy, SoftmaxCrossEntropy
from lit_het.losses.contrastive import SoftmaxLoss
from lit_het.models.calibration.saved import read_calibration
from lit_het.models.opening import open_run
from lit_het.objectives.teacher import TeacherConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.resnet import ResNetConfig
from lit_het.towers.tuning_config import LoRA, Tuning
from lit_het.towers.vit import ViTConfig
from lit_het.training import directory
from lit_het.training.directory import checkpoint_dir, load_config
from lit_het.training.log import read_metrics
from tests import tiny
from tests.cli.conftest import changed, last_line, printed, refusal, run_command


@pytest.mark.slow
def test_a_new_project_is_trained_calibrated_and_classifies(capsys, upstream, tmp_path):
    project, pairs = tmp_path / "mine", tiny.write_data(tmp_path / "pairs", num_samples=1000) / "train"
    foreign = tmp_path / "mine.partial"  # by the name of no folder of ours
    foreign.mkdir()
    run_command("new", project, "--tower", upstream, "--data", pairs)
    assert f"lit-het train --config {project}/config.py" in capsys.readouterr().err
    assert sorted(path.name for path in project.parent.glob("*.partial*")) == [foreign.name]
    assert sorted(path.name for path in project.glob("*.*")) == ["config.py", "tokenizer.model"]
    text = (project / "config.py").read_text()
    assert max(map(len, text.splitlines())) <= 120
    assert 35 <= len(text.partition("def get_config")[2].splitlines()) <= 45
    config = load_module_config(project / "config.py")
    assert config.task.loss == SoftmaxLoss(label_smoothing=0.1)
    assert str(config.calibration) == "87%:100% by sample" == str(config.evaluations[0].data.portion)

    flags = ("--length", "3 steps", "--data.batch-size", "16", "--cadence.log-steps", "1")
    tower = {"depth": 1, "width": 64, "mlp-width": 64, "compute-type": "float32"}
    small = [part for name, value in tower.items() for part in (f"--task.text-tower.encoder.{name}", value)]
    run_command("train", "--config", project / "config.py", *flags, *small)
    names = {name for record in read_metrics(project / "run" / "metrics.jsonl") for name in record}
    assert "retrieval/held_out/image_to_text_recall1" in names
    assert read_calibration(project / "run", 3) is not None

    Image.fromarray(np.zeros((40, 30, 3), np.uint8)).save(tmp_path / "black.png")
    command = ("classify", tmp_path / "black.png", "--checkpoint", project / "run", "--labels", "red bar,blue square")
    (found,) = printed(capsys, *command, "--json")
    assert {label["label"] for label in found["labels"]} == {"red bar", "blue square"}
    assert "already exists" in refusal(capsys, "new", project, "--tower", upstream, "--data", pairs)
    assert foreign.is_dir()


def test_weights_are_imported_and_the_tokenizer_of_their_run_is_taken(trained_lit, tmp_path, monkeypatch):
    # Everything fits: a step takes seconds to trace.
    monkeypatch.setattr("lit_het.apps.new.project.Step", lambda *_: SimpleNamespace(memory=dict))
    data = tiny.write_data(tmp_path / "few", num_samples=8)
    exported, folder = tmp_path / "lit.npz", tmp_path / "huggingface"
    run = trained_lit.run_dir
    run_command("export", "--checkpoint", run, "--to", "npz", "--output", exported)
    run_command("export", "--checkpoint", run, "--to", "huggingface", "--output", folder)
    size = ("--image-size", str(trained_lit.task.image_tower.image_size))
    towers = (
        ("weights", exported, size),
        ("image tower", f"{exported}:img", size),
        ("dual encoder with another text tower", folder, ()),
        ("run", run, ()),
    )
    for name, tower, flags in towers:
        project = tmp_path / name
        run_command("new", project, "--tower", tower, "--data", data / "train", *flags)
        config = load_module_config(project / "config.py")
        assert config.task.require_image_tower().embedding_size == trained_lit.task.image_tower.embedding_size
        assert (project / "tower").is_dir() == (name != "run")
        own = (trained_lit.run_dir if name == "run" else project) / "tokenizer.model"
        assert config.tokenizer is not None
        assert config.tokenizer.model == own
        assert config.calibration is None, "8 pairs are too few to hold some out"


def test_what_cannot_start_is_one_line_and_leaves_nothing(capsys, upstream, data, tmp_path):
    shards, project = data / "train", tmp_path / "mine"
    for arguments, expected in (
        (("--tower", tmp_path / "none", "--data", shards), "none does not exist"),
        (("--tower", upstream, "--data", tmp_path / "none"), "no tar file matches"),
        (("--tower", upstream, "--data", shards, "--captions", "json/text"), "no sample has an image and a .json"),
        (("--tower", shards, "--data", shards), "unknown format"),
    ):
        assert expected in refusal(capsys, "new", project, *arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def everything_fits(monkeypatch):
    monkeypatch.setattr("lit_het.apps.new.project.Step", lambda *_: SimpleNamespace(memory=dict))


@pytest.fixture
def captioned(tmp_path):
    """Shards of images with captions, and without labels."""
    image = encode_jpeg(np.zeros((8, 8, 3), np.uint8))
    captions = ["Red bar", "red square", f"a {tiny.COLOURS[0]} thing"]
    samples = ({"__key__": f"{i:03}", "jpg": image, "txt": captions[i % 3] + f" {i}" * (i % 3 == 2)} for i in range(36))
    write_shards(tmp_path / "captioned", samples, samples_per_shard=36)
    return tmp_path / "captioned"


def test_a_first_tower_classifies_by_labels_or_else_by_frequent_words(
    capsys, data, captioned, tmp_path, everything_fits
):
    run_command("new", tmp_path / "labels", "--classes", "--data", data / "train")
    assert "8 classes of " in capsys.readouterr().err
    config = load_module_config(tmp_path / "labels" / "config.py")
    task = config.task
    assert isinstance(task, ClassificationConfig)
    assert (task.num_classes, task.loss, config.data.labels) == (8, SoftmaxCrossEntropy(), ClassIndex())
    assert task.image_tower.image_size == config.data.image_size == 64

    run_command("new", tmp_path / "words", "--classes", "--data", captioned, "--image-size", 28)
    assert "5 words of captions, each of at least 10 captions, are the classes" in capsys.readouterr().err
    config, words = load_module_config(tmp_path / "words" / "config.py"), tmp_path / "words" / "words.txt"
    task = config.task
    assert isinstance(task, ClassificationConfig)
    assert isinstance(task.image_tower, ViTConfig)
    assert words.read_text().split()[0] == "red"
    assert (task.num_classes, task.loss) == (5, SigmoidCrossEntropy())
    assert config.data.labels == CaptionWords(words, ignore_others=True)
    assert (task.image_tower.image_size, task.image_tower.patch_size) == (28, 7)


def named_pairs(folder, captions):
    """Shards of black images with lists of captions in their JSON."""
    image = encode_jpeg(np.zeros((8, 8, 3), np.uint8))
    write_shards(folder, ({"__key__": f"{at:05d}", "jpg": image, "json": {"all": c}} for at, c in enumerate(captions)))
    return folder


NAMES = [[f"name {number}", "a story"] for number in range(2600)]


@pytest.mark.parametrize(
    ("captions", "rule"),
    [
        (NAMES, "name"),
        # Half of what is held out are all samples of some names: of so few, too few.
        ([[f"name {number % 1000}", f"story {number}"] for number in range(2600)], "sample"),
        # The name of most samples might be held out.
        ([["name 6" if number % 8 else f"name {number}"] for number in range(2600)], "sample"),
    ],
    ids=["names", "few names", "one name"],
)
def test_names_are_held_out_where_there_are_enough_of_them(
    upstream, tmp_path, monkeypatch, everything_fits, captions, rule
):
    monkeypatch.setattr("lit_het.apps.new.project._SIZES", ((None, "EncoderConfig(depth=1)", 300, 1),))
    pairs = named_pairs(tmp_path / "pairs", captions)
    run_command("new", tmp_path / "mine", "--tower", upstream, "--data", pairs, "--captions", "json/all")
    config = load_module_config(tmp_path / "mine" / "config.py")
    assert str(config.calibration) == f"87%:100% by {rule}" == str(config.evaluations[0].data.portion)
    text = (tmp_path / "mine" / "config.py").read_text()
    assert ("half of it all samples of some captions" in text) == (rule == "name")


def test_the_data_of_the_tower_in_any_spelling_is_held_out_as_it_was_and_may_be_gone(
    upstream, tmp_path, monkeypatch, everything_fits
):
    monkeypatch.setattr("lit_het.apps.new.project._SIZES", ((None, "EncoderConfig(depth=1)", 300, 1),))
    named_pairs(tmp_path / "pairs", NAMES)
    tower = load_config(upstream)
    monkeypatch.chdir(tmp_path)
    for shards, rule in ((f"{tmp_path}/../{tmp_path.name}/pairs", "sample"), ("/nowhere/else", "name")):
        source = changed(tower, data__shards=(shards,))
        monkeypatch.setattr("lit_het.apps.new.project.load_config", lambda _, source=source: source)
        run_command("new", tmp_path / rule, "--tower", upstream, "--data", "pairs", "--captions", "json/all")
        assert str(load_module_config(tmp_path / rule / "config.py").calibration) == f"87%:100% by {rule}"


class Counted:
    """An index of more samples than there are."""

    def __init__(self, shards, count):
        self.summaries, self._count = [SimpleNamespace(address=path) for path in expand(shards)], count

    def __len__(self):
        return self._count


@pytest.mark.parametrize("count", [1000, 6500])
@pytest.mark.slow
def test_a_first_tower_and_the_model_on_it_hold_out_the_same_images(
    data, tmp_path, monkeypatch, everything_fits, count
):
    monkeypatch.setattr("lit_het.apps.new.project._index", lambda shards, _: Counted(shards, count))
    run_command("new", tmp_path / "first", "--classes", "--data", data / "train")
    first = load_module_config(tmp_path / "first" / "config.py")
    fields = {"calibration": None, "evaluations": (), "data__portion": ALL, "data__batch_size": 2}
    tiny.finish_untrained(changed(first, **fields))
    run_command("new", tmp_path / "lit", "--tower", tmp_path / "first" / "run", "--data", data / "train")
    lit = load_module_config(tmp_path / "lit" / "config.py")
    assert isinstance(lit.task, ContrastiveConfig)
    assert isinstance(first.task, ClassificationConfig)
    assert isinstance(lit.calibration, Portion)
    assert lit.task.image_tower == first.task.image_tower
    assert lit.calibration == first.calibration == first.evaluations[0].data.portion
    assert not first.data.portion.overlaps(lit.calibration)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--captions", "json/caption"), "--classes reads labels .cls, or words of captions .txt"),
        ((), "fewer than two words occur in 10 captions"),
    ],
)
def test_images_without_classes_are_one_line(capsys, tmp_path, flags, expected):
    sample = {"__key__": "0", "jpg": encode_jpeg(np.zeros((8, 8, 3), np.uint8)), "txt": "a red bar"}
    write_shards(tmp_path / "few", [sample], samples_per_shard=1)
    assert expected in last_line(capsys, "new", tmp_path / "mine", "--classes", "--data", tmp_path / "few", *flags)
    assert not list(tmp_path.glob("mine*"))


@pytest.mark.parametrize("way", ["lora", "last-1", "full"])
def test_both_towers_of_a_model_are_adapted(way, trained_lit, tmp_path, monkeypatch):
    monkeypatch.setattr("lit_het.apps.new.project.Step", lambda *_: SimpleNamespace(memory=dict))
    data, project, start = tiny.write_data(tmp_path / "few", num_samples=64), tmp_path / "mine", trained_lit.run_dir
    run_command("new", project, "--tower", start, "--data", data / "train", "--adapt", way)
    text = (project / "config.py").read_text()
    assert [line for line in text.splitlines() if len(line) > 120 and "START = " not in line] == []
    assert ("tuning" in text) == (way != "full")
    config = load_module_config(project / "config.py")
    expected = {"lora": Tuning(lora=LoRA(rank=8)), "last-1": Tuning(last_blocks=1), "full": None}[way]
    assert {tower.tuning for tower in config.task.towers.values()} == {expected}
    assert (config.task.head, config.task.loss, config.task.locked) == (
        trained_lit.task.head,
        trained_lit.task.loss,
        (),
    )
    of_recipe: Any = {"last-1": "last_4"}.get(way, way)
    recipe = fine_tune_pair.get_config("siglip_b16", of_recipe)
    assert (config.schedule.learning_rate, config.optimizer) == (recipe.schedule.learning_rate, recipe.optimizer)
    flags = ("--length", "2 steps", "--data.batch-size", "16", "--cadence.log-steps", "1")
    run_command("train", "--config", project / "config.py", *flags)
    before, after = (parameters.flatten(open_run(path).params) for path in (start, project / "run"))
    assert before.keys() == after.keys()
    kernels = [path for path in before if path.endswith("text_tower/encoder/blocks/attention/query/kernel")]
    for path in kernels:
        np.testing.assert_allclose(after[path], before[path], atol=1e-3)
        assert not np.array_equal(after[path], before[path])


def test_a_model_with_a_resnet_and_a_teacher_is_adapted_whole_and_without_its_teacher(
    trained_lit, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr("lit_het.apps.new.project.Step", lambda *_: SimpleNamespace(memory=dict))
    data, tower = tiny.write_data(tmp_path / "few", num_samples=64), ResNetConfig(50, image_size=32)
    text = dataclasses.replace(trained_lit.task.text_tower, embedding_size=tower.embedding_size)
    task = changed(trained_lit.task, image_tower=tower, text_tower=text, locked=(), teacher=TeacherConfig(projection=8))
    start = changed(trained_lit, run_dir=tmp_path / "start", task=task, pretrained=None)
    checkpoint_dir(start.run_dir).mkdir(parents=True)
    directory.write(start.run_dir, start, (trained_lit.run_dir / "tokenizer.model").read_bytes())
    flags = ("--tower", start.run_dir, "--data", data / "train", "--adapt")
    assert "has a ResNet, of which --adapt lora cannot" in refusal(capsys, "new", tmp_path / "part", *flags, "lora")
    run_command("new", tmp_path / "mine", *flags, "full")
    config = load_module_config(tmp_path / "mine" / "config.py")
    assert config.task == dataclasses.replace(task, teacher=None)
    assert config.optimizer.layer_decay == 1


def test_what_cannot_be_adapted_is_refused(capsys, upstream, trained_lit, data, tmp_path):
    def refused(*flags):
        return refusal(capsys, "new", tmp_path / "mine", "--data", data / "train", *flags)

    assert "is no image-text model: leave out --adapt" in refused("--tower", upstream, "--adapt", "full")
    assert "--adapt all is not one of lora, last-4" in refused("--tower", upstream, "--adapt", "all")
    assert "is more than the 1 blocks" in refused("--tower", trained_lit.run_dir, "--adapt", "last-7")
    assert "--classes writes a new classifier" in refused("--classes", "--adapt", "full")
