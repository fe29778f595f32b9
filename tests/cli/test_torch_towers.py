"""Any AutoModel of images as a locked tower: embeddings by PyTorch, training and evaluation on them, and refusals."""

import contextlib
import io
import json
import re
import shutil
import sys
import tarfile
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import lit_het
from lit_het.apps.embed.images import EmbedOptions
from lit_het.apps.embed.images import embed as embed_by_jax
from lit_het.configs import quickstart_lit_het_xl
from lit_het.configs.flags import with_flags
from lit_het.configs.parsing import parse_tower
from lit_het.data_pipelines.images.transforms import Preprocessing
from lit_het.errors import UserError
from lit_het.towers.stored_config import StoredConfig
from lit_het.training.log import read_metrics
from lit_het.training.train import train
from lit_het.weights.importing import ImportOptions, import_weights
from tests import tiny
from tests.cli.conftest import changed, refusal, run_command

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
PATCHES = {"image_size": 32, "patch_size": 8}
SQUARE = {"height": 32, "width": 32}


@pytest.fixture(scope="session")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="session")
def saved(torch, tmp_path_factory):
    """Returns a function that saves a model of random weights with its image processor, and returns both."""
    import transformers

    def save(kind):
        torch.manual_seed(0)
        match kind:
            case "vit":
                config = transformers.ViTConfig(**SIZES, intermediate_size=40, **PATCHES)
                processor = transformers.ViTImageProcessor(size=SQUARE)
            case "dinov2":
                config = transformers.Dinov2Config(**SIZES, mlp_ratio=2, **PATCHES)
                processor = transformers.BitImageProcessor(size={"shortest_edge": 32}, crop_size=SQUARE)
            case "convnext":
                config = transformers.ConvNextConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1])
                processor = transformers.ConvNextImageProcessor(size={"shortest_edge": 32})
            case "swin":
                config = transformers.SwinConfig(
                    image_size=32, patch_size=4, embed_dim=12, depths=[1, 1], num_heads=[2, 2], window_size=4
                )
                processor = transformers.ViTImageProcessor(size=SQUARE)
            case _:
                config = transformers.ViTMAEConfig(**SIZES, intermediate_size=40, **PATCHES, decoder_hidden_size=16)
                processor = transformers.ViTImageProcessor(size=SQUARE)
        model = transformers.AutoModel.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)  # biases and scales too
        folder = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        return folder, model

    return save


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.write_data(tmp_path_factory.mktemp("data"), image_size=48)


def embedded(folder, data, output, *flags):
    run_command("embed", "--tower", f"transformers:{folder}", "--output", output, "--data", data / "train", *flags)
    return output


def rows(output):
    """Returns the stored embeddings of all samples, by their keys."""
    files = [safetensors.numpy.load_file(path) for path in output.glob("*.safetensors")]
    found = {bytes(key): row[0] for file in files for key, row in zip(file["keys"], file["embeddings"], strict=True)}
    return np.stack([found[key] for key in sorted(found)])


def images(data):
    """Returns the JPEGs of all samples, by their keys."""
    found = {}
    for path in (data / "train").glob("*.tar"):
        with tarfile.open(path) as tar:
            files: Any = ((member.name, tar.extractfile(member)) for member in tar if member.name.endswith(".jpg"))
            found |= {name: file.read() for name, file in files}
    return [found[name] for name in sorted(found)]


FLOAT32 = ("--dtype", "float32")


@pytest.mark.parametrize("kind", ["vit", "dinov2", "convnext", "swin"])
def test_embeddings_are_those_of_the_model_on_the_pixels_of_its_processor(torch, saved, data, tmp_path, kind):
    folder, model = saved(kind)
    found = rows(embedded(folder, data, tmp_path / "embeddings", *FLOAT32))
    fields = json.loads((folder / "preprocessor_config.json").read_text())
    crop = {"dinov2": 1.0, "convnext": 32 / int(32 / 0.875)}.get(kind)
    filter: Any = "bilinear" if fields["resample"] == 2 else "bicubic"
    fit: Any = {"fit": "squash"} if crop is None else {"fit": "crop", "crop_fraction": crop}
    preprocessing = Preprocessing(**fit, filter=filter, transparency="dropped")
    pixels = np.stack([preprocessing.apply(image, 32) for image in images(data)]) / 255
    pixels = (pixels - np.array(fields["image_mean"])) / np.array(fields["image_std"])
    with torch.no_grad():
        expected = model(pixel_values=torch.tensor(pixels, dtype=torch.float32).permute(0, 3, 1, 2)).pooler_output
    np.testing.assert_allclose(found, expected.flatten(1).numpy(), atol=1e-5)
    assert np.ptp(found, axis=0).max() > 1e-3


def test_they_equal_those_of_our_own_tower(saved, data, tmp_path):
    folder, _ = saved("dinov2")
    found = rows(embedded(folder, data, tmp_path / "torch", *FLOAT32))
    import_weights(str(folder), tmp_path / "run", ImportOptions())
    config = parse_tower(tmp_path / "run", ["--data.batch-size", "8"])
    shards = (str(data / "train"),)
    embed_by_jax(tmp_path / "run", config, str(tmp_path / "jax"), EmbedOptions(shards, "float32"))
    np.testing.assert_allclose(found, rows(tmp_path / "jax"), atol=1e-5)


@pytest.fixture(scope="module")
def stored(saved, data, tmp_path_factory):
    """Embeddings of a Swin, and the flags of a training that ``embed`` says."""
    folder, said = tmp_path_factory.mktemp("stored") / "swin", io.StringIO()
    with contextlib.redirect_stderr(said):
        embedded(saved("swin")[0], data, folder)
    return folder, said.getvalue().partition("train on them with ")[2].split()


def lit_on(stored, data, run_dir):
    """LiT with the flags that ``embed`` says."""
    config = tiny.shrink(quickstart_lit_het_xl.get_config(), data, run_dir)
    return with_flags(config, [*stored[1], "--task.text-tower.embedding-size", "24"], "lit-het train")


def test_a_run_trains_on_them_by_the_flags_that_embed_says_and_is_evaluated_on_others(stored, data, tmp_path, capsys):
    config = lit_on(stored, data, tmp_path / "lit")
    assert isinstance(config.task.image_tower, StoredConfig)
    train(config)
    losses = [record["train/loss"] for record in read_metrics(config.run_dir / "metrics.jsonl")]
    assert len(losses) == 4
    assert np.isfinite(losses).all()
    sets = ("--checkpoint", config.run_dir, "--data", data / "train")
    run_command("zero-shot", *sets, "--embeddings", stored[0], "--output", tmp_path / "metrics.json")
    assert "zero_shot/train/top1" in json.loads((tmp_path / "metrics.json").read_text())
    line = refusal(capsys, "zero-shot", *sets)
    assert "only stored embeddings of these images can be read" in line
    assert "--embeddings" in line
    jpeg = tmp_path / "one.jpg"
    jpeg.write_bytes(images(data)[0])
    for command in (
        ("classify", "--checkpoint", config.run_dir, jpeg, "--labels", "red bar,blue bar"),
        ("embed", "--tower", config.run_dir, "--output", tmp_path / "again"),
        ("zero-shot", *sets, "--image-size", "64"),
        ("export", "--checkpoint", config.run_dir, "--to", "huggingface", "--output", tmp_path / "exported"),
    ):
        assert re.search("stored|ViT", refusal(capsys, *command)), command
    run_command("export", "--checkpoint", config.run_dir, "--to", "lit-het", "--output", tmp_path / "portable")
    run_command("zero-shot", "--checkpoint", tmp_path / "portable", *sets[2:], "--embeddings", stored[0])
    train(config, resume=True)


def test_a_run_knows_the_embeddings_of_another_model_and_of_other_pixels(stored, saved, data, tmp_path):
    config = lit_on(stored, data, tmp_path / "lit")
    other = embedded(saved("vit")[0], data, tmp_path / "vit")
    with pytest.raises(UserError, match="was computed by image tower"):
        train(changed(config, data__embeddings=str(other)))
    with pytest.raises(UserError, match=r"preprocessing\.filter = bilinear, this run has area"):
        train(changed(config, data__preprocessing=changed(config.data.preprocessing, filter="area")))
    with pytest.raises(UserError, match="only stored embeddings of these images can be read"):
        train(changed(config, data__embeddings=None))


@pytest.fixture
def refused(capsys, data, tmp_path):
    """Returns the line in which a folder is refused."""

    def run(folder, *flags):
        shards = () if "--data" in flags else ("--data", data / "train")
        return refusal(
            capsys, "embed", "--tower", f"transformers:{folder}", "--output", tmp_path / "e", *shards, *flags
        )

    return run


def test_a_model_without_a_pooled_output_is_one_line(saved, refused):
    folder, _ = saved("mae")
    assert "ViTMAEModel has no pooled output, one vector for an image" in refused(folder)


def test_weights_without_a_layer_of_the_model_are_one_line(saved, refused, tmp_path):
    folder = shutil.copytree(saved("vit")[0], tmp_path / "vit")
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    kept = {name: array for name, array in weights.items() if not name.startswith("pooler")}
    safetensors.numpy.save_file(kept, folder / "model.safetensors", {"format": "pt"})
    assert "its weights lack pooler.dense.bias, which would be random" in refused(folder)


def test_pickles_code_of_a_repository_and_missing_files_are_one_line(torch, saved, refused, tmp_path):
    folder, model = saved("vit")
    pickled = shutil.copytree(folder, tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")
    assert "transformers cannot read this model" in refused(pickled)
    remote = shutil.copytree(folder, tmp_path / "remote")
    (remote / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoModel": "mine.Mine"}}')
    (remote / "mine.py").write_text("raise SystemExit('the code of a repository ran')")
    assert "transformers cannot read this model" in refused(remote)
    without = shutil.copytree(folder, tmp_path / "without")
    (without / "preprocessor_config.json").unlink()
    assert "transformers cannot read its image processor" in refused(without)
    assert "nowhere has no config.json" in refused("nowhere")


def test_what_such_a_tower_does_not_have_is_one_line(saved, refused, capsys, tmp_path):
    folder, _ = saved("vit")
    for flag in ("--texts", "--tokens", "--logits"):
        assert "stores pooled embeddings of images; leave out --texts, --tokens and --logits" in refused(folder, flag)
    assert "--data.preprocessing.filter is what the model of" in refused(folder, "--data.preprocessing.filter", "area")
    line = refusal(capsys, "embed", "--tower", f"transformers:{folder}", "--output", tmp_path / "e")
    assert "name those to embed with --data" in line
    with pytest.raises(UserError, match="leave out --texts"):
        lit_het.embed(f"transformers:{folder}", tmp_path / "e", data=("a.tar",), texts=True)


def test_a_program_stores_the_embeddings_that_the_command_does(saved, data, tmp_path):
    folder, _ = saved("vit")
    expected = rows(embedded(folder, data, tmp_path / "command", *FLOAT32))
    lit_het.embed(f"transformers:{folder}", tmp_path / "program", data=(str(data / "train"),), dtype="float32")
    np.testing.assert_array_equal(rows(tmp_path / "program"), expected)


def test_without_pytorch_the_extra_is_named(saved, refused, monkeypatch):
    folder, _ = saved("vit")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "needs PyTorch: pip install 'lit-het[torch-towers]'" in refused(folder)
