"""Small whole files of every format, made by the project itself: what the fuzzer starts from."""

import dataclasses
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import jax.numpy as jnp
import msgpack
import numpy as np
import tokenizers
from PIL import Image
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from lit_het.configs import experiment, glyph_classifier, quickstart_lit_het_xl
from lit_het.data_pipelines.embeddings import EmbeddingFolder, Recipe, describe
from lit_het.data_pipelines.images.transforms import Preprocessing, Training
from lit_het.data_pipelines.shards import index
from lit_het.data_pipelines.shards.writing import IMAGE, write_tar
from lit_het.data_pipelines.texts.tokenizers import train_sentencepiece
from lit_het.eval.evaluation import Drawing, Evaluation, write_record
from lit_het.training import directory
from lit_het.training.durations import Duration, RunLength
from lit_het.training.optimizers_config import Adafactor, Optimizer
from lit_het.training.schedules import Schedule
from lit_het.training.step import initial_state
from lit_het.types import TrainState
from lit_het.weights.native.saving import Checkpoints
from tests import tiny
from tests.eval.report import saved_runs

Files: TypeAlias = dict[str, bytes]
"""What a reader is given, by names within a folder."""

GOLDEN = Path(__file__).parents[3] / "tests" / "golden"
CLASSES = ("red square", "red bar", "green square")
CAPTIONS = ("a red square", "Zwei grüne Balken, 2!", "", "日本 \ud7ff 😀 </s> [SEP]", "x" * 300)
EMBEDDED = Training(Preprocessing())
IMAGE_SIZE = 16
SHARD_TIME = 10**9
"""Modification time of shards, by which an index recognises them."""


def read_files(folder: Path) -> Files:
    """Returns all files below a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def write_files(folder: Path, files: Files) -> None:
    """Writes files into a folder, which is made."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def made(make: Callable[[Path], Any]) -> Files:
    """Returns what a function leaves in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        return read_files(Path(folder))


def encoded(format: str, mode: str = "RGB", size: tuple[int, int] = (24, 20), **options: Any) -> bytes:
    """Returns an image of random pixels in a format of Pillow."""
    pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 4), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels, "RGBA").convert("RGB").convert(mode).save(file, format, **options)
    return file.getvalue()


def images() -> Iterator[Files]:
    """Images of every format that shards or published data sets hold."""
    exif = Image.Exif()
    exif[0x0112] = 6
    forms: list[dict[str, Any]] = [{}, {"progressive": True}, {"subsampling": 2, "restart_marker_blocks": 2}]
    forms.append({"exif": exif})
    for options in forms:
        yield {"image": encoded("JPEG", **options)}
    yield from ({"image": encoded("JPEG", mode)} for mode in ("L", "CMYK"))
    yield from ({"image": encoded("PNG", mode)} for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"))
    yield {"image": encoded("WEBP", lossless=True)}
    yield {"image": encoded("WEBP", exif=exif)}
    frames = [Image.new("P", (9, 9), number) for number in range(3)]
    yield {"image": encoded("GIF", "P", save_all=True, append_images=frames, transparency=0)}
    yield {"image": encoded("PNG", save_all=True, append_images=[Image.new("RGB", (9, 9), "red")])}
    yield from ({"image": encoded(kind)} for kind in ("BMP", "PPM"))
    yield from ({"image": encoded("TIFF", compression=kind)} for kind in ("raw", "tiff_lzw", "tiff_deflate", "jpeg"))


def _samples(count: int = 4) -> list[dict[str, Any]]:
    def sample(number: int) -> dict[str, Any]:
        image = {"png": encoded("PNG")} if number % 2 else {"jpg": encoded("JPEG")}
        label = number % len(CLASSES)
        described = {"caption": CLASSES[label], "id": number}
        return {"__key__": f"a/{number:03}", **image, "txt": CLASSES[label], "cls": label, "json": described}

    return [sample(number) for number in range(count)]


def _shard(folder: Path) -> Path:
    path = folder / "shard.tar"
    write_tar(path, _samples())
    os.utime(path, (SHARD_TIME, SHARD_TIME))
    (folder / "classnames.txt").write_text("\n".join(CLASSES) + "\n")
    return path


def shards() -> Iterator[Files]:
    """Shards with images, captions, labels and JSON, in the forms of tar."""
    yield made(_shard)
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=form) as tar:
            for extension, content in (("jpg", encoded("JPEG")), ("txt", b"a"), ("cls", b"1"), ("json", b"{}")):
                info = tarfile.TarInfo("ä" * 70 + f"/1.{extension}")
                info.size, info.mtime = len(content), 1.5 if form == tarfile.PAX_FORMAT else 1
                tar.addfile(info, io.BytesIO(content))
        yield {"shard.tar": file.getvalue(), "classnames.txt": "\n".join(CLASSES).encode()}


def indexes() -> Iterator[Files]:
    """A shard with its index."""
    yield made(lambda folder: index.index_shard(_shard(folder)))


def embeddings() -> Iterator[Files]:
    """A shard with its embeddings, of the image and of crops."""

    def make(folder: Path, crops: int, dtype: Any) -> None:
        table = index.index_shard(_shard(folder))
        preprocessing = describe(EMBEDDED, IMAGE_SIZE, random=False)
        recipe = Recipe("tower", preprocessing, size=3, num_crops=crops, dtype=dtype, seed=0)
        shape = int(table.has([IMAGE]).sum()), max(1, crops), 3
        EmbeddingFolder(str(folder / "embedded"), recipe).write(table, np.ones(shape, np.float32))

    yield made(lambda folder: make(folder, 0, "float32"))
    yield made(lambda folder: make(folder, 2, "bfloat16"))


def members() -> Iterator[Files]:
    """What stands beside images: labels and captions."""
    for dtype in (np.float32, np.int64, np.bool_):
        file = io.BytesIO()
        np.save(file, np.eye(8, dtype=dtype)[3])
        yield {"sample.npy": file.getvalue()}
    yield {"sample.txt": b"red bar"}
    yield {"sample.cls": b"2"}
    yield {"sample.json": json.dumps({"caption": "red bar", "key": [1, {"a": None}]}).encode()}


def tokenizer_json() -> Iterator[Files]:
    """Tokenizers of the four models of Hugging Face's library."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    for model, trainer in (
        (
            models.WordPiece(unk_token="[UNK]"),
            trainers.WordPieceTrainer(vocab_size=60, special_tokens=special, show_progress=False),
        ),
        (
            models.BPE(unk_token="[UNK]"),
            trainers.BpeTrainer(vocab_size=60, special_tokens=special, show_progress=False),
        ),
        (
            models.Unigram(),
            trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="[UNK]", show_progress=False),
        ),
        (
            models.WordLevel(unk_token="[UNK]"),
            trainers.WordLevelTrainer(vocab_size=60, special_tokens=special, show_progress=False),
        ),
    ):
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.train_from_iterator(CLASSES * 3, trainer)
        pairs = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", pairs)
        yield {"tokenizer.json": tokenizer.to_str().encode()}


def sentencepiece() -> Iterator[Files]:
    """SentencePiece models, with the settings that lie beside them."""
    settings = {"pad_token": {"content": "</s>"}, "do_lower_case": True, "tokenizer_class": "SiglipTokenizer"}
    beside = {"tokenizer_config.json": json.dumps(settings).encode(), "config.json": b'{"model_type": "siglip"}'}
    for kind in ("unigram", "bpe", "word"):
        model = train_sentencepiece(CLASSES, vocabulary_size=12 if kind == "word" else 24, model_type=kind)
        yield {"spiece.model": model, **beside}


def vocabulary() -> Iterator[Files]:
    """A word-piece vocabulary of BERT's."""
    yield {"vocab.txt": (GOLDEN / "tensorflow_text" / "vocab.txt").read_bytes()}


def big_vision() -> Iterator[Files]:
    """Weights that big_vision wrote."""
    for name in ("ckpt_vit_scan_layout", "ckpt_vit_old_names", "ckpt_two_towers_siglip_style"):
        yield {"weights.npz": (GOLDEN / f"{name}.npz").read_bytes()}


def huggingface() -> Iterator[Files]:
    """Folders of Hugging Face, in one file and in several."""
    for name in ("hf_bert", "hf_vit", "hf_siglip_vision"):
        found = {file: (GOLDEN / name / file).read_bytes() for file in ("config.json", "model.safetensors")}
        yield found
    size = int.from_bytes(found["model.safetensors"][:8], "little")
    names = json.loads(found["model.safetensors"][8 : 8 + size])
    places = {name: "model-00001-of-00001.safetensors" for name in names if name != "__metadata__"}
    processor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3, "size": {"height": 16, "width": 16}}
    yield {
        "config.json": found["config.json"],
        "preprocessor_config.json": json.dumps(processor).encode(),
        "model.safetensors.index.json": json.dumps({"weight_map": places}).encode(),
        "model-00001-of-00001.safetensors": found["model.safetensors"],
    }


def vmoe() -> Iterator[Files]:
    """A V-MoE in two files and their index."""
    with np.load(GOLDEN / "model_last2_K1_eval.npz") as arrays:
        tree = {name: arrays[name] for name in arrays.files if name.startswith("params/")}

    def packed(value: Any) -> bytes:
        return msgpack.packb(value, use_bin_type=True) or b""

    def extension(code: int, value: Any) -> Any:
        return msgpack.ExtType(code, packed(value))

    root: dict[str, Any] = {}
    held: list[dict[str, Any]] = [{"__msgpack_array_chunk_a87ca2__": True} for _ in range(2)]
    for number, (name, array) in enumerate(sorted(tree.items(), key=lambda item: item[0].split("/"))):
        place = packed([packed((0, size)) for size in array.shape])
        piece = extension(1, (array.shape, array.dtype.name, array.tobytes()))
        held[number % 2][str(number)] = [[[piece], msgpack.ExtType(6, place)]]
        *folders, leaf = name.split("/")
        node = root
        for folder in folders:
            node = node.setdefault(folder, {})
        node[leaf] = extension(8, (packed((array.shape, array.dtype.name, False, {})), (place,), (number % 2,)))
    files = {f"x.data-{n:05}-of-00002": packed(data) for n, data in enumerate(held)}
    yield {"x.index": packed({"version": "1", "shard_count": 2, "index": root}), **files}


def runs() -> Iterator[Files]:
    """What a run writes down, beside checkpoints."""

    def make(folder: Path, module: Any) -> None:
        config = tiny.shrink(module.get_config(), folder / "data", folder / "run")
        run = dataclasses.replace(config, evaluations=module.get_config().evaluations)
        (folder / "run").mkdir()
        if module is glyph_classifier:  # as those of earlier versions, without a manifest
            experiment.save(run, folder / "run" / "config.json")
        else:
            directory.write(folder / "run", run, b"a tokenizer")
        records = [{"step": step, "train/loss": 1 / step, "seconds": 0.1} for step in (1, 2, 3)]
        (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        arrays = {"images": np.zeros((2, 4, 4, 3), np.uint8), "classes": np.zeros((2, 1), np.int32)}
        drawing = Drawing(arrays, {"names": CLASSES})
        figures = {"top1": 0.5, "top5": 0.75}
        found = Evaluation("zero_shot", "shapes", figures, {"top1": 0.1}, {"top1": 0.3}, lambda: drawing)
        write_record(found, folder / "run", 3, {"batch_size": 7})

    yield made(lambda folder: make(folder, glyph_classifier))
    yield made(lambda folder: make(folder, quickstart_lit_het_xl))


def reported() -> Iterator[Files]:
    """A run with evaluations of all kinds."""
    yield made(lambda folder: saved_runs.write_run(folder / "run", saved_runs.all_kinds()))


def train_state(step: int) -> TrainState:
    """Returns the state of a small run."""
    random = np.random.default_rng(0)
    kernel = jnp.asarray(random.normal(size=(8, 4)) + step, jnp.float32)
    params = {"image_tower": {"mlp": {"kernel": kernel, "bias": kernel[0]}}, "head": {"temperature": kernel[0, 0]}}
    optimizer = Optimizer(Adafactor()).build(Schedule(warmup=Duration(1)), RunLength(10, 8))
    state = initial_state(params, optimizer)
    return TrainState(jnp.int32(step), state.params, state.opt_state)


def checkpoints() -> Iterator[Files]:
    """Two steps of a run."""

    def make(folder: Path) -> None:
        with Checkpoints(folder / "checkpoints") as saved_steps:
            for step in (1, 2):
                saved_steps.save(train_state(step), {"position": 16 * step, "locked_checksum": "abc"})

    yield made(make)


def names() -> Iterator[Files]:
    """Names of classes, and of those of a larger classifier."""
    names = ("\n".join(CLASSES) + "\n").encode()
    groups = {name: [number, number + 3] for number, name in enumerate(CLASSES)}
    yield {"classnames.txt": names, "candidates.txt": 2 * names, "classes.json": json.dumps(groups).encode()}
    yield {"classnames.txt": "grüner Balken\r\nred\r\n".encode()}
