"""`lit-het embed`: the losses of images without images, restarts, and what is refused."""

import dataclasses
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from flax import nnx

import lit_het
from lit_het.checkpoints.native import checksums
from lit_het.cli.main import main
from lit_het.configs import lit_e3_b32_het_xl
from lit_het.configs.experiment import PretrainedConfig
from lit_het.data_pipelines.images import encode_jpeg
from lit_het.data_pipelines.loader import Loader
from lit_het.data_pipelines.shards import write_tar
from lit_het.data_pipelines.storage import Reader, Unreadable
from lit_het.data_pipelines.transforms import InceptionCrop
from lit_het.runs.embedding import EmbedOptions, embed
from lit_het.runs.opening import open_run
from lit_het.runs.parsing import parse_tower
from lit_het.runs.training import train
from lit_het.tasks.contrastive import ContrastiveTask
from lit_het.towers.vit import ViTConfig
from lit_het.training.metric_log import read_metrics
from tests import tiny
from tests.cli.conftest import write_config_file
from tests.cli.test_train import refusal


def losses(run_dir):
    return [record["train/loss"] for record in read_metrics(run_dir / "metrics.jsonl")]


def on_embeddings(config, folder):
    """The same run on stored embeddings, in another directory."""
    data = dataclasses.replace(config.data, embeddings=str(folder))
    return dataclasses.replace(config, run_dir=config.run_dir.with_name("on_embeddings"), data=data)


@pytest.fixture(scope="module")
def embedded(trained_lit, tmp_path_factory):
    """The embeddings of the training images by the tower of a finished LiT run."""
    folder = tmp_path_factory.mktemp("embeddings") / "float32"
    embed(trained_lit.run_dir, parse_tower(trained_lit.run_dir), str(folder), EmbedOptions(dtype="float32"))
    return folder


def test_a_run_on_embeddings_has_the_losses_of_the_run_on_images(trained_lit, embedded, tmp_path):
    config = on_embeddings(dataclasses.replace(trained_lit, run_dir=tmp_path / "lit"), embedded)
    train(config)
    np.testing.assert_allclose(losses(config.run_dir), losses(trained_lit.run_dir), rtol=1e-5)


@pytest.fixture
def head_only(trained_lit, tmp_path):
    """A run that trains a head on two locked towers, those of a finished LiT run."""
    task = dataclasses.replace(trained_lit.task, locked=("image_tower/.*", "text_tower/.*"))
    pretrained = PretrainedConfig(run=trained_lit.run_dir, pattern="(image|text)_tower/.*")
    return dataclasses.replace(trained_lit, run_dir=tmp_path / "head", task=task, pretrained=pretrained, evaluations=())


def test_a_head_trains_on_stored_images_and_captions_as_on_the_towers(head_only, trained_lit, embedded, tmp_path):
    folder = tmp_path / "texts"
    lit_het.embed(trained_lit.run_dir, folder, dtype="float32", texts=True)
    train(head_only)
    data = dataclasses.replace(head_only.data, embeddings=str(embedded), text_embeddings=str(folder))
    stored = dataclasses.replace(head_only, run_dir=tmp_path / "stored", data=data)
    train(stored)
    np.testing.assert_allclose(losses(stored.run_dir), losses(head_only.run_dir), rtol=1e-5)
    trained, model = open_run(stored.run_dir), open_run(trained_lit.run_dir)
    for part, change in (("image_tower", False), ("text_tower", False), ("head", True)):
        assert (checksums.digest(trained.params[part]) != checksums.digest(model.params[part])) is change


def test_the_caption_of_a_step_is_that_of_its_stored_embedding(trained_lit, tmp_path):
    """Where samples have different numbers of captions, some of them equal."""
    image = encode_jpeg(np.zeros((32, 32, 3), np.uint8))
    texts = ["\n".join(tiny.COLOURS[: 1 + number % 3]) for number in range(6)]
    samples = [{"__key__": f"{number:03}", "jpg": image, "txt": text} for number, text in enumerate(texts)]
    write_tar(tmp_path / "several.tar", samples)
    shards = (str(tmp_path / "several.tar"),)
    lit_het.embed(trained_lit.run_dir, tmp_path / "texts", data=shards, dtype="float32", texts=True)
    run = open_run(trained_lit.run_dir)
    data = dataclasses.replace(
        trained_lit.data, shards=shards, batch_size=8, text_embeddings=str(tmp_path / "texts"), threads=0
    )
    assert run.tokenizer is not None
    assert isinstance(run.task, ContrastiveTask)
    model = nnx.merge(run.task.graph, run.params)
    seen = set()
    for batch in itertools.islice(Loader(data, run.tokenizer).batches(), 6):
        assert batch.text is not None
        assert batch.text_embedding is not None
        expected = model.text_tower(jnp.asarray(batch.text)).embedding
        np.testing.assert_allclose(batch.text_embedding, expected, rtol=1e-5, atol=1e-6)
        seen |= {ids.tobytes() for ids in batch.text}
    assert len(seen) == 3


def test_captions_of_another_text_tower_are_refused(capsys, head_only, trained_lit, lit_config, tmp_path):
    config = dataclasses.replace(trained_lit, run_dir=tmp_path / "other", seed=7)
    tiny.finish_untrained(config)
    lit_het.embed(config.run_dir, tmp_path / "texts", texts=True)
    data = dataclasses.replace(head_only.data, text_embeddings=str(tmp_path / "texts"))
    with pytest.raises(lit_het.UserError, match=r"was computed by text tower .*; embed again into another folder"):
        train(dataclasses.replace(head_only, data=data))
    with pytest.raises(lit_het.UserError, match="a trainable text tower needs captions; lock it"):
        train(dataclasses.replace(lit_config, data=data))


def test_what_has_no_captions_to_embed_is_refused(capsys, upstream, trained_lit, tmp_path):
    line = refusal(capsys, "embed", "--tower", upstream, "--output", tmp_path / "e", "--texts")
    assert "--texts needs an image-text model with a tokenizer" in line
    crops = ("--output", tmp_path / "e", "--texts", "--crops", "2")
    line = refusal(capsys, "embed", "--tower", trained_lit.run_dir, *crops)
    assert "leave out --crops or --texts" in line
    tokens = ("--output", tmp_path / "e", "--texts", "--tokens")
    line = refusal(capsys, "embed", "--tower", trained_lit.run_dir, *tokens)
    assert "leave out --tokens or --texts" in line


def test_a_run_may_resume_with_embeddings_after_images(trained_lit, embedded, tmp_path):
    run_dir = shutil.copytree(trained_lit.run_dir, tmp_path / "run")
    shutil.rmtree(run_dir / "checkpoints" / "4")  # step 2 is the last one that was saved
    stored = dataclasses.replace(trained_lit.data, embeddings=str(embedded))
    train(dataclasses.replace(trained_lit, run_dir=run_dir, data=stored), resume=True)
    np.testing.assert_allclose(losses(run_dir), losses(trained_lit.run_dir), rtol=1e-5)


def test_zero_shot_evaluation_reads_embeddings_too(trained_lit, data, embedded, config_file, tmp_path):
    half = tmp_path / "float16"
    assert main(["embed", "--tower", str(config_file), "--output", str(half)]) == 0
    figures = []
    for number, flags in enumerate([(), ("--embeddings", str(embedded)), ("--embeddings", str(half))]):
        output = tmp_path / f"{number}.json"
        arguments = ["--checkpoint", trained_lit.run_dir, "--data", data / "train", "--output", output]
        assert main(["zero-shot", *map(str, arguments), *flags]) == 0
        figures.append(json.loads(output.read_text())["zero_shot/train/nll"])
    assert figures[1] == pytest.approx(figures[0], rel=1e-6)
    assert figures[2] == pytest.approx(figures[0], rel=1e-3)


def test_the_members_of_an_ensemble_are_stored_side_by_side_and_joined_as_a_tower_says(data, tmp_path):
    lit = tiny.shrink(lit_e3_b32_het_xl.get_config(), data, tmp_path / "lit")
    upstream = tiny.classifier(lit, data, tmp_path / "upstream")
    tower = dataclasses.replace(upstream.task.image_tower, members="apart")
    tiny.finish_untrained(dataclasses.replace(upstream, task=dataclasses.replace(upstream.task, image_tower=tower)))
    embed(tmp_path / "upstream", parse_tower(tmp_path / "upstream"), str(tmp_path / "e"), EmbedOptions(dtype="float32"))
    assert isinstance(tower, ViTConfig)
    params = open_run(tmp_path / "upstream").params["image_tower"]
    images = next(Loader(dataclasses.replace(upstream.data, labels=None)).epoch())
    stored = next(Loader(dataclasses.replace(upstream.data, labels=None, embeddings=str(tmp_path / "e"))).epoch())
    for members in ("mean", "concatenated"):
        joining = dataclasses.replace(tower, members=members)
        graph, _ = nnx.split(nnx.eval_shape(lambda joining=joining: joining.build(nnx.Rngs(0))))
        embedding = jax.jit(lambda image, graph=graph: nnx.merge(graph, params)(image).embedding)(images.image)
        assert stored.image_embedding is not None
        assert stored.image_embedding.shape[1] == tower.encoder.num_members * tower.member_size
        joined = joining.join_members(
            jnp.asarray(stored.image_embedding).reshape(len(embedding), -1, tower.member_size)
        )
        np.testing.assert_allclose(embedding, joined, atol=1e-5)


def test_crops_train_by_the_views_that_were_stored(lit_config, tmp_path):
    cropping = dataclasses.replace(lit_config, data=dataclasses.replace(lit_config.data, crop=InceptionCrop()))
    source = write_config_file(cropping, tmp_path / "cropping.py")
    for name in ("e", "again"):
        embed(source, parse_tower(source), str(tmp_path / name), EmbedOptions(dtype="float32", num_crops=3))
    files = [sorted((tmp_path / name).glob("*.safetensors")) for name in ("e", "again")]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]
    config = on_embeddings(cropping, tmp_path / "e")
    train(config)
    assert np.isfinite(losses(config.run_dir)).all()


def test_a_broken_image_has_no_embedding_and_is_counted(trained_lit, data, tmp_path, capsys):
    shard = tmp_path / "d" / "shard-000000.tar"
    shard.parent.mkdir()
    content = bytearray((data / "train" / "shard-000000.tar").read_bytes())
    start = content.index(b"\xff\xd8\xff")
    content[start : start + 4] = b"oops"
    shard.write_bytes(content)
    flags = ["--tower", trained_lit.run_dir, "--data", shard, "--output", tmp_path / "e"]
    assert "not an image" in refusal(capsys, "embed", *flags)
    assert not list((tmp_path / "e").glob("*.safetensors"))
    assert main(["embed", *map(str, flags), "--data.max-bad-fraction", "0.1"]) == 0
    assert "1 image without embedding: not an image" in capsys.readouterr().err
    # Of a command that was stopped the fraction is still one of all images.
    few = tmp_path / "d" / "few.tar"
    write_tar(few, [{"__key__": "a", "jpg": b"no image"}])
    flags[3:4] = [shard, few]
    assert main(["embed", *map(str, flags), "--data.max-bad-fraction", "0.1"]) == 0


def test_images_that_a_store_did_not_return_are_not_recorded_as_broken(
    trained_lit, data, tmp_path, monkeypatch, capsys
):
    away = Unreadable("store does not answer", "for a while")
    read, flags = Reader.read, ["--tower", str(trained_lit.run_dir), "--output", str(tmp_path / "e")]
    calls = []

    def failing_once(reader, spans):
        calls.append(len(spans))
        return [away] * len(spans) if len(calls) == 2 else read(reader, spans)

    monkeypatch.setattr(Reader, "read", failing_once)
    assert main(["embed", *flags, "--data.max-bad-fraction", "0.9", "--data.threads", "0"]) == 1
    assert "run the command again to embed them" in capsys.readouterr().err
    assert main(["embed", *flags]) == 0
    for path in (tmp_path / "e").glob("*.safetensors"):
        with safetensors.safe_open(path, "numpy") as file:
            assert np.isfinite(file.get_tensor("embeddings")).all()


def test_a_killed_command_goes_on_with_the_shards_that_are_missing_on_two_hosts(trained_lit, data, tmp_path, capsys):
    environment = tiny.environment()
    command = [sys.executable, "-m", "lit_het.cli.main", "embed", "--tower", str(trained_lit.run_dir), "--output"]
    shards = tmp_path / "many"
    shards.mkdir()
    for number in range(120):
        (shards / f"{number:03d}.tar").symlink_to(data / "train" / "shard-000000.tar")
    command += [str(tmp_path / "e"), "--data", str(shards)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "e").glob("*.safetensors"))) < 3:
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "e").glob("*.safetensors")}
    assert 3 <= len(before) < 120, "the kill came too late to show anything"
    half = subprocess.Popen([*command, "--part", "0/2"], env=environment, stderr=subprocess.PIPE)
    assert main([*command[3:], "--part", "1/2"]) == 0
    messages = half.communicate()[1].decode() + capsys.readouterr().err
    assert half.returncode == 0, messages
    there = re.findall(r"(\d+) of 60 shards already have embeddings", messages)
    assert sum(map(int, there)) == len(before)
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "e").glob("*.safetensors")}
    assert len(after) == 120
    assert before.items() <= after.items()


def test_embeddings_of_another_tower_are_refused(capsys, lit_config, embedded, upstream, data, tmp_path):
    other = tiny.classifier(lit_config, data, tmp_path / "other")
    tiny.finish_untrained(dataclasses.replace(other, seed=1))
    changed = dataclasses.replace(lit_config, pretrained=PretrainedConfig(tmp_path / "other"))
    file = write_config_file(changed, tmp_path / "changed.py")
    line = refusal(capsys, "train", "--config", file, "--data.embeddings", embedded)
    assert "was computed by image tower" in line
    assert not (lit_config.run_dir / "checkpoints").exists() or not any((lit_config.run_dir / "checkpoints").iterdir())


def test_embeddings_of_other_pixels_are_refused(capsys, config_file, embedded):
    flags = ["--data.embeddings", embedded, "--data.preprocessing.filter", "bicubic"]
    line = refusal(capsys, "train", "--config", config_file, *flags)
    assert "was made with preprocessing.filter = area, this run has bicubic" in line


def test_a_tower_that_is_trained_takes_no_embeddings(capsys, config_file, embedded):
    line = refusal(capsys, "train", "--config", config_file, "--data.embeddings", embedded, "--task.locked")
    assert "a trainable image tower needs images" in line


def test_pixels_that_are_to_be_mixed_are_no_embeddings(capsys, config_file, embedded):
    flags = ["--data.embeddings", embedded, "--task.loss", "sigmoid", "--task.mixing.fraction", 0.5]
    line = refusal(capsys, "train", "--config", config_file, *flags)
    assert line.endswith("--task.mixing mixes the pixels of images; leave it out, or leave out --data.embeddings")


def test_crops_without_anything_random_are_refused(capsys, config_file, tmp_path):
    line = refusal(capsys, "embed", "--tower", config_file, "--output", tmp_path / "e", "--crops", 2)
    assert "all crops would be equal" in line


def test_the_tower_of_a_run_cannot_be_changed_by_flags(capsys, trained_lit, tmp_path):
    flags = ["--output", tmp_path / "e", "--task.image-tower.members", "concatenated"]
    assert "cannot be changed" in refusal(capsys, "embed", "--tower", trained_lit.run_dir, *flags)


@pytest.mark.parametrize("part", ["2/2", "-1/2", "0/0", "half"])
def test_an_invalid_part_is_refused(capsys, config_file, tmp_path, part):
    assert part in refusal(capsys, "embed", "--tower", config_file, "--output", tmp_path / "e", f"--part={part}")


def test_a_command_without_a_tower_says_what_is_missing(capsys):
    assert "embed needs --tower RUN|FILE and --output DIR" in refusal(capsys, "embed")


def test_help_lists_the_fields_of_the_tower(capsys, config_file):
    with pytest.raises(SystemExit):
        main(["embed", "--tower", str(config_file), "--output", "e", "--help"])
    text = capsys.readouterr().out
    assert "--crops" in text
    assert "--data.preprocessing.filter" in text
