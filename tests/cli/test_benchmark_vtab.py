"""`lit-het benchmark-vtab`: an image tower is fine-tuned on 1,000 images of each task, chosen on 200 of them."""

import json
import math
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest

from lit_het.apps.benchmark import thousand
from lit_het.cli.main import main
from lit_het.configs import experiment
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.writing import expand, write_shards
from lit_het.search import grid_runs
from lit_het.training.loop import NonFinite
from lit_het.training.train import Watch
from tests import tiny
from tests.cli.conftest import last_line, refusal
from tests.cli.test_benchmark import write_set
from tests.refusals import assert_refused

SMALL = (
    *("--data.image-size", 32, "--data.batch-size", 16, "--data.threads", 1, "--data.crop", "none"),
    *("--mesh.fsdp", 1, "--schedule.warmup", 1),
)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks of VTAB, of which one has a validation split, and a set of another suite."""
    folder = tmp_path_factory.mktemp("wds")
    write_task(folder / "wds_vtab-pets")
    write_task(folder / "wds_vtab-dtd", train=800, val=200)
    write_set(folder, "wds_food101")
    return folder


def write_task(directory: Path, **splits: int) -> Path:
    """Writes coloured shapes as the training splits of a task, and 40 as its test split."""
    for number, (split, count) in enumerate({**(splits or {"train": 1000}), "test": 40}.items()):
        made = tiny.write_data(directory.parent / "made", num_samples=count, seed=number) / "train"
        (directory / split).mkdir(parents=True)
        for shard in made.glob("*.tar"):
            shutil.move(shard, directory / split / shard.name)
        shutil.copy(made / "classnames.txt", directory)
        shutil.rmtree(directory.parent / "made")
    return directory


def command(run: Path, sets: Path, output: Path, *flags: object) -> list[str]:
    told = ["benchmark-vtab", run, "--data", sets, "--output", output, *flags, *SMALL]
    return [str(one) for one in told]


def content(output: Path) -> dict:
    return json.loads((output / "vtab_1k.json").read_text())


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Trains in no time, better at the rate 0.01 than at 0.003, and diverges at 9; the runs that were asked for."""
    asked = list[Path]()

    def train(config: experiment.ExperimentConfig, watch: Watch | None = None) -> None:
        asked.append(config.run_dir)
        rate = config.schedule.learning_rate
        if rate == 9:
            raise NonFinite("the loss is nan at step 2", 2)
        (config.run_dir / "checkpoints").mkdir(parents=True)
        name = config.evaluations[0].data.name
        top1 = {0.003: 0.5, 0.01: 0.6}[rate] + 0.1 * config.seed
        record = {"step": 2, "train/loss": 1.5, f"supervised/{name}/top1": top1, f"supervised/{name}/nll": 1.0}
        (config.run_dir / "metrics.jsonl").write_text(json.dumps(record) + "\n")

    monkeypatch.setattr(grid_runs, "train_unless_done", train)
    return asked


@pytest.mark.slow
def test_a_tower_is_fine_tuned_and_tested_and_the_same_command_does_nothing_again(upstream, sets, tmp_path, capsys):
    """All of it, without a stub, as a user does it."""
    told = command(upstream, sets, tmp_path / "vtab", "--grid", "schedule.learning-rate=0.001,0.1", "--length", 20)
    assert main(told) == 0
    said, found = capsys.readouterr().err, content(tmp_path / "vtab")
    assert "2 of 19 sets; missing: caltech101, cifar100" in said
    tasks = found["tasks"]
    assert list(tasks) == ["dtd", "pets"]
    for name, tuned in tasks.items():
        of_grid = {}
        for rate in ("0.001", "0.1"):
            path = tmp_path / "vtab" / "choosing" / name / "results" / f"learning-rate={rate}_seed0.json"
            of_grid[rate] = json.loads(path.read_text())["figures"]["supervised/val200/top1"]
        rate = tuned["setting"]["schedule.learning-rate"]
        assert tuned["validation"] == of_grid[rate] == max(of_grid.values())
        run = tmp_path / "vtab" / "runs" / f"{name}_seed0"
        config = experiment.load(run / "config.json")
        assert config.schedule.learning_rate == float(rate)
        assert [Path(one).name for one in config.data.shards] == ["train800", "val200"]
        assert config.evaluations[0].data.directory == str(sets / f"wds_vtab-{name}")
        [top1] = tuned["top1"]
        assert f"top1 {top1:.3f}" in said
        assert top1 > 0.5, "of eight shapes, after twenty steps"
    assert found["means"]["all 19 sets, top-1"]["mean"] == statistics.fmean(one["top1"][0] for one in tasks.values())
    table = (tmp_path / "vtab" / "vtab_1k.md").read_text().replace("\\_", "_")
    assert f"| pets | {tasks['pets']['top1'][0]:.1%} | 97.2% | 96.7% | 92.7% |" in table
    assert "| caltech101 | – | 95.3% | 95.4% | 90.8% |" in table
    # Only what can be used again is left.
    assert not list((tmp_path / "vtab" / "choosing").rglob("checkpoints"))
    run = tmp_path / "vtab" / "runs" / "pets_seed0"
    assert main(["zero-shot", "--checkpoint", str(run), "--data", str(sets / "wds_vtab-pets")]) == 0
    capsys.readouterr()
    assert main(told) == 0
    assert "step 20" not in capsys.readouterr().err
    assert content(tmp_path / "vtab") == found


def test_the_best_setting_on_the_200_is_trained_on_all_with_every_seed(upstream, sets, tmp_path, stub):
    output = tmp_path / "vtab"
    told = command(upstream, sets, output, "--seeds", 1, 2, 4, "--grid", "schedule.learning-rate=0.003,0.01,9")
    assert main(told) == 0
    names = [str(path.relative_to(output)) for path in stub if "pets" in str(path)]
    assert names == [
        *(f"choosing/pets/runs/learning-rate={rate}_seed1" for rate in ("0.003", "0.01", "9")),
        *(f"runs/pets_seed{seed}" for seed in (1, 2, 4)),
    ]
    found = content(output)
    assert found["tasks"]["pets"]["setting"] == {"schedule.learning-rate": "0.01"}
    assert found["tasks"]["pets"]["validation"] == pytest.approx(0.7)
    assert found["tasks"]["pets"]["top1"] == pytest.approx([0.7, 0.8, 1.0])
    # Both tasks have the same accuracies, and so have their means.
    error = statistics.stdev([0.7, 0.8, 1.0]) / math.sqrt(3)
    assert found["errors_of_means"]["all 19 sets, top-1"] == pytest.approx(error)
    table = (output / "vtab_1k.md").read_text()
    assert f"| mean, 2 of 19 sets | 83.3% ± {100 * error:.1f} |" in table
    assert "| pets | 0.01 | 70.0% | 3 seeds |" in table
    # A further seed is trained alone.
    stub.clear()
    assert main([*told[: told.index("4") + 1], "0", *told[told.index("4") + 1 :]]) == 0
    assert [path.name for path in stub] == ["dtd_seed0", "pets_seed0"]


def test_a_single_setting_is_not_chosen_but_trained_on_all_at_once(upstream, sets, tmp_path, stub):
    setting = ("--grid", "length=2500", "--grid", "data.max-bad-fraction=0.5")
    assert main(command(upstream, sets, tmp_path / "vtab", *setting)) == 0
    assert [path.name for path in stub] == ["dtd_seed0", "pets_seed0"]
    assert content(tmp_path / "vtab")["tasks"]["dtd"]["validation"] is None
    config = json.loads((tmp_path / "vtab" / "results" / "dtd_seed0.json").read_text())["config"]
    assert config["data.max_bad_fraction"] == 0.5
    assert [Path(one).name for one in config["data.shards"]] == ["train800", "val200"]


def test_the_shipped_grid_and_the_crops_of_a_task_are_those_of_the_configuration(upstream, sets, tmp_path, stub):
    flags = command(upstream, sets, tmp_path / "vtab")
    assert main([flag for flag in flags if flag not in ("--data.crop", "none")]) == 0
    of_pets = [path.name for path in stub if path.parent.parent.name == "pets"]
    assert of_pets == [f"length={steps}_learning-rate={rate}_seed0" for steps in (500, 2500) for rate in (0.003, 0.01)]
    result = json.loads((tmp_path / "vtab" / "results" / "pets_seed0.json").read_text())
    assert result["config"]["data.crop.type"] == "RandomCrop"
    assert result["config"]["task.num_classes"] == 8
    assert result["config"]["task.image_tower.image_size"] == 32


@pytest.mark.slow
def test_the_tower_of_an_image_text_model_which_locks_it_is_fine_tuned_too(trained_lit, sets, tmp_path):
    told = command(trained_lit.run_dir, sets, tmp_path / "vtab", "--grid", "length=2")
    assert main([*told, "--task.head", "het_xl"]) == 0
    config = experiment.load(tmp_path / "vtab" / "runs" / "dtd_seed0" / "config.json")
    assert (type(config.task.head).__name__, config.task.locked) == ("HetXLConfig", ())
    assert list(content(tmp_path / "vtab")["tasks"]) == ["dtd", "pets"]


@pytest.mark.parametrize(
    ("name", "splits", "start"),
    [
        ("dtd", {"train": 1001}, 801),  # the last 200, as its own validation split is not there
        ("dtd", {"train": 802, "valid": 203}, 0),
        ("caltech101", {"train": 3060}, 2754),
        ("caltech101", {"train": 2754}, 2554),  # without the images of the validation set
    ],
)
def test_the_images_are_those_of_the_published_splits(name, splits, start, upstream, tmp_path, stub):
    task = write_task(tmp_path / "wds" / name, **splits)
    assert main(command(upstream, tmp_path / "wds", tmp_path / "vtab", "--grid", "length=2")) == 0
    images = tmp_path / "vtab" / "images" / name
    assert (images / "classnames.txt").read_text() == (task / "classnames.txt").read_text()
    for split, source, chosen in (
        ("train800", "train", range(800)),
        ("val200", next(reversed(splits)), range(start, start + 200)),
    ):
        theirs = ShardIndex(expand(task / source), ["image", "cls"])
        ours = ShardIndex(expand(images / split), ["image", "cls"])
        assert ours.read(range(len(ours)), ["image", "cls"]) == theirs.read(chosen, ["image", "cls"])
        assert ours.key(0) == f"{chosen.start:06d}"


def test_what_is_no_task_of_a_thousand_images_is_named_and_the_others_go_on(upstream, tmp_path, stub, capsys):
    folder = tmp_path / "wds"
    write_task(folder / "pets")
    write_task(folder / "dtd", train=999)
    write_task(folder / "svhn", train=900, val=100)
    write_set(folder, "cifar100")
    by_class = write_task(folder / "eurosat")
    (by_class / "classnames.txt").write_text("".join(f"class {number}\n" for number in range(17)))
    shutil.rmtree(write_task(folder / "sun397") / "test")
    told = command(upstream, folder, tmp_path / "vtab", "--grid", "length=2")
    assert main(told) == 1
    said = capsys.readouterr().err
    for line in (
        f"dtd: {folder}/dtd/train has 999 images; VTAB-1k takes 800 and 200",
        f"svhn: {folder}/svhn/train has 900 images, and its validation split 100; VTAB-1k takes 800 and 200",
        f"cifar100: {folder}/cifar100 has no folder train with shards, of which VTAB-1k trains on 1,000 images; export",
        f"eurosat: the 800 images of {folder}/eurosat/train from number 0 are of 8 of 17 classes, or sorted by class",
        f"sun397: {folder}/sun397 has no folder test with shards, to test on; export it as well",
    ):
        assert f"lit-het: {line}" in said
    assert said.splitlines()[-1] == (
        "lit-het: 5 sets could not be evaluated: cifar100, dtd, sun397, svhn, eurosat; the same command evaluates "
        "these again"
    )
    assert [path.name for path in stub] == ["pets_seed0"]
    found = content(tmp_path / "vtab")
    assert (list(found["tasks"]), list(found["failed"])) == (["pets"], ["cifar100", "dtd", "sun397", "svhn", "eurosat"])
    # Another set in the place of one is refused, not mixed with it.
    shutil.rmtree(folder / "pets")
    write_task(folder / "pets", train=1200)
    assert main(told) == 1
    assert f"pets: {tmp_path}/vtab/images/pets holds images of another set; delete it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("split", "labels", "num_classes", "count"),
    [
        ("train", np.arange(1200) // 900, 2, 1),
        ("train", np.arange(1200) // 200, 6, 4),
        ("val", np.zeros(200, int), 2, 1),
        ("val", np.arange(200) // 34, 6, 6),
    ],
)
def test_images_that_are_sorted_by_class_are_refused_also_of_few_classes(split, labels, num_classes, count, tmp_path):
    folder, generator = tmp_path / "pcam", np.random.default_rng(0)
    mixed = {name: generator.permutation(np.arange(1200) % num_classes) for name in ("train", "val")}
    for name, of_split in {**mixed, split: labels}.items():
        samples = ({"__key__": str(number), "jpg": b"", "cls": int(one)} for number, one in enumerate(of_split))
        write_shards(folder / name, samples)
    (folder / "classnames.txt").write_text("".join(f"class {one}\n" for one in range(num_classes)))
    message = f"images of {folder}/{split} from number 0 are of {count} of {num_classes} classes, or sorted by class"
    assert_refused(message, thousand.write_thousand, "pcam", str(folder), tmp_path / "images")
    assert not (tmp_path / "images").exists()


def test_two_processes_may_copy_the_same_images(sets, tmp_path, monkeypatch):
    task, folder, write = str(sets / "wds_vtab-dtd"), tmp_path / "images" / "dtd", thousand.write_shards

    def write_after_another(*arguments):
        monkeypatch.setattr(thousand, "write_shards", write)
        assert thousand.write_thousand("dtd", task, folder) == 8
        return write(*arguments)

    monkeypatch.setattr(thousand, "write_shards", write_after_another)
    assert thousand.write_thousand("dtd", task, folder) == 8
    assert [path.name for path in folder.parent.iterdir()] == ["dtd"], "nothing half written is left"


def test_settings_that_all_diverge_fail_and_a_task_of_another_process_is_left_to_it(
    upstream, sets, tmp_path, stub, capsys, monkeypatch
):
    rates = ("--grid", "schedule.learning-rate=9,9.0")
    assert main(command(upstream, sets, tmp_path / "one", *rates)) == 1
    assert "dtd: the loss of every setting was not finite; give lower rates with --grid" in capsys.readouterr().err
    assert main(command(upstream, sets, tmp_path / "two", *rates[:1], "schedule.learning-rate=9")) == 1
    assert "the loss of dtd_seed0 was not finite" in capsys.readouterr().err
    monkeypatch.setattr(grid_runs, "run_unless_done", lambda *_, **__: "in progress in another process")
    assert main(command(upstream, sets, tmp_path / "three")) == 0
    assert "2 runs in progress in other processes" in capsys.readouterr().err
    assert content(tmp_path / "three")["in_progress"] == ["dtd", "pets"]


def test_wrong_arguments_are_refused_before_an_image_is_copied(upstream, sets, tmp_path, capsys, config_file):
    output = tmp_path / "vtab"
    assert "config.json is missing" in refusal(capsys, *command(tmp_path / "nowhere", sets, output))
    assert "name the folder above those" in refusal(capsys, *command(upstream, tmp_path / "nowhere", output))
    assert "is a file; --output takes a folder" in refusal(capsys, *command(upstream, sets, config_file))
    for flags, problem in (
        (("--optimiser", 1), "--optimiser"),
        (("--task.image-tower.image-size", 48), "--task.image-tower.image-size 48: give --data.image-size, which"),
        (("--seeds", 0, -1), "--seeds -1: seeds are at least 0"),
        (("--grid", "length"), "--grid length: write FIELD=VALUE,VALUE"),
        (("--config", config_file), "does not accept 'task=dtd'; it accepts no arguments"),
    ):
        assert problem in last_line(capsys, *command(upstream, sets, output, *flags))
    assert not output.exists()
