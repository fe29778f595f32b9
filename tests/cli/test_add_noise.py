"""`lit-het add-noise`: a finished model gets noise, and keeps its towers."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import lit_het
from lit_het.apps import noise
from lit_het.checkpoints.native import checksums
from lit_het.cli.main import main
from lit_het.data_pipelines.portions import Portion
from lit_het.heads.contrastive import DeterministicContrastiveConfig, HetXLContrastiveConfig
from lit_het.heads.temperature import LogTemperature
from lit_het.losses.contrastive import SigmoidLoss
from lit_het.runs import training
from lit_het.runs.calibration_split import split
from lit_het.runs.directory import load_config
from lit_het.runs.opening import open_run
from lit_het.runs.saved_calibration import read_calibration
from lit_het.tasks.contrastive import ContrastiveTask
from tests import tiny
from tests.cli.test_train import refusal

NAMES = [f"{colour} {shape}" for colour in tiny.COLOURS for shape in tiny.SHAPES]
GOLDEN = Path(__file__).parents[1] / "golden" / "two_towers_siglip.npz"
SHORT = ("--length", "4 steps", "--data.batch-size", "16", "--schedule.warmup", "1 steps")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return tiny.write_data(tmp_path_factory.mktemp("pairs"), num_samples=noise.LEAST_PAIRS, seed=3) / "train"


@pytest.fixture(params=["softmax", "sigmoid"])
def deterministic(request, lit_config, tmp_path):
    """A run without noise."""
    head, loss = DeterministicContrastiveConfig(), lit_config.task.loss
    if request.param == "sigmoid":
        head, loss = DeterministicContrastiveConfig(initial_bias=-3.0), SigmoidLoss()
    task = dataclasses.replace(lit_config.task, head=head, loss=loss)
    config = dataclasses.replace(lit_config, run_dir=tmp_path / "deterministic", task=task)
    tiny.finish_untrained(config)
    return config.run_dir


def add_noise(model, pairs, output, *flags):
    return main(["add-noise", "--model", str(model), "--data", str(pairs), "--output", str(output), *SHORT, *flags])


def image():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8))


def test_the_embeddings_stay_and_only_the_head_is_trained(capsys, deterministic, pairs, tmp_path):
    assert add_noise(deterministic, pairs, tmp_path / "noisy") == 0
    before, after = open_run(deterministic), open_run(tmp_path / "noisy")
    for tower in ("image_tower", "text_tower"):
        assert checksums.digest(after.params[tower]) == checksums.digest(before.params[tower])
    assert isinstance(before.task, ContrastiveTask)
    assert isinstance(after.task, ContrastiveTask)
    assert after.task.config.loss == before.task.config.loss
    assert isinstance(after.task.config.head, HetXLContrastiveConfig)
    # τ and the bias start at those of the model.
    start = LogTemperature(initial=float(before.task.temperature(before.params)))
    assert after.task.config.head.temperature == start
    assert after.task.config.head.initial_bias == before.task.config.head.initial_bias
    old, new = lit_het.load(deterministic), lit_het.load(tmp_path / "noisy")
    np.testing.assert_allclose(new.encode_images(image()), old.encode_images(image()), atol=1e-6)
    np.testing.assert_allclose(new.encode_texts(NAMES), old.encode_texts(NAMES), atol=1e-6)
    assert new.noise(image()) > 0
    assert new.classify(image(), NAMES).noisy_mean is not None

    capsys.readouterr()
    assert add_noise(deterministic, pairs, tmp_path / "noisy") == 0
    assert "is finished: 4 steps" in capsys.readouterr().err


@pytest.mark.parametrize("deterministic", ["softmax"], indirect=True)
@pytest.mark.parametrize("head", ["prob_vlm", "mc_dropout", "gaussian"])
def test_other_heads_are_added_by_their_name(deterministic, pairs, tmp_path, head):
    assert add_noise(deterministic, pairs, tmp_path / "noisy", "--task.head", head, "--calibration", "None") == 0
    old, new = lit_het.load(deterministic), lit_het.load(tmp_path / "noisy")
    means = np.asarray(new.encode_images(image()))[: len(old.encode_images(image()))]
    np.testing.assert_allclose(means, old.encode_images(image()), atol=1e-6)
    assert new.noise(image()) > 0
    assert new.classify(image(), NAMES, samples=4).noisy_mean is not None


def test_a_model_without_a_tokenizer_can_be_given_one(capsys, siglip, pairs, data, tmp_path):
    assert add_noise(siglip, pairs, tmp_path / "noisy") == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "siglip.npz has no tokenizer; import it with --tokenizer FILE" in line
    assert add_noise(siglip, pairs, tmp_path / "noisy", "--tokenizer", str(data / "tokenizer.model")) == 0


@pytest.fixture
def siglip(tmp_path):
    """Recorded towers in big_vision's form."""
    with np.load(GOLDEN) as golden:
        arrays = {name: array for name, array in golden.items() if name.startswith("params/")}
    np.savez(tmp_path / "siglip.npz", **arrays)
    return tmp_path / "siglip.npz"


def test_a_model_of_another_library_becomes_a_run_that_moves_and_is_exported(siglip, pairs, data, tmp_path):
    tokenizer = ("--tokenizer", str(data / "tokenizer.model"))
    assert add_noise(siglip, pairs, tmp_path / "noisy", *tokenizer) == 0
    assert sorted(path.name for path in (tmp_path / "noisy/embeddings").iterdir()) == ["images", "texts"]
    calibration = read_calibration(tmp_path / "noisy", 4)
    assert calibration is not None
    assert (calibration.num_images, calibration.portion) == (100, "90%:100%")
    expected = lit_het.load(tmp_path / "noisy").classify(image(), NAMES).to_numpy()
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "noisy", tmp_path / "elsewhere/noisy")
    siglip.unlink()
    moved = lit_het.load(tmp_path / "elsewhere/noisy")
    np.testing.assert_array_equal(moved.classify(image(), NAMES).to_numpy(), expected)
    moved.save_pretrained(tmp_path / "folder")
    assert lit_het.load(tmp_path / "folder").noise(image()) == moved.noise(image())


def test_what_cannot_get_noise_is_one_line(capsys, upstream, trained_lit, deterministic, pairs, data, tmp_path):
    def line(model, shards, *flags):
        given = ("--model", model, "--data", shards, "--output", tmp_path / "x", *flags)
        return refusal(capsys, "add-noise", *given)

    assert "has no text tower; noise is added to image-text models" in line(upstream, pairs)
    assert "has noise already; give a model with a deterministic head" in line(trained_lit.run_dir, pairs)
    assert "has 40 pairs of an image and a .txt, too few to learn noise from" in line(deterministic, data / "train")
    missing = line(deterministic, pairs, "--captions", "json/caption")
    assert "no sample has an image and a .json (" in missing
    assert "key 0000 has no .json; add the member or remove the sample); name the member with --captions" in missing
    assert "unknown flag --task.head.num-factor" in line(deterministic, pairs, "--task.head.num-factor", "3")
    assert "has no noise; choose another head" in line(deterministic, pairs, "--task.head", "deterministic")
    assert "stores all of its settings; leave out --image-size" in line(deterministic, pairs, "--image-size", "64")
    assert "the run is written to --output; leave the flag out" in line(deterministic, pairs, "--run-dir", tmp_path)
    assert not (tmp_path / "x").exists()
    to_itself = ("--model", deterministic, "--data", pairs, "--output", deterministic)
    assert "is the model itself; choose another --output" in refusal(capsys, "add-noise", *to_itself)
    address = ("--model", deterministic, "--data", pairs, "--output", "gs://bucket/run")
    assert "is an address; give --output a local" in refusal(capsys, "add-noise", *address)


def test_help_lists_the_fields_that_the_command_takes(capsys, trained_lit, pairs, tmp_path):
    assert main(["add-noise", "--help"]) == 0
    assert "--captions MEMBER" in capsys.readouterr().out
    assert "add-noise needs --model ADDRESS, --data SHARDS and --output RUN" in refusal(capsys, "add-noise")
    task = dataclasses.replace(trained_lit.task, head=DeterministicContrastiveConfig())
    model = tmp_path / "model"
    tiny.finish_untrained(dataclasses.replace(trained_lit, task=task, run_dir=model))
    with pytest.raises(SystemExit) as ended:
        add_noise(model, pairs, tmp_path / "x", "--task.head", "prob_vlm", "--help")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for field in ("--captions", "--task.head.hidden-size", "--length", "--data.max-bad-fraction", "--schedule.warmup"):
        assert field in text
    assert not (tmp_path / "x").exists()


def test_a_second_call_with_another_model_or_other_data_changes_nothing(capsys, siglip, pairs, data, tmp_path):
    tokenizer = ("--tokenizer", data / "tokenizer.model")
    assert add_noise(siglip, pairs, tmp_path / "noisy", *map(str, tokenizer)) == 0
    other = siglip.with_name("other.npz")
    shutil.copy(siglip, other)
    again = ("add-noise", "--data", pairs, "--output", tmp_path / "noisy", *tokenizer, *SHORT)
    assert "was imported from another --model" in refusal(capsys, *again, "--model", other)
    shards = tiny.write_data(tmp_path / "more", num_samples=noise.LEAST_PAIRS, seed=4) / "train"
    line = refusal(capsys, *again, "--model", siglip, "--data", shards)
    assert "data.shards was" in line
    assert line.endswith("use the same values or another --output")


@pytest.fixture
def trained_on_pairs(lit_config, pairs, tmp_path):
    """Returns a function that writes a run without noise that was trained on the pairs, but those it holds out."""

    def finish(calibration):
        task = dataclasses.replace(lit_config.task, head=DeterministicContrastiveConfig())
        data = dataclasses.replace(lit_config.data, shards=(str(pairs),))
        config = dataclasses.replace(
            lit_config, run_dir=tmp_path / "model", task=task, data=data, calibration=calibration
        )
        tiny.finish_untrained(config)
        return config.run_dir

    return finish


def test_pairs_that_the_model_was_trained_on_do_not_calibrate(capsys, trained_on_pairs, pairs, tmp_path):
    model, noisy = trained_on_pairs(None), tmp_path / "noisy"
    capsys.readouterr()
    with tiny.untrained():
        assert add_noise(model, pairs, noisy) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "not calibrated" in line]
    assert f"{model} was trained on pairs of {pairs / 'shard-000001.tar'}; give others afterwards" in line
    assert line.endswith(f"lit-het calibrate {noisy} --data OTHERS")
    assert read_calibration(noisy, 4) is None
    assert add_noise(model, pairs, noisy) == 0
    assert "is finished: 4 steps" in capsys.readouterr().err


def test_pairs_of_the_models_training_are_refused_for_a_head_of_other_pairs(capsys, trained_on_pairs, pairs, tmp_path):
    model, noisy = trained_on_pairs(None), tmp_path / "noisy"
    others = tiny.write_data(tmp_path / "others", num_samples=noise.LEAST_PAIRS, seed=5) / "train"
    with tiny.untrained():
        assert add_noise(model, others, noisy) == 0
    assert read_calibration(noisy, 4) is not None
    line = refusal(capsys, "calibrate", noisy, "--data", pairs)
    assert f"{model}, from which {noisy} has its towers, was trained on images of {pairs / 'shard-000000.tar'}" in line
    # A run of lit-het train that locks both towers is told so at its end, without the command that would fail again.
    (noisy / "calibration.json").unlink()
    config = load_config(noisy)
    data = dataclasses.replace(config.data, shards=(str(pairs),), embeddings=None, text_embeddings=None)
    config = dataclasses.replace(config, data=data)
    tiny.edit_config(noisy, config)
    training.calibrate_held_out(config, 4, split(config, noise.LEAST_PAIRS))
    line = capsys.readouterr().err.splitlines()[-1]
    assert "not calibrated: " in line
    assert line.endswith(f"take others: lit-het calibrate {noisy} --data OTHERS")


def test_pairs_that_the_model_held_out_calibrate(trained_on_pairs, pairs, tmp_path):
    model = trained_on_pairs(Portion(90))
    with tiny.untrained():
        assert add_noise(model, pairs, tmp_path / "noisy") == 0
    calibration = read_calibration(tmp_path / "noisy", 4)
    assert calibration is not None
    assert calibration.portion == "90%:100%"


@pytest.mark.parametrize("deterministic", ["softmax"], indirect=True)
def test_a_broken_shard_is_named(capsys, deterministic, pairs, tmp_path):
    def line(shards):
        return refusal(capsys, "add-noise", "--model", deterministic, "--data", shards, "--output", tmp_path / "x")

    (tmp_path / "garbage").mkdir()
    (tmp_path / "garbage/0.tar").write_bytes(np.random.default_rng(0).bytes(20_000))
    assert "0.tar: is not an uncompressed tar" in line(tmp_path / "garbage")
    assert "--captions" not in line(tmp_path / "garbage")
    cut = shutil.copytree(pairs, tmp_path / "cut") / "shard-000001.tar"
    cut.write_bytes(cut.read_bytes()[:-200_000])
    found = line(tmp_path / "cut")
    assert "shard-000001.tar: is truncated or damaged at byte" in found
    assert "too few to learn noise from; give 1,000 or more" in found


@pytest.mark.parametrize("deterministic", ["softmax"], indirect=True)
def test_a_wrong_place_of_captions_leaves_nothing_behind(capsys, deterministic, pairs, tmp_path):
    given = ("--model", deterministic, "--data", pairs, "--output", tmp_path / "noisy", *SHORT)
    line = refusal(capsys, "add-noise", *given, "--captions", "txt/caption")
    assert "none of 100 captions can be read: " in line
    assert "shard-000000.tar: key 0000: nothing in .txt" in line
    assert line.endswith("name their place with --captions")
    assert not (tmp_path / "noisy").exists()
    with tiny.untrained():
        assert main(["add-noise", *map(str, given), "--calibration", "None"]) == 0


@pytest.mark.parametrize("deterministic", ["softmax"], indirect=True)
def test_embeddings_for_another_head_are_refused_with_the_flags_to_change(
    capsys, monkeypatch, deterministic, pairs, tmp_path
):
    with monkeypatch.context() as patched:
        patched.setattr("lit_het.apps.noise.train_unless_done", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        assert add_noise(deterministic, pairs, tmp_path / "noisy") == 130
    given = ("--model", deterministic, "--data", pairs, "--output", tmp_path / "noisy", "--task.head", "bayes_vlm")
    assert main(["add-noise", *map(str, given)]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "/images holds embeddings made for another model or another --task.head; choose another --output" in line
    assert line.endswith("or other --data.embeddings and --data.text-embeddings")
