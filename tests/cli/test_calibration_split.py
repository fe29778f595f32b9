"""Samples that training holds out, and the temperatures that it fits to them at its end."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from lit_het.configs import experiment, imagenet21k_het_xl, quickstart_lit_het_xl, quickstart_upstream
from lit_het.configs.parsing import parse_config
from lit_het.data_pipelines.data_config import LoaderConfig, Streaming, WeightedShards
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.portions import Portion
from lit_het.data_pipelines.shards.suspects import Suspects
from lit_het.data_pipelines.shards.writing import write_tar
from lit_het.errors import UserError
from lit_het.models.calibration.images import CalibrateOptions, calibrate
from lit_het.models.calibration.seen_images import seen
from lit_het.models.calibration.split import split, split_samples
from lit_het.training import train as training
from lit_het.training.cadence import Cadence
from lit_het.training.checks import check_run_dir, with_saved_rule
from lit_het.training.directory import load_config
from lit_het.training.durations import Duration
from lit_het.training.train import train
from tests import tiny
from tests.cli.conftest import changed, refusal, run_command


def config_with(calibration, config=None, **data):
    config = quickstart_lit_het_xl.get_config() if config is None else config
    return changed(config, calibration=calibration, data=changed(config.data, **data))


@pytest.mark.parametrize(
    ("num_samples", "first"),
    [
        (4_951, 4_851),  # 98 % are 4,851.98: 100 are left, the fewest
        (5_000, 4_900),
        (5_001, 4_900),  # 98 % are 4,900.98
        (123_456, 120_986),  # 98 % are 120,986.88
        (500_000, 490_000),  # 2 % are 10,000, the most
        (500_001, 490_001),
        (1_000_000, 990_000),
        (12_345_678, 12_335_678),
    ],
)
def test_the_last_two_percent_are_held_out_but_at_most_ten_thousand(num_samples, first):
    found = split(changed(config_with("auto"), calibration_by="order"), num_samples)
    assert found.calibration is not None
    assert found.training.sample_range(num_samples) == range(first)
    assert found.calibration.sample_range(num_samples) == range(first, num_samples)
    # As given to `lit-het calibrate --portion`.
    assert Portion.parse(str(found.calibration)) == found.calibration


@pytest.mark.parametrize(
    ("num_samples", "start"), [(5_000, 97.4), (6_500, 98), (500_000, 98), (1_000_000, 99), (30_000_000, 99.966667)]
)
@pytest.mark.parametrize("rule", ["sample", "key", "caption"])
def test_by_a_hash_two_percent_are_held_out_and_at_least_as_many_as_a_temperature_needs(num_samples, start, rule):
    found = split(changed(config_with("auto"), calibration_by=rule), num_samples)
    assert (found.training, found.calibration) == (Portion(0, start, rule), Portion(start, by=rule))
    assert Portion.parse(str(found.calibration)) == found.calibration
    assert split(changed(config_with("auto"), calibration_by=rule), 4_950).calibration is None


@pytest.mark.parametrize(
    ("given", "trained_on", "calibration", "numbers"),
    [
        ("90%:", ":", range(900, 1000), range(900)),
        (":25%", ":", range(250), range(250, 1000)),
        ("20%:40%", ":20%", range(200, 400), range(200)),
        ("98%:", ":50%", None, None),  # 20 samples
        ("98%:", ":99%", None, None),
        ("10%:90%", ":", None, None),
        (":", ":", None, None),
        ("50%:", "40%:60%", None, None),
    ],
)
def test_an_explicit_portion_is_held_out_as_it_is_or_refused(given, trained_on, calibration, numbers):
    config = config_with(Portion.parse(given), portion=Portion.parse(trained_on))
    if calibration is None:
        with pytest.raises(UserError, match=r"^--calibration .*: .*; choose others, or --calibration None$"):
            split(config, 1000)
        return
    found = split(config, 1000)
    assert found.calibration is not None
    assert found.calibration.sample_range(1000) == calibration
    assert found.training.sample_range(1000) == numbers


UPSTREAM = quickstart_upstream.get_config()


@pytest.mark.parametrize(
    ("config", "num_samples", "reason"),
    [
        (config_with("auto"), 4_950, "98%:100% of 4,950 samples are 99, fewer than 100"),
        (config_with("auto", stream=Streaming()), 0, "a stream has no portions"),
        (config_with("auto", mixture=(WeightedShards(("b",)),)), 10_000, "nothing is held out of a mixture"),
        (config_with("auto", UPSTREAM), 10_000, "images of one label each"),
        (config_with("auto", portion=Portion(0, 98)), 10_000, "already leaves samples out"),
        (config_with(None), 10_000, ""),
    ],
)
def test_all_samples_are_trained_on_where_none_can_be_held_out(config, num_samples, reason):
    found = split(config, num_samples)
    assert found.training == config.data.portion
    assert found.calibration is None
    assert reason in found.problem
    assert bool(found.problem) == bool(reason)


@pytest.fixture(scope="module")
def restarted(tmp_path_factory):
    """130 shards of one caption and the same 50 keys, of which a hash of the key alone holds out none."""
    folder = tmp_path_factory.mktemp("restarted")
    for shard in range(130):
        # Images are indexed, and never decoded.
        write_tar(folder / f"{shard}.tar", [{"__key__": f"{i:09}", "jpg": b"x", "txt": "a cat"} for i in range(50)])
    return Loader(LoaderConfig((str(folder),), 8, 4, threads=0))


def by_rule(rule, restarted, calibration: Portion | str = "auto"):
    return changed(config_with(calibration, shards=restarted.config.shards), calibration_by=rule)


@pytest.mark.slow
def test_keys_that_begin_anew_in_every_shard_are_held_out_by_shard(restarted, tmp_path):
    training, found = split_samples(by_rule("sample", restarted), restarted)
    held_out = restarted.with_portion(found.calibration)
    assert (len(restarted.index), found.calibration) == (6_500, Portion(98, by="sample"))
    assert 100 <= held_out.num_samples == 6_500 - training.num_samples <= 170
    places = {number % 50 for number in held_out.numbers}
    assert len(places) > 40
    # A copy elsewhere holds out the same.
    copy = shutil.copytree(restarted.config.shards[0], tmp_path / "copy")
    moved = Loader(changed(restarted.config, shards=(str(copy),), portion=found.calibration))
    assert [*moved.numbers] == [*held_out.numbers]
    (copy / "0.tar").rename(copy / "00.tar")  # another name has other samples, and the digest says so
    renamed = Loader(changed(moved.config, shards=(str(copy),)))
    assert renamed.digest != moved.digest == held_out.digest


@pytest.mark.parametrize("rule", ["key", "caption"])
def test_a_hash_that_holds_out_too_few_is_known_before_training(restarted, rule):
    training, found = split_samples(by_rule(rule, restarted), restarted)
    assert (training.num_samples, found.training, found.calibration) == (6_500, Portion(), None)
    said = f"98%:100% by {rule} of 6,500 samples are 0, fewer than 100; --calibration-by sample holds out others"
    assert found.problem == said
    with pytest.raises(UserError, match=f"by {rule} of 6,500 samples are 0, .*; choose others"):
        split_samples(by_rule(rule, restarted, Portion(98, by=rule)), restarted)


def test_a_classifier_holds_out_samples_only_if_asked():
    config = imagenet21k_het_xl.get_config()
    assert split(config_with(Portion(98), config), 10_000).calibration == Portion(98)
    found = split(config_with("auto", config), 10_000)
    assert (found.training, found.calibration) == (Portion(), None)
    assert "sorted by class" in found.problem


@pytest.mark.parametrize("value", ["auto", None, Portion(90), Portion(0, 2.5)])
def test_the_field_survives_json_and_is_a_flag(tmp_path, value):
    config, path = config_with(value), tmp_path / "config.json"
    experiment.save(config, path)
    assert experiment.load(path).calibration == value
    assert parse_config(path, ["--calibration", str(value)]).calibration == value
    assert parse_config(path, ["--calibration", "7%:9%"]).calibration == Portion(7, 9)


@pytest.mark.parametrize("value", ["half", "Auto", "7%"])
def test_a_value_that_is_no_portion_is_one_line(value):
    with pytest.raises(UserError, match=f"(?i)calibration.*{value}|{value}.*calibration"):
        parse_config(Path("configs/quickstart_lit_het_xl.py"), ["--calibration", value])


def test_configurations_of_earlier_versions_hold_out_nothing(tmp_path):
    saved = experiment.to_dict(config_with("auto"))
    del saved["calibration"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert experiment.load(tmp_path / "config.json").calibration is None


def test_a_run_keeps_its_rule_when_it_is_resumed(tmp_path):
    config = changed(config_with("auto"), run_dir=tmp_path)
    saved = experiment.to_dict(config)
    assert saved.pop("calibration_by") == "sample"
    (tmp_path / "config.json").write_text(json.dumps(saved))  # of a version that knew only the last 2 %
    kept = with_saved_rule(config)
    assert split(kept, 10_000) == (Portion(0, 98), Portion(98), "")
    check_run_dir(kept, resume=True)
    assert split(load_config(tmp_path), 10_000) == split(kept, 10_000)


@pytest.fixture(scope="module")
def half(upstream, tmp_path_factory):
    """A run that holds out the last 110 of 220 samples; some captions are wrong, so that a temperature fits."""
    folder = tmp_path_factory.mktemp("halves")
    data = tiny.write_data(folder, num_samples=220, seed=3, every_wrong=7)
    config = tiny.shrink(quickstart_lit_het_xl.get_config(), data, folder / "run", pretrained=upstream)
    cadence = Cadence(log_steps=1, save_steps=10)
    return changed(config, calibration=Portion(50), length=Duration(10), cadence=cadence)


@pytest.fixture(scope="module")
def samples_read(half):
    """Returns the samples that were read in a training, whose updates are left out, and those that were read later."""
    samples, in_training = [], []
    with pytest.MonkeyPatch.context() as patch:
        read = ShardIndex.read

        def noted(index, numbers, kinds):
            samples.extend(numbers)
            return read(index, numbers, kinds)

        def noted_loop(step, state, locked, batches, *, num_steps, **others):
            list(itertools.islice(batches, num_steps))
            in_training.extend(samples)
            samples.clear()
            return tiny.finish(step, state, num_steps=num_steps, **others)

        patch.setattr(ShardIndex, "read", noted)
        patch.setattr("lit_het.training.train.loop.train", noted_loop)
        train(half)
    return in_training, samples


@pytest.mark.slow
def test_training_reads_none_of_the_samples_to_which_it_fits_the_temperatures(half, samples_read):
    in_training, later = samples_read
    assert set(in_training) == set(range(110))
    assert set(range(110, 220)) <= set(later)
    saved = json.loads((half.run_dir / "calibration.json").read_text())
    assert (saved["step"], saved["num_images"], saved["portion"]) == (10, 110, "50%:100%")
    assert (saved["data"], saved["num_samples"]) == ([str(shard) for shard in half.data.shards], 16)
    for mode in ("noiseless", "monte_carlo"):
        assert saved[mode]["nll_after"] <= saved[mode]["nll_before"]
        assert saved[mode]["standard_error"] > 0
    assert saved["digest"] == Loader(half.data).digest


@pytest.fixture
def run_dir(half, samples_read, tmp_path):
    """A copy of the run that a test may change."""
    return shutil.copytree(half.run_dir, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("copied", [False, True])
def test_a_later_calibration_may_read_only_the_samples_held_out(capsys, half, run_dir, tmp_path, copied):
    (shards,) = map(Path, half.data.shards)
    given, moved = shards, shards.with_name("moved")
    if copied:  # and the original is gone
        given = shutil.copytree(shards, tmp_path / "copy")
        shards.rename(moved)
    try:
        refused = refusal(capsys, "calibrate", run_dir, "--data", given, "--portion", "49.5%:")
        assert "was trained on images of" in refused
        run_command("calibrate", run_dir, "--data", given, "--portion", "50%:")
    finally:
        if copied:
            moved.rename(shards)


@pytest.mark.slow
def test_a_hash_tells_what_was_held_out_also_of_copies(half, tmp_path):
    tiny.finish_untrained(changed(half, run_dir=tmp_path / "run", calibration=Portion(50, by="key")))
    copy = shutil.copytree(half.data.shards[0], tmp_path / "copy")
    for shards in (half.data.shards, (str(copy),)):
        images = Loader(changed(half.data, shards=shards), lambda texts: np.zeros((len(texts), 1), np.int32))
        assert seen(tmp_path / "run", images.with_portion(Portion(50, by="key"))) is None
        for portion in (Portion(49, by="key"), Portion(0, 50, "key"), Portion(50), Portion()):
            assert seen(tmp_path / "run", images.with_portion(portion)) is not None


def ranked(path, config, *suspects, weight=0.0):
    """Writes a table of scores that begins with the suspects; returns the configuration with these."""
    index = Loader(config.data, None).index
    order = [*suspects, *(number for number in range(len(index)) if number not in suspects)]
    path.write_text("shard,key\n" + "".join(f"{index.shard(number)},{index.key(number)}\n" for number in order))
    fraction = (len(suspects) - 0.5) / len(index)  # rounded up
    return config_with(config.calibration, config, suspects=Suspects(path, fraction, weight))


def test_samples_after_a_suspect_are_not_taken_for_unseen(capsys, half, run_dir, tmp_path):
    tiny.edit_config(run_dir, ranked(tmp_path / "suspects.csv", half, 50))
    line = refusal(capsys, "calibrate", run_dir, "--data", *half.data.shards, "--portion", "49.5%:")
    assert "was trained on images of" in line


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_suspects_are_not_calibrated_on(half, run_dir, tmp_path, weight):
    tiny.edit_config(run_dir, ranked(tmp_path / "suspects.csv", half, 150, 200, weight=weight))
    calibrate(run_dir, CalibrateOptions(half.data.shards, half.calibration))
    assert json.loads((run_dir / "calibration.json").read_text())["num_images"] == 110 - 2


def test_excluded_samples_are_not_calibrated_on(half, run_dir, tmp_path):
    other = shutil.copytree(half.data.shards[0], tmp_path / "other")
    index, tables = Loader(half.data, None).index, []
    for name, shards in (("own", Path(half.data.shards[0])), ("mixture", other)):
        rows = [f"{shards / Path(index.shard(number)).name},{index.key(number)}\n" for number in (50, 150, 200)]
        tables.append(tmp_path / f"{name}.csv")
        tables[-1].write_text("shard,key\n" + "".join(rows))
    mixture = (WeightedShards((str(other),), portion=Portion(0, 50)),)
    data = {"portion": Portion(0, 50), "exclude": tuple(tables), "mixture": mixture}
    tiny.edit_config(run_dir, config_with(None, half, **data))
    calibrate(run_dir, CalibrateOptions(half.data.shards, half.calibration))
    assert json.loads((run_dir / "calibration.json").read_text())["num_images"] == 110 - 2


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_a_copy_of_the_shards_of_a_run_with_suspects_is_known(capsys, half, upstream, tmp_path, weight):
    (shards,) = map(Path, half.data.shards)
    moved = tmp_path / "moved" / "train"
    shutil.copytree(shards, moved)
    own = changed(half, data__shards=(str(moved),), run_dir=tmp_path / "run")
    tiny.finish_untrained(ranked(tmp_path / "suspects.csv", own, 50, weight=weight))
    shutil.rmtree(moved)
    refused = refusal(capsys, "calibrate", own.run_dir, "--data", shards, "--portion", "49.5%:")
    assert "was trained on images of" in refused
    run_command("calibrate", own.run_dir, "--data", shards, "--portion", "50%:")
    assert "not checked" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_finished_run_is_calibrated_when_resumed_unless_it_is_already(half, run_dir):
    config, path = changed(half, run_dir=run_dir), run_dir / "calibration.json"
    first = json.loads(path.read_text())
    path.write_text(json.dumps({**first, "portion": "mine"}))
    train(config, resume=True)
    assert json.loads(path.read_text())["portion"] == "mine"
    path.unlink()
    train(config, resume=True)
    assert json.loads(path.read_text()) == first


def test_a_calibration_that_fails_leaves_the_run_finished_and_names_the_command(capsys, half, run_dir, monkeypatch):
    (run_dir / "calibration.json").unlink()

    def fails(*_):
        raise MemoryError("out of memory")

    monkeypatch.setattr("lit_het.models.calibration.images.fit", fails)
    assert int(train(changed(half, run_dir=run_dir), resume=True).step) == 10
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "not calibrated" in line]
    by_hand = f"run lit-het calibrate {run_dir} --data {half.data.shards[0]} --portion 50%:100%"
    assert line == f"lit-het: not calibrated: out of memory; after a correction, {by_hand}"


def test_several_processes_are_told_the_command(capsys, half, run_dir, monkeypatch):
    (run_dir / "calibration.json").unlink()
    monkeypatch.setattr("jax.process_count", lambda: 2)
    training.calibrate_held_out(changed(half, run_dir=run_dir), 10, split(half, 220))
    assert f"lit-het calibrate {run_dir} --data {half.data.shards[0]} --portion 50%:100%" in capsys.readouterr().err
    assert not (run_dir / "calibration.json").exists()


def test_few_samples_are_all_trained_on_with_a_message(capsys, lit_config):
    tiny.finish_untrained(changed(lit_config, calibration="auto"))
    assert "not calibrated: 98%:100% of 40 samples are 1, fewer than 100" in capsys.readouterr().err
    assert not (lit_config.run_dir / "calibration.json").exists()


def test_a_portion_that_cannot_be_held_out_is_one_line_before_training(capsys, lit_config):
    with pytest.raises(UserError, match="fewer than 100"):
        train(changed(lit_config, calibration=Portion(50)))
    assert not (lit_config.run_dir / "config.json").exists()
