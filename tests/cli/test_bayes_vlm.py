"""`lit-het add-noise --task.head bayes_vlm` and `lit-het data select`: a posterior without training, and its use."""

import csv
import dataclasses
import shutil
import tarfile

import jax
import numpy as np
import pytest
import safetensors.numpy

import lit_het
from lit_het.cli.main import main
from lit_het.configs import quickstart_lit_het_xl
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.writing import expand
from lit_het.errors import UserError
from lit_het.heads import bayes_vlm_fit
from lit_het.heads.base import unit
from lit_het.heads.bayes_vlm import LastLayer
from lit_het.heads.contrastive import DeterministicContrastiveConfig
from lit_het.losses.contrastive.gauss_newton import softmax_hessian
from lit_het.models.calibration import fitting
from lit_het.models.calibration.saved import read_calibration
from lit_het.models.opening import open_run
from lit_het.training.directory import load_config
from lit_het.training.durations import Duration
from lit_het.weights import cards
from lit_het.weights.native import checksums
from tests import tiny
from tests.cli.conftest import last_line, refusal, run_command
from tests.cli.test_uncertainty_methods import IMAGE, NAMES
from tests.losses.contrastive_cases import mesh_of

LABELS = ",".join(NAMES)


@pytest.fixture(scope="module")
def deterministic(data, upstream, tmp_path_factory):
    """A run without noise."""
    folder = tmp_path_factory.mktemp("runs") / "deterministic"
    config = tiny.shrink(quickstart_lit_het_xl.get_config(), data, folder, pretrained=upstream)
    task = dataclasses.replace(config.task, head=DeterministicContrastiveConfig())
    tiny.finish_untrained(dataclasses.replace(config, task=task))
    return folder


def arguments(model, pairs, output, *flags):
    # The last pairs of every class in turn: among those by a hash an untrained model fits no temperature.
    given = ("--task.head", "bayes_vlm", "--calibration", "90%:", *flags)
    return ["add-noise", *map(str, ("--model", model, "--data", pairs, "--output", output, *given))]


@pytest.fixture(scope="module")
def posterior(deterministic, pairs, tmp_path_factory):
    """The run with a posterior; tests only read it."""
    output = tmp_path_factory.mktemp("runs") / "posterior"
    run_command(*arguments(deterministic, pairs, output))
    return output


@pytest.fixture(scope="module")
def fitted(posterior):
    return lit_het.load(posterior)


@pytest.fixture
def refit(deterministic, posterior, pairs, tmp_path):
    """Returns a function that fits another posterior to the same embeddings, and returns its run."""

    def fit(*flags):
        shutil.copytree(posterior / "embeddings", tmp_path / "run/embeddings")
        run_command(*arguments(deterministic, pairs, tmp_path / "run", *flags))
        return tmp_path / "run"

    return fit


@pytest.mark.slow
def test_predictions_without_noise_stay_and_the_run_is_calibrated(deterministic, posterior):
    before, after = open_run(deterministic), open_run(posterior)
    for tower in ("image_tower", "text_tower"):
        assert checksums.digest(after.params[tower]) == checksums.digest(before.params[tower])
    old, new = (lit_het.load(run, calibrated=False) for run in (deterministic, posterior))
    np.testing.assert_allclose(new.encode_images(IMAGE), old.encode_images(IMAGE), atol=1e-6)
    np.testing.assert_allclose(new.encode_texts(NAMES), old.encode_texts(NAMES), atol=1e-6)
    expected = old.classify(IMAGE, NAMES).to_numpy()
    np.testing.assert_allclose(new.classify(IMAGE, NAMES, samples=0).to_numpy(), expected, atol=1e-6)
    assert new.noise(IMAGE) > 0
    noisy = new.classify(IMAGE, NAMES).noisy_mean
    assert noisy is not None
    assert np.abs(noisy - expected).max() > 1e-3
    calibration = read_calibration(posterior, after.step)
    assert calibration is not None
    assert (calibration.num_images, calibration.portion) == (100, "90%:100%")
    assert after.config.length == Duration(0)
    assert " steps" not in cards.write_card(after, "name", licence=None, library="lit-het")


@pytest.mark.slow
def test_the_pass_reads_every_pair_once_but_those_that_calibrate(monkeypatch, refit):
    read, whole = [], bayes_vlm_fit.pair_factors

    def recorded(layer, others, *rest):
        read.append((np.asarray(layer.outputs), np.asarray(others)))
        return whole(layer, others, *rest)

    monkeypatch.setattr(bayes_vlm_fit, "pair_factors", recorded)
    monkeypatch.setattr(fitting, "calibrate_held_out", lambda *_: None)
    refit("--task.head.num-negatives", 400, "--data.batch-size", 128)
    # 900 of 1,000 pairs, in three equal batches, once for each side.
    assert [len(embeddings) for embeddings, _ in read] == [300] * 6
    images = np.concatenate([embeddings for embeddings, _ in read[::2]])
    np.testing.assert_array_equal(images, np.concatenate([others for _, others in read[1::2]]))
    assert len(np.unique(images, axis=0)) == 900


def break_images(embeddings, numbers):
    """Stores embeddings as of images that cannot be read."""
    for file in (embeddings / "images").glob("*.safetensors"):
        with safetensors.safe_open(file, "numpy") as stored:
            arrays, metadata = {name: stored.get_tensor(name) for name in stored.keys()}, stored.metadata()  # noqa: SIM118
        arrays["embeddings"][numbers] = np.nan
        safetensors.numpy.save_file(arrays, file, metadata)


@pytest.mark.slow
def test_pairs_that_cannot_be_read_are_left_out(capsys, deterministic, posterior, fitted, pairs, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(posterior / "embeddings", output / "embeddings")
    break_images(output / "embeddings", slice(3, 4))
    uncalibrated = "--calibration", "None"
    run_command(*arguments(deterministic, pairs, output, "--data.max-bad-fraction", 0.002, *uncalibrated))
    assert "posterior of the image side: 998 pairs" in capsys.readouterr().err
    assert lit_het.load(output).noise(IMAGE) == pytest.approx(fitted.noise(IMAGE), rel=0.1)
    shutil.rmtree(output / "checkpoints")
    break_images(output / "embeddings", slice(None))
    line = last_line(capsys, *arguments(deterministic, pairs, output, "--data.max-bad-fraction", 1, *uncalibrated))
    assert "can be read; a posterior needs two or more" in line


@pytest.mark.slow
def test_an_interrupted_pass_is_continued_and_a_finished_one_stays(
    capsys, monkeypatch, deterministic, posterior, pairs, tmp_path
):
    output = tmp_path / "run"
    shutil.copytree(posterior / "embeddings", output / "embeddings")
    with monkeypatch.context() as patched:
        patched.setattr("lit_het.heads.bayes_vlm_fit.pair_factors", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(arguments(deterministic, pairs, output)) == 130
    capsys.readouterr()
    monkeypatch.setattr(fitting, "calibrate_held_out", lambda *_: None)
    run_command(*arguments(deterministic, pairs, output))
    assert "2 of 2 shards already have embeddings" in capsys.readouterr().err
    assert checksums_of(output) == checksums_of(posterior)
    run_command(*arguments(deterministic, pairs, output))
    assert "is finished" in capsys.readouterr().err
    line = refusal(capsys, *arguments(deterministic, pairs, output, "--task.head.pseudo-data-count", 1))
    assert "task.head.pseudo_data_count was 100.0 and is now 1.0" in line


def checksums_of(run_dir):
    return {side: checksums.digest(params) for side, params in open_run(run_dir).params["head"].items()}


@pytest.mark.slow
def test_more_pseudo_data_makes_the_model_surer(fitted, refit):
    flags = ("--task.head.pseudo-data-count", 1000, "--task.head.prediction", "probit", "--calibration", "None")
    surer = lit_het.load(refit(*flags))
    assert 0 < surer.noise(IMAGE) < fitted.noise(IMAGE)
    # The closed form does not depend on the seed.
    one, other = (surer.classify(IMAGE, NAMES, seed=seed) for seed in range(2))
    assert one.noisy_mean is not None
    np.testing.assert_array_equal(one.noisy_mean, other.noisy_mean)
    assert one.band is None
    assert one.num_samples == 0


@pytest.mark.slow
def test_variances_that_overflow_are_no_prediction(fitted):
    head = fitted.run.params["head"]
    wide = {side: jax.tree.map(lambda root: 1e30 * root, head[side]) for side in head if side.endswith("_posterior")}
    model = lit_het.Model(dataclasses.replace(fitted.run, params=fitted.run.params | {"head": head | wide}))
    with pytest.raises(UserError, match="model are not finite: its variances or embeddings overflow"):
        model.classify(IMAGE, NAMES)


@pytest.mark.slow
@pytest.mark.devices
def test_factors_do_not_depend_on_blocks_and_devices(monkeypatch):
    random = np.random.default_rng(0)
    outputs, others, inputs = (jax.device_put(random.normal(size=(30, d)).astype(np.float32)) for d in (6, 6, 9))
    tau = jax.device_put(np.float32(0.1))

    @jax.jit
    def hessian(layer, others, counted):
        return layer.inputs.T @ layer.inputs, softmax_hessian(layer.outputs, unit(others), counted, tau)

    layer = LastLayer(outputs, inputs)
    expected = hessian(layer, others, np.ones(30, np.float32))
    monkeypatch.setattr(bayes_vlm_fit, "_COSINES", 30 * 8)
    for devices in (1, 8):
        found = bayes_vlm_fit.pair_factors(layer, others, hessian, mesh_of(devices))
        np.testing.assert_allclose(found.inputs, expected[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.outputs, expected[1], rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_what_has_no_posterior_is_one_line(capsys, config_file, deterministic, posterior, pairs, tmp_path):
    line = refusal(capsys, "train", "--config", config_file, "--task.head", "bayes_vlm", "--run-dir", tmp_path / "x")
    assert "this --task.head has nothing to train" in line
    output = tmp_path / "run"
    line = refusal(capsys, *arguments(deterministic, pairs, output, "--data.text-embeddings", "None"))
    assert "a posterior is fitted to stored embeddings; leave out --data.text-embeddings None" in line
    shutil.copytree(posterior / "embeddings", output / "embeddings")
    line = last_line(capsys, *arguments(deterministic, pairs, output, "--task.head.pseudo-data-count", "1e300"))
    assert "side are not finite; choose another --task.head.pseudo-data-count" in line
    # Embeddings of another tower.
    shutil.rmtree(output / "embeddings/images")
    shutil.copytree(posterior / "embeddings/texts", output / "embeddings/images")
    line = refusal(capsys, *arguments(deterministic, pairs, output))
    assert "embeddings/images holds embeddings made for another model or another --task.head" in line
    for flag in (
        ("--length", "7"),
        ("--schedule.learning-rate=1e-4",),
        ("--optimizer.weight-decay", "0.1"),
        ("--seed", "3"),
    ):
        name = flag[0].partition("=")[0]
        line = refusal(capsys, *arguments(deterministic, pairs, tmp_path / "y", *flag))
        assert line == f"lit-het: {name}: this --task.head trains nothing; leave the flag out"
    assert not (tmp_path / "y").exists()


def selected(run, pool, output, *flags):
    run_command("data", "select", "--checkpoint", run, "--pool", pool, "--labels", LABELS, "--output", output, *flags)
    with output.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["bald", "epig", "entropy", "random"])
def test_the_images_that_say_most_are_selected(posterior, held_out, data, tmp_path, method):
    target = ("--target", data / "train") if method == "epig" else ()
    rows = selected(posterior, held_out, tmp_path / "s.csv", "--method", method, "--count", 5, "--samples", 8, *target)
    assert len({(row["shard"], row["key"]) for row in rows}) == 5
    scores = [float(row[method]) for row in rows]
    assert scores == sorted(scores, reverse=True)
    assert min(scores) > 0
    # The first three are the same where fewer are asked for.
    fewer = selected(posterior, held_out, tmp_path / "t.csv", "--method", method, "--count", 3, "--samples", 8, *target)
    assert fewer == rows[:3]


@pytest.mark.slow
def test_selected_samples_are_shards_with_all_members_that_train_and_few_shot_take(
    posterior, held_out, config_file, data, tmp_path
):
    chosen = tmp_path / "chosen"
    rows = selected(posterior, held_out, tmp_path / "s.csv", "--count", 80, "--samples", 8, "--to", chosen)
    (shard,) = chosen.glob("*.tar")
    found = members_of(shard)
    assert list(dict.fromkeys(name.partition(".")[0] for name in found)) == [row["key"] for row in rows]
    pool = {name: content for path in held_out.glob("*.tar") for name, content in members_of(path).items()}
    keys = {row["key"] for row in rows}
    assert found == {name: content for name, content in pool.items() if name.partition(".")[0] in keys}
    assert (chosen / "classnames.txt").read_bytes() == (held_out / "classnames.txt").read_bytes()
    with tiny.untrained():
        run_command("train", "--config", config_file, "--data.shards", chosen, "--calibration", "None")
    config = load_config(tmp_path / "lit")
    assert config.tokenizer is not None
    batches = Loader(config.data, config.tokenizer.build()).epoch()
    assert sum(batch.valid.sum() for batch in batches) == 80
    output = tmp_path / "few.json"
    few = ("--data", f"shapes={data / 'train'}", "--train-split", chosen, "--output", output)
    run_command("few-shot", "--checkpoint", posterior, *few)
    assert "few_shot/shapes/1_shot" in output.read_text()


def members_of(path):
    """Returns the content of every member of a tar, in order."""
    with tarfile.open(path) as tar:
        return {member.name: content.read() for member in tar if (content := tar.extractfile(member))}


@pytest.mark.slow
def test_equal_keys_of_different_shards_stay_apart(posterior, held_out, tmp_path):
    pool, chosen = tmp_path / "pool", tmp_path / "chosen"
    for name in ("a", "b"):
        shutil.copytree(held_out, pool / name)
    selected(posterior, f"{pool}/*/*.tar", tmp_path / "s.csv", "--count", 320, "--samples", 2, "--to", chosen)
    index = ShardIndex(expand(chosen), ["image", "txt", "cls"])
    assert len(index) == 320
    assert not index.summaries[0].faults


def test_noise_of_every_image_alone_gives_bald_and_no_epig(capsys, trained_lit, held_out, data, tmp_path):
    run = trained_lit.run_dir
    rows = selected(run, held_out, tmp_path / "s.csv", "--count", 4, "--samples", 8)
    assert [row["bald"] for row in rows] == sorted((row["bald"] for row in rows), key=float, reverse=True)
    line = refusal(
        capsys, "data", "select", "--checkpoint", run, "--pool", held_out, "--labels", LABELS, "--count", 4,
        "--output", tmp_path / "x.csv", "--method", "epig", "--target", data / "train",
    )  # fmt: skip
    assert "draws its noise for every image alone" in line


@pytest.mark.slow
def test_what_cannot_be_selected_is_one_line(capsys, deterministic, posterior, held_out, data, tmp_path):
    def line(run, *flags, output=tmp_path / "x.csv", count=4):
        given = ("--checkpoint", run, "--pool", held_out, "--labels", LABELS, "--count", count, "--output", output)
        return refusal(capsys, "data", "select", *given, *flags)

    assert "has no noise to compare samples of; take --method entropy" in line(deterministic)
    assert "--target SHARDS and --method epig belong together" in line(posterior, "--method", "epig")
    assert "--target SHARDS and --method epig belong together" in line(posterior, "--target", data / "train")
    assert "has 160 images; lower --count 161" in line(posterior, count=161)
    assert "--method bald compares samples; give --samples 2 or more" in line(posterior, "--samples", 1)
    assert "must end in .csv or .parquet" in line(posterior, output=tmp_path / "x.txt")
    assert "is the only label" in line(posterior, "--labels", "cat")
    assert "is not an empty folder; choose another one" in line(posterior, "--to", data)
    assert not (tmp_path / "x.csv").exists()
