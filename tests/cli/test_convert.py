"""Other programs' weights become runs, towers of configurations, and files of other programs again."""

import dataclasses
import functools
import http.server
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import lit_het
from lit_het import parameters
from lit_het.cli.main import main
from lit_het.configs import experiment
from lit_het.data_pipelines.images.transforms import Preprocessing
from lit_het.data_pipelines.texts.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer
from lit_het.data_pipelines.texts.tokenizers_config import TensorFlowTextConfig
from lit_het.errors import UserError
from lit_het.models.opening import open_run
from lit_het.models.pretrained import abstract_params, load_pretrained
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.two_towers import ContrastiveTask
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.weights import formats
from lit_het.weights.big_vision.exporting import write_npz
from lit_het.weights.huggingface.tokenizer import tokenizer_files
from lit_het.weights.importing import tokenizer_config
from lit_het.weights.native import checksums
from tests import tiny
from tests.cli.conftest import changed, write_config_file
from tests.cli.conftest import last_line as refusal
from tests.cli.conftest import run_command as run

GOLDEN = Path(__file__).parents[1] / "golden"


def params_of(run_dir):
    return open_run(run_dir).params


def test_an_imported_model_scores_as_recorded_and_survives_export_and_import(siglip, data, tmp_path):
    run("import", "--from", siglip, "--to", tmp_path / "run", "--tokenizer", data / "tokenizer.model")
    opened = open_run(tmp_path / "run")
    with np.load(GOLDEN / "two_towers_siglip.npz") as golden:
        assert isinstance(opened.task, ContrastiveTask)
        words = jax.jit(opened.task.encode_text)(opened.params, golden["text"])
        np.testing.assert_allclose(words, golden["ztxt"], atol=1e-5)
        temperature = nnx.merge(opened.task.graph, opened.params).head.temperature()
        np.testing.assert_allclose(temperature, np.exp(-golden["params/t"][0]), rtol=1e-5)

    checksum = checksums.digest(opened.params)
    for to, name in (("npz", "again.npz"), ("lit-het", "folder")):
        run("export", "--checkpoint", tmp_path / "run", "--to", to, "--output", tmp_path / name)
        again = tmp_path / f"run_of_{to}"
        # The folder brings its own tokenizer.
        tokenizer = ("--tokenizer", data / "tokenizer.model") if to == "npz" else ()
        run("import", "--from", tmp_path / name, "--to", again, *tokenizer)
        assert checksums.digest(params_of(again)) == checksum
        theirs, ours = (experiment.load(run / "config.json").tokenizer for run in (again, tmp_path / "run"))
        assert changed(theirs, model=Path()) == changed(ours, model=Path())


def test_a_tower_alone_becomes_a_run_whose_tower_others_can_lock(tmp_path):
    run("import", "--from", GOLDEN / "hf_vit", "--to", tmp_path / "vit")
    config = experiment.load(tmp_path / "vit" / "config.json")
    assert isinstance(config.task, ClassificationConfig)
    assert isinstance(config.task.image_tower, ViTConfig)
    assert config.task.image_tower.representation_size == 24
    shapes = abstract_params(config.task.build())["image_tower"]
    locking = changed(config, pretrained=experiment.PretrainedConfig(tmp_path / "vit"))
    loaded = load_pretrained(locking, {"image_tower": shapes})
    assert parameters.count(loaded) == parameters.count(shapes)


@pytest.fixture
def lit_on_siglip(lit_config, siglip):
    """A LiT run that locks the image tower of a file, of which it takes the part that it needs."""
    source = f"{siglip}:img"
    tower = formats.image_tower(source, image_size=24)
    task = changed(lit_config.task, image_tower=tower, text_tower__embedding_size=tower.embedding_size)
    return changed(lit_config, task=task, data__image_size=24, pretrained=None)


@pytest.mark.slow
def test_training_starts_from_a_locked_file_and_finds_it_again(lit_on_siglip, siglip):
    tiny.finish_untrained(lit_on_siglip)
    opened = open_run(lit_on_siglip.run_dir)
    with np.load(siglip) as file:
        kernel = file["params/img/embedding/kernel"].reshape(48, 16)
    np.testing.assert_array_equal(opened.params["image_tower"]["patches"]["kernel"], kernel)
    assert opened.params["image_tower"]["positions"].shape == (36, 16)  # resampled for 24 pixels

    # The file may move, byte for byte.
    moved = siglip.rename(siglip.with_name("moved.npz"))
    with pytest.raises(UserError, match=r"siglip.npz does not exist"):
        open_run(lit_on_siglip.run_dir)
    again = open_run(lit_on_siglip.run_dir, moved)
    assert checksums.digest(again.params) == checksums.digest(opened.params)
    siglip = moved.rename(siglip)

    with np.load(siglip) as file:
        changed = {name: array + 1 for name, array in file.items()}
    np.savez(siglip, **changed)
    with pytest.raises(UserError, match="the files named as `weights` are not those"):
        open_run(lit_on_siglip.run_dir)


@pytest.mark.slow
def test_a_tower_that_is_locked_in_part_is_found_again(lit_on_siglip, monkeypatch, tmp_path):
    locked = ("image_tower/encoder/.*", "image_tower/patches/.*")
    # Named relative to where training ran, found from elsewhere.
    monkeypatch.chdir(tmp_path)
    config = changed(lit_on_siglip, task__locked=locked, task__image_tower__weights="siglip.npz:img")
    tiny.finish_untrained(config)
    monkeypatch.chdir("/")
    assert open_run(lit_on_siglip.run_dir).params["image_tower"]["positions"].shape == (36, 16)


@pytest.mark.slow
def test_a_text_tower_without_a_last_layer_is_given_one(lit_config):
    bert = formats.text_tower(str(GOLDEN / "hf_bert"), text_length=6)
    assert (bert.embedding_size, bert.length) == (24, 6)
    wider = changed(bert, projection_size=64, pooler=False)
    assert lit_config.tokenizer is not None
    tokenizer = dataclasses.replace(lit_config.tokenizer, padding_id=wider.padding_id)
    tiny.finish_untrained(changed(lit_config, task__text_tower=wider, tokenizer=tokenizer))
    params = params_of(lit_config.run_dir)["text_tower"]
    assert params["projection"]["kernel"].shape == (24, 64)
    assert "pre_logits" not in params


def test_a_tower_of_other_sizes_than_the_files_names_field_and_flag(lit_on_siglip, capsys, tmp_path):
    path = write_config_file(lit_on_siglip, tmp_path / "lit.py")
    line = refusal(capsys, "train", "--config", path, "--task.image-tower.encoder.mlp-width", "48")
    assert "has encoder.mlp_width = 40, but this configuration has 48" in line
    assert "--task.image-tower.encoder.mlp-width 40" in line


def test_invalid_sources_are_a_one_line_error(capsys, tmp_path, siglip):
    siglip.write_bytes(siglip.read_bytes()[:5000])
    for source, message in (
        (tmp_path / "nothing", "does not exist"),
        (tmp_path, "has an unknown format"),
        (GOLDEN / "hf_bert", "only a text tower"),
        (siglip, "siglip.npz is not a readable .npz file"),
    ):
        assert message in refusal(capsys, "import", "--from", source, "--to", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_invalid_tokenizer_is_refused_before_anything_is_written(capsys, tmp_path, data):
    source = ("import", "--from", GOLDEN / "hf_siglip", "--to", tmp_path / "run")
    (tmp_path / "text.model").write_text("hello")
    assert "nope.model: cannot be read" in refusal(capsys, *source, "--tokenizer", tmp_path / "nope.model")
    assert "not a SentencePiece model" in refusal(capsys, *source, "--tokenizer", tmp_path / "text.model")
    assert not (tmp_path / "run").exists()
    run(*source, "--image-size", "30")
    written = capsys.readouterr().err
    assert "hf_siglip has no tokenizer that lit-het reads: captions need one, import it again with --tok" in written
    assert "the last 6 rows and columns are not seen; choose an image size of 24 or 32" in written
    line = refusal(capsys, "zero-shot", "--checkpoint", tmp_path / "run", "--data", data / "train")
    assert "has no tokenizer; import it again with --tokenizer" in line
    run("export", "--checkpoint", tmp_path / "run", "--to", "npz", "--output", tmp_path / "model.npz")


def test_a_tokenizer_may_be_of_hugging_face_or_a_vocabulary_of_bert(siglip, data, tmp_path):
    pieces = SentencePieceTokenizer((data / "tokenizer.model").read_bytes(), 6)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_files(pieces)["tokenizer.json"]))
    run("import", "--from", siglip, "--to", tmp_path / "run", "--tokenizer", tmp_path / "tokenizer.json")
    opened = open_run(tmp_path / "run")
    assert isinstance(opened.tokenizer, HuggingFaceTokenizer)
    ids = opened.tokenizer(["red bar"])[0].tolist()
    assert ids[:6] == pieces(["red bar"])[0, : len(ids)].tolist()

    # A pair of towers with a BERT is LiT's, whose captions had no end token.
    config = tokenizer_config(tmp_path / "vocab.txt", 12)
    assert config == TensorFlowTextConfig(tmp_path / "vocab.txt", 12, end_token=False)


def test_an_import_prepares_images_as_the_folders_processor_says(tmp_path, capsys):
    folder = shutil.copytree(GOLDEN / "hf_siglip", tmp_path / "siglip")
    (folder / "preprocessor_config.json").unlink(missing_ok=True)
    run("import", "--from", folder, "--to", tmp_path / "plain")
    assert preparation(tmp_path / "plain") == Preprocessing(filter="bicubic", transparency="dropped")  # as SigLIP's
    assert "preprocessing of" not in capsys.readouterr().err

    processor = {"do_center_crop": True, "size": {"shortest_edge": 40}, "crop_size": 32, "resample": 3, "do_pad": True}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    run("import", "--from", folder, "--to", tmp_path / "run")
    assert preparation(tmp_path / "run") == Preprocessing("crop", 0.8, "bicubic", "dropped")
    size = experiment.load(tmp_path / "run" / "config.json").data.image_size
    remarks = [line for line in capsys.readouterr().err.splitlines() if "preprocessing of" in line]
    assert [line.partition(f"{folder}: ")[2] for line in remarks] == [
        "do_pad = True is not supported",
        f"size: the processor makes 32 pixels, the tower takes {size}; see --image-size",
    ]

    run("export", "--checkpoint", tmp_path / "run", "--to", "huggingface", "--output", tmp_path / "out")
    run("import", "--from", tmp_path / "out", "--to", tmp_path / "again")
    assert preparation(tmp_path / "again") == Preprocessing("crop", 0.8, "bicubic", "dropped")


def preparation(run_dir):
    return experiment.load(run_dir / "config.json").data.preprocessing


def test_options_that_do_not_apply_to_a_source_are_refused(capsys, tmp_path):
    source = ("import", "--from", GOLDEN / "hf_siglip", "--to", tmp_path / "run")
    assert "leave out --text-pooling" in refusal(capsys, *source, "--text-pooling", "mean")
    assert "holds no experts; leave out --num-members" in refusal(capsys, *source, "--num-members", "2")
    assert "of which the last is pooled" in refusal(capsys, *source, "--text-length", "2")


def test_a_trained_run_with_noise_is_exported_without_it(capsys, trained_lit, data, tmp_path):
    export = ("export", "--checkpoint", trained_lit.run_dir, "--output", tmp_path / "model.npz", "--to")
    run(*export, "npz")
    options = ("--text-pooling", "mean", "--tokenizer", data / "tokenizer.model")
    line = refusal(capsys, "import", "--from", tmp_path / "model.npz", "--to", tmp_path / "run", *options)
    assert "sines and cosines" in line  # a file does not tell how large its images are
    options += ("--image-size", trained_lit.data.image_size)
    run("import", "--from", tmp_path / "model.npz", "--to", tmp_path / "run", *options)
    in_python = lit_het.ImportOptions(image_size=trained_lit.data.image_size, text_pooling="mean")
    with_tokenizer = changed(in_python, tokenizer=data / "tokenizer.model")
    loaded = lit_het.load(tmp_path / "model.npz", options=with_tokenizer)
    assert checksums.digest(loaded.run.params) == checksums.digest(params_of(tmp_path / "run"))
    image = np.zeros((32, 32, 3), np.uint8)
    assert len(loaded.classify(image, ["red square", "blue bar"])) == 2
    with pytest.raises(lit_het.UserError, match="calibrate"):
        loaded.classify(image, ["red square", "blue bar"], coverage=0.9)
    with pytest.raises(lit_het.UserError, match="stores all of its settings; leave out --image-size"):
        lit_het.load(tmp_path / "run", options=in_python)
    ours, theirs = params_of(trained_lit.run_dir), params_of(tmp_path / "run")
    for part in ("image_tower", "text_tower"):
        assert checksums.digest(ours[part]) == checksums.digest(theirs[part])
    assert set(theirs["head"]) == {"temperature"}


def test_a_classifier_is_exported_and_imported_unchanged(capsys, upstream, tmp_path):
    run("import", "--from", GOLDEN / "ckpt_vit_old_names.npz", "--to", tmp_path / "run")
    export = ("export", "--checkpoint", tmp_path / "run", "--output", tmp_path / "vit.npz", "--to")
    run(*export, "npz")
    run("import", "--from", tmp_path / "vit.npz", "--to", tmp_path / "again")
    digests = {checksums.digest(open_run(tmp_path / name).params) for name in ("run", "again")}
    assert len(digests) == 1
    line = refusal(capsys, "export", "--checkpoint", upstream, "--to", "npz", "--output", tmp_path / "x.npz")
    assert "big_vision has no parameter for head/" in line  # a HET-XL classifier is not a dense layer


def test_an_image_tower_is_exported_alone(tmp_path):
    run("import", "--from", GOLDEN / "hf_siglip_vision", "--to", tmp_path / "run")
    run("export", "--checkpoint", tmp_path / "run", "--to", "npz", "--output", tmp_path / "new" / "vit.npz")
    run("import", "--from", tmp_path / "new" / "vit.npz", "--to", tmp_path / "again")
    one, other = (open_run(tmp_path / name).params for name in ("run", "again"))
    assert set(one) == {"image_tower"}
    assert checksums.digest(one) == checksums.digest(other)


def test_outputs_that_cannot_be_written_are_refused_before_anything_is_read(capsys, siglip, tmp_path):
    run("import", "--from", siglip, "--to", tmp_path / "run")
    export = ("export", "--checkpoint", tmp_path / "run", "--output")
    assert "is a folder; name a file" in refusal(capsys, *export, tmp_path, "--to", "npz")
    assert "is not an empty folder" in refusal(capsys, *export, siglip, "--to", "huggingface")
    assert "is not an empty folder" in refusal(capsys, *export, tmp_path / "run", "--to", "huggingface")
    assert "cannot be written" in refusal(capsys, *export, siglip / "x.npz", "--to", "npz")
    assert "cannot be written" in refusal(capsys, "import", "--from", siglip, "--to", siglip / "run")
    assert "already holds a run" in refusal(capsys, "import", "--from", siglip, "--to", tmp_path / "run")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_import_that_is_stopped_leaves_nothing(siglip, tmp_path, monkeypatch, capsys, error):
    def stop(*_):
        raise error

    monkeypatch.setattr("lit_het.weights.importing.save_imported", stop)
    before = sorted(tmp_path.iterdir())
    code = main(["import", "--from", str(siglip), "--to", str(tmp_path / "run")])
    assert code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert sorted(tmp_path.iterdir()) == before
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
def test_both_towers_of_a_file_that_moved_are_found_again(lit_config, siglip):
    image, text = formats.image_tower(f"{siglip}:img"), formats.text_tower(f"{siglip}:txt")
    task = changed(lit_config.task, image_tower=image, text_tower=text, locked=(".*_tower/.*",))
    data, tokenizer = {"data__image_size": image.image_size}, {"tokenizer__length": text.length}
    config = changed(lit_config, task=task, pretrained=None, **data, **tokenizer)
    tiny.finish_untrained(config)
    moved = siglip.rename(siglip.with_name("moved.npz"))
    assert open_run(config.run_dir, moved).params["text_tower"]
    tiny.edit_config(config.run_dir, changed(config, task__text_tower__weights="elsewhere.npz:txt"))
    with pytest.raises(UserError, match="can replace only"):
        open_run(config.run_dir, moved)


def test_a_file_is_imported_over_http(siglip, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(siglip.parent))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        run("import", "--from", f"http://127.0.0.1:{server.server_port}/{siglip.name}", "--to", tmp_path / "run")
        server.shutdown()
    run("import", "--from", siglip, "--to", tmp_path / "local")
    assert checksums.digest(params_of(tmp_path / "run")) == checksums.digest(params_of(tmp_path / "local"))


IMPORT_AND_MEASURE = """
import sys
from pathlib import Path
from lit_het.cli.main import main

def figure(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])

small, large, run = sys.argv[1:]
assert main(["import", "--from", small, "--to", f"{run}_of_small"]) == 0  # what the program itself takes
Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
before = figure("VmRSS")
assert main(["import", "--from", large, "--to", run]) == 0
print(figure("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from Linux's /proc")
def test_importing_takes_little_more_memory_than_the_file_is_large(tmp_path):
    encoder = EncoderConfig(width=1024, depth=4, mlp_width=4096, num_heads=16)
    tower = ViTConfig(image_size=32, patch_size=16, encoder=encoder, pooling="class_token")
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: tower.build(nnx.Rngs(0)))))
    params = jax.tree.map(lambda shape: np.ones(shape.shape, np.float32), shapes)
    write_npz(tmp_path / "vit.npz", tower, None, {"image_tower": params})
    size = (tmp_path / "vit.npz").stat().st_size
    assert size > 200e6
    paths = map(str, (GOLDEN / "ckpt_vit_old_names.npz", tmp_path / "vit.npz", tmp_path / "run"))
    command = [sys.executable, "-c", IMPORT_AND_MEASURE, *paths]
    taken = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert 0.9 * size < taken < size + 80e6


def test_a_download_is_read_from_its_address(siglip, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    address = f"file://{siglip}"
    assert formats.open_weights(address).image_tower == formats.open_weights(str(siglip)).image_tower
    siglip.unlink()
    assert formats.open_weights(address).image_tower is not None  # from the cache
    folder = shutil.copytree(GOLDEN / "hf_siglip", tmp_path / "hf")
    (folder / "processor_config.json").write_text('{"image_processor": {"resample": 2}}')
    found = formats.open_weights(f"file://{folder}")
    assert found.has_bias
    assert found.image_processor is not None
    assert found.image_processor["resample"] == 2
