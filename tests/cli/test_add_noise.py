"""`lit-het add-noise`: a finished model gets noise, and keeps its towers."""

import shutil

import numpy as np
import pytest
from PIL import Image

import lit_het
from lit_het.apps import add_noise as noise
from lit_het.cli.main import main
from lit_het.configs import quickstart_lit_het_xl
from lit_het.data_pipelines.shards.portions import Portion
from lit_het.heads.contrastive import DeterministicContrastiveConfig, HetXLContrastiveConfig
from lit_het.heads.temperature import LogTemperature
from lit_het.losses.contrastive import SigmoidLoss
from lit_het.models.calibration.saved import read_calibration
from lit_het.models.calibration.split import split
from lit_het.models.opening import open_run
from lit_het.tasks.two_towers import ContrastiveTask
from lit_het.training import train
from lit_het.training.directory import load_config
from lit_het.weights.native import checksums
from tests import tiny
from tests.cli.conftest import changed, last_line, refusal

NAMES = [f"{colour} {shape}" for colour in tiny.COLOURS for shape in tiny.SHAPES]

SHORT = ("--length", "4 steps", "--data.batch-size", "16", "--schedule.warmup", "1 steps")


@pytest.fixture(scope="module")
def deterministic(data, upstream, tmp_path_factory):
    """A run without noise, of a sigmoid loss; tests only read it."""
    run_dir = tmp_path_factory.mktemp("models") / "sigmoid"
    config = tiny.shrink(quickstart_lit_het_xl.get_config(), data, run_dir, pretrained=upstream)
    head = DeterministicContrastiveConfig(initial_bias=-3.0)
    tiny.finish_untrained(changed(config, task__head=head, task__loss=SigmoidLoss()))
    return run_dir


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Pairs that no run was trained on, and no calibration has seen; tests only read them."""
    return tiny.write_data(tmp_path_factory.mktemp("others"), num_samples=noise.LEAST_PAIRS, seed=5) / "train"


def arguments(model, pairs, output, *flags):
    return ["add-noise", *map(str, ("--model", model, "--data", pairs, "--output", output, *SHORT, *flags))]


def add_noise(*given):
    return main(arguments(*given))


@pytest.fixture(scope="module")
def noisy(deterministic, pairs, tmp_path_factory):
    """A run with noise; tests only read it."""
    output = tmp_path_factory.mktemp("runs") / "noisy"
    assert add_noise(deterministic, pairs, output) == 0
    return output


@pytest.fixture
def output(noisy, tmp_path):
    """The folder of a run with noise that is to be made; the embeddings of its model are there."""
    shutil.copytree(noisy / "embeddings", tmp_path / "noisy/embeddings")
    return tmp_path / "noisy"


def image():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8))


@pytest.mark.slow
def test_the_embeddings_stay_and_only_the_head_is_trained(capsys, deterministic, noisy, pairs):
    before, after = open_run(deterministic), open_run(noisy)
    for tower in ("image_tower", "text_tower"):
        assert checksums.digest(after.params[tower]) == checksums.digest(before.params[tower])
    assert isinstance(before.task, ContrastiveTask)
    assert isinstance(after.task, ContrastiveTask)
    assert after.task.config.loss == before.task.config.loss
    assert isinstance(after.task.config.head, HetXLContrastiveConfig)
    # τ and the bias start at those of the model.
    start = LogTemperature(initial=float(before.task.temperature(before.params)))
    assert after.task.config.head.temperature == start
    assert after.task.config.head.initial_bias == before.task.config.head.initial_bias == -3
    old, new = lit_het.load(deterministic), lit_het.load(noisy)
    np.testing.assert_allclose(new.encode_images(image()), old.encode_images(image()), atol=1e-6)
    np.testing.assert_allclose(new.encode_texts(NAMES), old.encode_texts(NAMES), atol=1e-6)
    assert new.noise(image()) > 0
    assert new.classify(image(), NAMES).noisy_mean is not None

    capsys.readouterr()
    assert add_noise(deterministic, pairs, noisy) == 0
    assert "is finished: 4 steps" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_of_another_library_with_a_given_tokenizer_becomes_a_run_that_moves_and_is_exported(
    capsys, siglip, pairs, others, data, tmp_path
):
    line = last_line(capsys, *arguments(siglip, pairs, tmp_path / "noisy"))
    assert "siglip.npz has no tokenizer; import it with --tokenizer FILE" in line
    given = (tmp_path / "noisy", "--tokenizer", data / "tokenizer.model")
    with tiny.untrained():
        assert add_noise(siglip, pairs, *given) == 0
    # A second call with another model or other data changes nothing.
    other = siglip.with_name("other.npz")
    shutil.copy(siglip, other)
    assert "was imported from another --model" in refusal(capsys, *arguments(other, pairs, *given))
    line = refusal(capsys, *arguments(siglip, others, *given))
    assert "data.shards was" in line
    assert line.endswith("use the same values or another --output")
    assert sorted(path.name for path in (tmp_path / "noisy/embeddings").iterdir()) == ["images", "texts"]
    assert str(load_config(tmp_path / "noisy").calibration) == "87%:100% by sample"
    expected = lit_het.load(tmp_path / "noisy").classify(image(), NAMES).to_numpy()
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "noisy", tmp_path / "elsewhere/noisy")
    siglip.unlink()
    moved = lit_het.load(tmp_path / "elsewhere/noisy")
    np.testing.assert_array_equal(moved.classify(image(), NAMES).to_numpy(), expected)
    moved.save_pretrained(tmp_path / "folder")
    assert lit_het.load(tmp_path / "folder").noise(image()) == moved.noise(image())


@pytest.mark.slow
def test_what_cannot_get_noise_is_one_line(capsys, upstream, trained_lit, deterministic, pairs, data, tmp_path):
    def line(model, shards, *flags, output=tmp_path / "x"):
        return refusal(capsys, "add-noise", "--model", model, "--data", shards, "--output", output, *flags)

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
    assert "is the model itself; choose another --output" in line(deterministic, pairs, output=deterministic)
    assert "is an address; give --output a local" in line(deterministic, pairs, output="gs://bucket/run")


def test_help_and_refusal_name_what_the_command_needs(capsys):
    assert main(["add-noise", "--help"]) == 0
    assert "--captions MEMBER" in capsys.readouterr().out
    assert "add-noise needs --model ADDRESS, --data SHARDS and --output RUN" in refusal(capsys, "add-noise")


@pytest.mark.slow
def test_help_lists_the_fields_of_a_model_and_its_new_head(capsys, deterministic, pairs, tmp_path):
    with pytest.raises(SystemExit, match="0"):
        add_noise(deterministic, pairs, tmp_path / "x", "--task.head", "prob_vlm", "--help")
    text = capsys.readouterr().out
    for field in ("--captions", "--task.head.hidden-size", "--length", "--data.max-bad-fraction", "--schedule.warmup"):
        assert field in text
    assert not (tmp_path / "x").exists()


def trained_on(pairs, run_dir, deterministic, calibration):
    """Returns a run without noise that was trained on the pairs, but those it holds out."""
    config = load_config(shutil.copytree(deterministic, run_dir))
    config = changed(config, run_dir=run_dir, data__shards=(str(pairs),), calibration=calibration)
    tiny.edit_config(run_dir, config)
    return run_dir


@pytest.mark.slow
def test_pairs_that_the_model_was_trained_on_do_not_calibrate(capsys, deterministic, pairs, output, tmp_path):
    model, noisy = trained_on(pairs, tmp_path / "model", deterministic, None), output
    with tiny.untrained():
        assert add_noise(model, pairs, noisy) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "not calibrated" in line]
    assert f"{model} was trained on pairs of {pairs / 'shard-000000.tar'}; give others afterwards" in line
    assert line.endswith(f"lit-het calibrate {noisy} --data OTHERS")
    assert read_calibration(noisy, 4) is None
    assert add_noise(model, pairs, noisy) == 0
    assert "is finished: 4 steps" in capsys.readouterr().err


@pytest.mark.slow
def test_pairs_of_the_models_training_are_refused_for_a_head_of_other_pairs(
    capsys, deterministic, pairs, others, tmp_path
):
    model, noisy = trained_on(pairs, tmp_path / "model", deterministic, None), tmp_path / "noisy"
    with tiny.untrained():
        assert add_noise(model, others, noisy, "--calibration", "90%:") == 0
    assert read_calibration(noisy, 4) is not None
    line = refusal(capsys, "calibrate", noisy, "--data", pairs)
    assert f"{model}, from which {noisy} has its towers, was trained on images of {pairs / 'shard-000000.tar'}" in line
    # A run of lit-het train that locks both towers is told so at its end, without the command that would fail again.
    (noisy / "calibration.json").unlink()
    config = load_config(noisy)
    data = changed(config.data, shards=(str(pairs),), embeddings=None, text_embeddings=None)
    config = changed(config, data=data)
    tiny.edit_config(noisy, config)
    train.calibrate_held_out(config, 4, split(config, noise.LEAST_PAIRS))
    line = capsys.readouterr().err.splitlines()[-1]
    assert "not calibrated: " in line
    assert line.endswith(f"take others: lit-het calibrate {noisy} --data OTHERS")


@pytest.mark.slow
def test_pairs_that_the_model_held_out_calibrate(deterministic, pairs, output, tmp_path):
    model = trained_on(pairs, tmp_path / "model", deterministic, Portion(90))
    with tiny.untrained():
        assert add_noise(model, pairs, output, "--calibration", "90%:") == 0
    calibration = read_calibration(output, 4)
    assert calibration is not None
    assert calibration.portion == "90%:100%"


@pytest.mark.slow
def test_a_broken_shard_is_named(capsys, deterministic, pairs, tmp_path):
    def line(shards):
        return refusal(capsys, *arguments(deterministic, shards, tmp_path / "x"))

    (tmp_path / "garbage").mkdir()
    (tmp_path / "garbage/0.tar").write_bytes(np.random.default_rng(0).bytes(20_000))
    assert "0.tar: is not an uncompressed tar" in line(tmp_path / "garbage")
    assert "--captions" not in line(tmp_path / "garbage")
    cut = shutil.copytree(pairs, tmp_path / "cut") / "shard-000001.tar"
    cut.write_bytes(cut.read_bytes()[:-200_000])
    found = line(tmp_path / "cut")
    assert "shard-000001.tar: is truncated or damaged at byte" in found
    assert "too few to learn noise from; give 1,000 or more" in found


@pytest.mark.slow
def test_a_wrong_place_of_captions_leaves_nothing_behind(capsys, deterministic, noisy, pairs, tmp_path):
    line = refusal(capsys, *arguments(deterministic, pairs, tmp_path / "noisy", "--captions", "txt/caption"))
    assert "none of 100 captions can be read: " in line
    assert "shard-000000.tar: key 0000: nothing in .txt" in line
    assert line.endswith("name their place with --captions")
    assert not (tmp_path / "noisy").exists()
    shutil.copytree(noisy / "embeddings", tmp_path / "noisy/embeddings")
    with tiny.untrained():
        assert add_noise(deterministic, pairs, tmp_path / "noisy", "--calibration", "None") == 0


@pytest.mark.slow
def test_embeddings_for_another_head_are_refused_with_the_flags_to_change(capsys, deterministic, pairs, output):
    given = ("--model", deterministic, "--data", pairs, "--output", output, "--task.head", "bayes_vlm")
    line = last_line(capsys, "add-noise", *given)
    assert "/images holds embeddings made for another model or another --task.head; choose another --output" in line
    assert line.endswith("or other --data.embeddings and --data.text-embeddings")
