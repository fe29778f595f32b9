"""`lit-het embed`: the losses of images without images, restarts, and what is refused."""

import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from flax import nnx

import lit_het
from lit_het.apps.embed.captions import embed_captions
from lit_het.apps.embed.images import EmbedOptions, embed
from lit_het.cli.main import main
from lit_het.configs import lit_e3_b32_het_xl
from lit_het.configs.experiment import PretrainedConfig
from lit_het.configs.parsing import parse_tower
from lit_het.data_pipelines.images.decoding import encode_jpeg
from lit_het.data_pipelines.images.transforms import InceptionCrop
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.storage import Reader, Unreadable
from lit_het.data_pipelines.shards.writing import write_tar
from lit_het.models.opening import open_run
from lit_het.tasks.two_towers import ContrastiveTask
from lit_het.training.log import read_metrics
from lit_het.training.train import train
from lit_het.weights.native import checksums
from tests import tiny
from tests.cli.conftest import break_first_image, changed, last_line, refusal, run_command, write_config_file


def losses(run_dir):
    return [record["train/loss"] for record in read_metrics(run_dir / "metrics.jsonl")]


def on_embeddings(config, folder):
    """The same run on stored embeddings, in another directory."""
    return changed(config, run_dir=config.run_dir.with_name("on_embeddings"), data__embeddings=str(folder))


@pytest.fixture(scope="module")
def embedded(trained_lit, tmp_path_factory):
    """The embeddings of the training images by the tower of a finished LiT run."""
    folder = tmp_path_factory.mktemp("embeddings") / "float32"
    embed(trained_lit.run_dir, parse_tower(trained_lit.run_dir), str(folder), EmbedOptions(dtype="float32"))
    return folder


@pytest.mark.slow
def test_a_run_on_embeddings_has_the_losses_of_the_run_on_images(trained_lit, embedded, tmp_path):
    config = on_embeddings(changed(trained_lit, run_dir=tmp_path / "lit"), embedded)
    train(config)
    np.testing.assert_allclose(losses(config.run_dir), losses(trained_lit.run_dir), rtol=1e-5)


@pytest.fixture
def head_only(trained_lit, tmp_path):
    """A run that trains a head on two locked towers, those of a finished LiT run."""
    pretrained = PretrainedConfig(run=trained_lit.run_dir, pattern="(image|text)_tower/.*")
    locked = ("image_tower/.*", "text_tower/.*")
    return changed(trained_lit, run_dir=tmp_path / "head", task__locked=locked, pretrained=pretrained)


@pytest.mark.slow
def test_a_head_trains_on_stored_images_and_captions_as_on_the_towers(head_only, trained_lit, embedded, tmp_path):
    folder = tmp_path / "texts"
    lit_het.embed(trained_lit.run_dir, folder, dtype="float32", texts=True)
    train(head_only)
    data = changed(head_only.data, embeddings=str(embedded), text_embeddings=str(folder))
    stored = changed(head_only, run_dir=tmp_path / "stored", data=data)
    train(stored)
    np.testing.assert_allclose(losses(stored.run_dir), losses(head_only.run_dir), rtol=1e-5)
    trained, model = open_run(stored.run_dir), open_run(trained_lit.run_dir)
    for part, change in (("image_tower", False), ("text_tower", False), ("head", True)):
        assert (checksums.digest(trained.params[part]) != checksums.digest(model.params[part])) is change


@pytest.mark.slow
@pytest.mark.parametrize("captions", ["txt", "json/a=0.3,json/b=0.7"])
def test_the_caption_of_a_step_is_that_of_its_stored_embedding(trained_lit, tmp_path, captions):
    """Where samples have different numbers of captions, some of them equal, and two places or one."""
    image = encode_jpeg(np.zeros((32, 32, 3), np.uint8))
    texts = ["\n".join(tiny.COLOURS[: 1 + number % 3]) for number in range(6)]
    places = [
        {"a": tiny.COLOURS[:1], **({"b": text.split("\n")[1:]} if number else {})} for number, text in enumerate(texts)
    ]
    samples = [
        {"__key__": f"{number:03}", "jpg": image, "txt": text, "json": json.dumps(place)}
        for number, (text, place) in enumerate(zip(texts, places, strict=True))
    ]
    write_tar(tmp_path / "several.tar", samples)
    shards = (str(tmp_path / "several.tar"),)
    tower = parse_tower(trained_lit.run_dir, ["--data.captions", captions])
    embed_captions(trained_lit.run_dir, tower, str(tmp_path / "texts"), EmbedOptions(shards, "float32"))
    run = open_run(trained_lit.run_dir)
    stored = str(tmp_path / "texts")
    data = changed(trained_lit.data, shards=shards, batch_size=8, text_embeddings=stored, threads=0, captions=captions)
    assert run.tokenizer is not None
    assert isinstance(run.task, ContrastiveTask)
    graph = run.task.graph
    encode = jax.jit(lambda text: nnx.merge(graph, run.params).text_tower(text).embedding)
    seen = set()
    for batch in itertools.islice(Loader(data, run.tokenizer).batches(), 6):
        assert batch.text is not None
        assert batch.text_embedding is not None
        np.testing.assert_allclose(batch.text_embedding, encode(batch.text), rtol=1e-5, atol=1e-6)
        seen |= {ids.tobytes() for ids in batch.text}
    assert len(seen) == 3


@pytest.mark.slow
def test_captions_of_another_text_tower_are_refused(capsys, head_only, trained_lit, lit_config, tmp_path):
    tiny.finish_untrained(changed(trained_lit, run_dir=tmp_path / "other", seed=7))
    lit_het.embed(tmp_path / "other", tmp_path / "texts", texts=True)
    for config, message in (
        (head_only, r"was computed by text tower .*; embed again into another folder"),
        (lit_config, "a trainable text tower needs captions; lock it"),
    ):
        with pytest.raises(lit_het.UserError, match=message):
            train(changed(config, data__text_embeddings=str(tmp_path / "texts")))


def test_a_run_may_resume_with_embeddings_after_images(trained_lit, embedded, tmp_path):
    run_dir = shutil.copytree(trained_lit.run_dir, tmp_path / "run")
    shutil.rmtree(run_dir / "checkpoints" / "4")  # step 2 is the last one that was saved
    train(changed(trained_lit, run_dir=run_dir, data__embeddings=str(embedded)), resume=True)
    np.testing.assert_allclose(losses(run_dir), losses(trained_lit.run_dir), rtol=1e-5)


def test_zero_shot_evaluation_reads_embeddings_too(trained_lit, data, embedded, config_file, tmp_path):
    half = tmp_path / "float16"
    run_command("embed", "--tower", config_file, "--output", half)
    figures, output = [], tmp_path / "figures.json"
    for flags in ((), ("--embeddings", embedded), ("--embeddings", half)):
        arguments = ("--checkpoint", trained_lit.run_dir, "--data", data / "train", "--output", output)
        run_command("zero-shot", *arguments, *flags)
        figures.append(json.loads(output.read_text())["zero_shot/train/nll"])
    assert figures[1] == pytest.approx(figures[0], rel=1e-6)
    assert figures[2] == pytest.approx(figures[0], rel=1e-3)


@pytest.mark.slow
def test_the_members_of_an_ensemble_are_stored_side_by_side_and_joined_as_a_tower_says(data, tmp_path):
    lit = tiny.shrink(lit_e3_b32_het_xl.get_config(), data, tmp_path / "lit")
    upstream = changed(tiny.classifier(lit, data, tmp_path / "upstream"), task__image_tower__members="apart")
    tower = upstream.task.image_tower
    tiny.finish_untrained(upstream)
    embed(tmp_path / "upstream", parse_tower(tmp_path / "upstream"), str(tmp_path / "e"), EmbedOptions(dtype="float32"))
    params = open_run(tmp_path / "upstream").params["image_tower"]
    images = next(Loader(changed(upstream.data, labels=None)).epoch())
    stored = next(Loader(changed(upstream.data, labels=None, embeddings=str(tmp_path / "e"))).epoch())
    assert stored.image_embedding is not None
    apart = jnp.asarray(stored.image_embedding).reshape(-1, tower.encoder.num_members, tower.embedding_size)
    for members in ("mean", "concatenated"):
        joining = changed(tower, members=members)
        graph, _ = nnx.split(nnx.eval_shape(lambda joining=joining: joining.build(nnx.Rngs(0))))
        embedding = jax.jit(lambda image, graph=graph: nnx.merge(graph, params)(image).embedding)(images.image)
        assert len(apart) == len(embedding)
        np.testing.assert_allclose(embedding, joining.join_members(apart), atol=1e-5)


@pytest.mark.slow
def test_crops_train_by_the_views_that_were_stored(lit_config, tmp_path):
    cropping = changed(lit_config, data__crop=InceptionCrop())
    source = write_config_file(cropping, tmp_path / "cropping.py")
    for name in ("e", "again"):
        embed(source, parse_tower(source), str(tmp_path / name), EmbedOptions(dtype="float32", num_crops=3))
    files = [sorted((tmp_path / name).glob("*.safetensors")) for name in ("e", "again")]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]
    config = on_embeddings(cropping, tmp_path / "e")
    train(config)
    assert np.isfinite(losses(config.run_dir)).all()


def test_a_broken_image_has_no_embedding_and_is_counted(trained_lit, data, tmp_path, capsys):
    shard = shutil.copy(data / "train" / "shard-000000.tar", tmp_path)
    break_first_image(Path(shard))
    flags = ["--tower", trained_lit.run_dir, "--data", shard, "--output", tmp_path / "e"]
    assert "not an image" in refusal(capsys, "embed", *flags)
    assert not list((tmp_path / "e").glob("*.safetensors"))
    run_command("embed", *flags, "--data.max-bad-fraction", "0.1")
    assert "1 image without embedding: not an image" in capsys.readouterr().err
    # Of a command that was stopped the fraction is still one of all images.
    few = tmp_path / "few.tar"
    write_tar(few, [{"__key__": "a", "jpg": b"no image"}])
    flags[3:4] = [shard, few]
    run_command("embed", *flags, "--data.max-bad-fraction", "0.1")


@pytest.mark.slow
def test_images_that_a_store_did_not_return_are_not_recorded_as_broken(
    trained_lit, data, tmp_path, monkeypatch, capsys
):
    away = Unreadable("store does not answer", "for a while")
    read, command = Reader.read, ("embed", "--tower", trained_lit.run_dir, "--output", tmp_path / "e")
    calls = []

    def failing_once(reader, spans):
        calls.append(len(spans))
        return [away] * len(spans) if len(calls) == 2 else read(reader, spans)

    monkeypatch.setattr(Reader, "read", failing_once)
    line = last_line(capsys, *command, "--data.max-bad-fraction", "0.9", "--data.threads", "0")
    assert "run the command again to embed them" in line
    run_command(*command)
    for path in (tmp_path / "e").glob("*.safetensors"):
        with safetensors.safe_open(path, "numpy") as file:
            assert np.isfinite(file.get_tensor("embeddings")).all()


# An embedding that takes so long for each shard that it is killed before its end.
SLOW = """
import sys, time
from lit_het.cli.main import main
from lit_het.data_pipelines.embeddings import EmbeddingFolder

write = EmbeddingFolder.write
EmbeddingFolder.write = lambda *arguments: (write(*arguments), time.sleep(0.2))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_killed_command_goes_on_with_the_shards_that_are_missing_on_two_hosts(trained_lit, data, tmp_path, capsys):
    environment, stored = tiny.environment(), tmp_path / "e"
    shards = tmp_path / "many"
    shards.mkdir()
    for number in range(20):
        (shards / f"{number:03d}.tar").symlink_to(data / "train" / "shard-000000.tar")
    given = ("embed", "--tower", trained_lit.run_dir, "--output", stored, "--data", shards)
    command = [sys.executable, "-c", SLOW, *map(str, given)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while len(list(stored.glob("*.safetensors"))) < 3:
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = {path: path.stat().st_mtime_ns for path in stored.glob("*.safetensors")}
    assert 3 <= len(before) < 20, "the kill came too late to show anything"
    for part in ("0/2", "1/2"):
        run_command(*given, "--part", part)
    there = re.findall(r"(\d+) of 10 shards already have embeddings", capsys.readouterr().err)
    assert sum(map(int, there)) == len(before)
    after = {path: path.stat().st_mtime_ns for path in stored.glob("*.safetensors")}
    assert len(after) == 20
    assert before.items() <= after.items()


@pytest.mark.slow
def test_embeddings_of_another_tower_are_refused(capsys, lit_config, embedded, upstream, data, tmp_path):
    tiny.finish_untrained(changed(tiny.classifier(lit_config, data, tmp_path / "other"), seed=1))
    locking = changed(lit_config, pretrained=PretrainedConfig(tmp_path / "other"))
    file = write_config_file(locking, tmp_path / "locking.py")
    line = refusal(capsys, "train", "--config", file, "--data.embeddings", embedded)
    assert "was computed by image tower" in line
    assert not (lit_config.run_dir / "checkpoints").exists() or not any((lit_config.run_dir / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--data.preprocessing.filter", "bicubic"), r"with preprocessing\.filter = area, this run has bicubic"),
        (("--task.locked",), "a trainable image tower needs images"),
        (
            ("--task.loss", "sigmoid", "--task.mixing.fraction", 0.5),
            r"--task\.mixing mixes the pixels of images; leave it out, or leave out --data\.embeddings$",
        ),
    ],
)
def test_a_training_that_needs_other_pixels_takes_no_embeddings(capsys, config_file, embedded, flags, message):
    line = refusal(capsys, "train", "--config", config_file, "--data.embeddings", embedded, *flags)
    assert re.search(message, line)


@pytest.mark.parametrize(
    ("tower", "flags", "message"),
    [
        ("upstream", ("--texts",), "--texts needs an image-text model with a tokenizer"),
        ("run", ("--texts", "--crops", "2"), "leave out --crops or --texts"),
        ("run", ("--texts", "--tokens"), "leave out --tokens or --texts"),
        ("run", ("--task.image-tower.members", "concatenated"), "cannot be changed"),
        ("file", ("--crops", 2), "all crops would be equal"),
        *(("file", (f"--part={part}",), part) for part in ("2/2", "-1/2", "0/0", "half")),
    ],
)
def test_flags_that_do_not_suit_the_tower_are_refused(
    capsys, upstream, trained_lit, config_file, tmp_path, tower, flags, message
):
    address = {"upstream": upstream, "run": trained_lit.run_dir, "file": config_file}[tower]
    assert message in refusal(capsys, "embed", "--tower", address, "--output", tmp_path / "e", *flags)


def test_a_command_says_what_is_missing_and_helps_with_the_fields_of_the_tower(capsys, config_file):
    assert "embed needs --tower RUN|FILE and --output DIR" in refusal(capsys, "embed")
    with pytest.raises(SystemExit):
        main(["embed", "--tower", str(config_file), "--output", "e", "--help"])
    text = capsys.readouterr().out
    assert "--crops" in text
    assert "--data.preprocessing.filter" in text
