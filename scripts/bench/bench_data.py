"""Times the way from shards to batches on photographs that it makes, and reports how near each filter is to bicubic.

Some 2,000 JPEGs of 500 x 375 pixels (quality 90, colours subsampled) with captions are written to shards. Variants run
in turn over the same images, a chunk at a time; rates are images per CPU-second, ratios are taken chunk by chunk
against simplejpeg's bare decoding (fast DCT, fast upsampling, no resize).

    python -m scripts.bench.bench_data [--images 2000] [--directory DIR]
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import importlib.util
import io
import itertools
import os
import platform
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
from PIL import Image
from rich.progress import track

from lit_het.data_pipelines.data_config import LoaderConfig, Streaming
from lit_het.data_pipelines.images.augment import HorizontalFlip, StreamRandom
from lit_het.data_pipelines.images.transforms import Filter, InceptionCrop, Preprocessing, Training
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.storage import content_or_raise
from lit_het.data_pipelines.shards.stream import Stream
from lit_het.data_pipelines.shards.writing import IMAGE, expand, write_shards
from lit_het.data_pipelines.texts.tokenizers import SentencePieceTokenizer, train_sentencepiece
from lit_het.eval.report.tables import markdown_table

SIZE = 224
HEIGHT, WIDTH = 375, 500
FILTERS: tuple[Filter, ...] = ("fast", "area", "bilinear", "bicubic")
BARE = "bare simplejpeg decode"
AUGMENTATIONS = (HorizontalFlip(),)
WORDS = (
    ("a", "the", "one", "some", "my", "an old", "a very large"),
    ("red", "wooden", "quiet", "bright", "small", "crowded", "snowy", "rusty", "green", "ancient"),
    ("house", "river", "market", "bicycle", "dog", "mountain", "harbour", "train", "garden", "bridge", "kitchen"),
    ("near", "behind", "under", "beside", "in front of", "seen from"),
    ("the sea", "a forest", "the station", "two trees", "an empty road", "the old town", "a field of flowers"),
    ("at dawn", "in winter", "on a rainy day", "photographed in 1998", "with some people", "stock photo", ""),
)

_AHEAD = 6  # batches

# Called with the numbers of the samples of a chunk.
Variant = Callable[[Sequence[int]], object]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    options = _options(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary)
        tokenizer = photograph_shards(directory, options.images, options.seed)
        index = ShardIndex(expand(str(directory)), [IMAGE, "txt"])
        sizes = [len(_image(index, number)) for number in range(len(index))]
        print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; {len(index)} images")
        print(f"of {WIDTH} x {HEIGHT}, {np.mean(sizes) / 1e3:.0f} KB on average ({min(sizes)} to {max(sizes)} bytes)\n")
        _rates(directory, index, tokenizer, options.chunk, options.rounds)
        _threads(directory, tokenizer, options.chunk, options.rounds)
        _streams(directory, tokenizer, options.chunk, options.rounds)
        _distances(index, min(len(index), options.compared))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--chunk", type=int, default=100, help="images of a measurement, and of a batch")
    parser.add_argument("--rounds", type=int, default=1, help="over all images")
    parser.add_argument("--compared", type=int, default=300, help="images that the filters are compared on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=None, help="keeps the shards, and takes those that it holds")
    return parser.parse_args(arguments)


def photographs(count: int, seed: int) -> Iterator[np.ndarray]:
    """Draws images with the statistics of photographs ``[375 500 3]``.

    Amplitudes fall with frequency (Field 1987), colours vary more slowly than light, and surfaces with textures of
    their own meet at sharp edges.
    """
    random = np.random.default_rng(seed)
    textures = [_texture(random, exponent) for exponent in (0.9, 1.1, 1.3, 1.6) for _ in range(4)]
    colours = [_texture(random, 1.8) for _ in range(8)]
    for _ in range(count):
        light = random.uniform(30, 45) * _part(random, textures)
        tint = np.stack([random.uniform(4, 12) * _part(random, colours) for _ in range(3)], axis=-1)
        light += np.linspace(-1, 1, HEIGHT, dtype=np.float32)[:, None] * random.uniform(-40, 40)
        for _ in range(random.integers(6, 25)):
            surface = np.zeros((HEIGHT, WIDTH), np.uint8)
            centre, radius = random.uniform((0, 0), (WIDTH, HEIGHT)), random.uniform(15, 140)
            angles = np.sort(random.uniform(0, 2 * np.pi, random.integers(3, 12)))
            corners = centre + radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
            cv2.fillPoly(surface, [corners.astype(np.int32)], 255, cv2.LINE_AA)
            opaque = surface.astype(np.float32) / 255
            own = random.uniform(-70, 70) + random.uniform(5, 35) * _part(random, textures)
            light += opaque * (own - light)
            tint += opaque[..., None] * (random.normal(0, 14, 3).astype(np.float32) - 0.5 * tint)
        grain = random.normal(0, random.uniform(0.5, 3), (HEIGHT, WIDTH)).astype(np.float32)
        yield np.clip(random.uniform(95, 145) + (light + grain)[..., None] + tint, 0, 255).astype(np.uint8)


def _texture(random: np.random.Generator, exponent: float) -> np.ndarray:
    """Noise of unit variance whose amplitude is frequency ** -exponent, larger than an image."""
    frequency = np.hypot(np.fft.fftfreq(2 * HEIGHT)[:, None], np.fft.rfftfreq(2 * WIDTH)[None])
    frequency[0, 0] = np.inf
    phases = random.normal(size=(*frequency.shape, 2)) @ [1, 1j]
    noise = np.fft.irfft2(phases * frequency**-exponent, (2 * HEIGHT, 2 * WIDTH))
    return (noise / noise.std()).astype(np.float32)


def _part(random: np.random.Generator, textures: Sequence[np.ndarray]) -> np.ndarray:
    texture = textures[int(random.integers(len(textures)))]
    top, left = random.integers((HEIGHT, WIDTH))
    part = texture[top : top + HEIGHT, left : left + WIDTH]
    return part[:, ::-1] if random.random() < 0.5 else part


def photograph_shards(directory: Path, count: int, seed: int, *, length: int = 64) -> SentencePieceTokenizer:
    """Writes photographs with captions, where there are none, and trains a tokenizer on the captions."""
    random = np.random.default_rng(seed)
    captions = [" ".join(random.choice(words) for words in WORDS).strip() for _ in range(count)]
    if not any(directory.glob("*.tar")):

        def samples() -> Iterator[dict[str, str | bytes]]:
            images = track(photographs(count, seed), "making photographs", count, transient=True)
            for number, (pixels, caption) in enumerate(zip(images, captions, strict=True)):
                data = simplejpeg.encode_jpeg(pixels, 90, "RGB", "420")
                yield {"__key__": f"{number:06d}", "jpg": data, "txt": caption}

        write_shards(directory, samples(), samples_per_shard=1000)
    return SentencePieceTokenizer(train_sentencepiece(captions, vocabulary_size=300), length)


def _image(index: ShardIndex, number: int) -> bytes:
    return content_or_raise(index.read([number], [IMAGE])[0][0])


def _rates(directory: Path, index: ShardIndex, tokenizer: SentencePieceTokenizer, chunk: int, rounds: int) -> None:
    def each(apply: Callable[[bytes, int], object]) -> Variant:
        return lambda numbers: [apply(_image(index, number), number) for number in numbers]

    def through(loader: Loader) -> Variant:
        batches = itertools.cycle([loader.batches()])
        return lambda numbers: next(next(batches))

    random = StreamRandom(0)
    variants: dict[str, Variant] = {
        BARE: each(lambda data, _: simplejpeg.decode_jpeg(data, "RGB", fastdct=True, fastupsample=True)),
        "raw tar read": each(lambda data, _: data),
        "simplejpeg decode, exact": each(lambda data, _: simplejpeg.decode_jpeg(data, "RGB")),
    }
    for filter in ("fast", "bicubic"):
        evaluation = Preprocessing("crop", 1.0, filter)
        training = Training(evaluation, InceptionCrop(), AUGMENTATIONS)
        variants |= {
            f"training (crop, flip), {filter}": each(
                lambda data, number, training=training: training.apply(data, SIZE, random.at(number))
            ),
            f"evaluation (central crop), {filter}": each(
                lambda data, _, evaluation=evaluation: evaluation.apply(data, SIZE)
            ),
            f"whole loader, training, {filter}": through(_loader(directory, tokenizer, chunk, filter, threads=0)),
        }
    variants["Pillow + NumPy, evaluation"] = each(lambda data, _: _pillow(data, SIZE))
    variants |= _open_clip(index)
    chunks = [range(start, start + chunk) for start in range(0, len(index) - chunk + 1, chunk)] * rounds
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    names = collections.deque(variants)
    for numbers in track(chunks, "timing", transient=True):
        names.rotate(1)  # what runs before leaves its mark on caches and clocks
        for name in names:
            began = time.process_time()
            variants[name](numbers)
            seconds[name].append(time.process_time() - began)
    _table(
        ("variant", "ms an image", "images a CPU-second", f"rate over {BARE}"),
        [
            (name, f"{1e3 * np.median(times) / chunk:.3f}", f"{chunk / np.median(times):,.0f}", _ratio(seconds, name))
            for name, times in seconds.items()
        ],
    )


def _ratio(seconds: dict[str, list[float]], name: str, other: str = BARE) -> str:
    """Median of the chunks' ratios, and the range of their middle 80 %."""
    ratios = np.array(seconds[other]) / np.maximum(seconds[name], 1e-9)
    low, middle, high = np.quantile(ratios, [0.1, 0.5, 0.9])
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def _loader(
    directory: Path, tokenizer: SentencePieceTokenizer, batch_size: int, filter: Filter, threads: int
) -> Loader:
    config = LoaderConfig(
        (str(directory),),
        SIZE,
        batch_size,
        preprocessing=Preprocessing("crop", 1.0, filter),
        crop=InceptionCrop(),
        augmentations=AUGMENTATIONS,
        shuffle=False,
        threads=threads,
    )
    return Loader(config, tokenizer)


def _threads(directory: Path, tokenizer: SentencePieceTokenizer, batch_size: int, rounds: int) -> None:
    """Wall time of the whole loader, training, fast, with one and with two threads, in turn.

    Whatever else runs takes more from two threads than from one: the best rounds stand beside the medians.
    """
    seconds: dict[int, list[float]] = {1: [], 2: []}
    loaders = {threads: _loader(directory, tokenizer, batch_size, "fast", threads) for threads in seconds}
    for _ in track(range(10 * rounds), "timing threads", transient=True):
        for threads, loader in loaders.items():
            batches = loader.batches()
            for _ in range(threads + 1):  # until reading is in its stride
                next(batches)
            began = time.perf_counter()
            for _ in range(6):
                next(batches)
            seconds[threads].append((time.perf_counter() - began) / (6 * batch_size))
            batches.close()
    rows = []
    for name, pick in (("median", np.median), ("best round", np.min)):
        one, two = (float(pick(seconds[threads])) for threads in (1, 2))
        rows.append((name, f"{1 / one:,.0f}", f"{1 / two:,.0f}", f"{one / two:.2f}"))
    _table(("whole loader, training, fast: images a second", "1 thread", "2 threads", "ratio"), rows)


def _streams(directory: Path, tokenizer: SentencePieceTokenizer, batch_size: int, rounds: int) -> None:
    """Rates of streams of files and of commands over that of the loader, with two threads each, in turn."""
    loader = _loader(directory, tokenizer, batch_size, "fast", threads=2)
    streaming = dataclasses.replace(loader.config, shuffle=True, stream=Streaming(batch_size))
    commands = tuple(f"pipe:cat {shlex.quote(address)}" for address in expand(str(directory)))
    readers: dict[str, Loader | Stream] = {
        "loader": loader,
        "stream of files": Stream(streaming, tokenizer),
        "stream of commands": Stream(dataclasses.replace(streaming, shards=commands), tokenizer),
    }
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    for _ in track(range(10 * rounds), "timing streams", transient=True):
        for name, reader in readers.items():
            with contextlib.closing(reader.batches()) as batches:
                for _ in range(_AHEAD):  # what is read ahead
                    next(batches)
                began = time.perf_counter()
                for _ in range(_AHEAD):
                    next(batches)
                seconds[name].append((time.perf_counter() - began) / (_AHEAD * batch_size))
    _table(
        ("2 threads, training, fast", "images a second", "rate over the loader's"),
        [(name, f"{1 / np.median(times):,.0f}", _ratio(seconds, name, "loader")) for name, times in seconds.items()],
    )


def _distances(index: ShardIndex, count: int) -> None:
    """PSNR of each filter to Pillow's antialiased bicubic, all of it from the bytes of the file on."""
    rows = []
    fits = {"squash": Preprocessing(), "crop": Preprocessing("crop"), "crop, 0.875": Preprocessing("crop", 0.875)}
    for name, fit in fits.items():
        found: dict[Filter, list[float]] = {filter: [] for filter in FILTERS}
        for number in track(range(count), f"comparing, {name}", transient=True):
            data = _image(index, number)
            expected = _pillow(data, SIZE, None if name == "squash" else fit.crop_fraction)
            for filter, values in found.items():
                ours = Preprocessing(fit.fit, fit.crop_fraction, filter).apply(data, SIZE)
                error = np.square(ours.astype(np.float32) - expected).mean()
                values.append(min(99.0, 10 * np.log10(255**2 / max(error, 1e-9))))
        rows.append((name, *(f"{np.mean(values):.1f} ({min(values):.1f})" for values in found.values())))
    _table(("PSNR in dB, at most 99: mean (least)", *FILTERS), rows)


def _pillow(data: bytes, size: int, crop_fraction: float | None = 1.0) -> np.ndarray:
    """The baseline: opens, resizes with antialiased bicubic and crops, as torchvision does; None squashes."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    if crop_fraction is None:
        return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC))
    shorter = round(size / crop_fraction)
    width, height = (int(shorter * side / min(image.size)) for side in image.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(resized.crop((left, top, left + size, top + size)))


def _open_clip(index: ShardIndex) -> dict[str, Variant]:
    if importlib.util.find_spec("open_clip") is None:
        print("open_clip is not installed: its pipeline is left out\n")
        return {}
    import open_clip  # pyright: ignore[reportMissingImports]

    transform = functools.partial(open_clip.image_transform, SIZE)
    variants = {}
    for name, apply in (("training", transform(is_train=True)), ("evaluation", transform(is_train=False))):
        variants[f"open_clip, {name}"] = lambda numbers, apply=apply: [
            apply(Image.open(io.BytesIO(_image(index, number)))) for number in numbers
        ]
    return variants


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(markdown_table(columns, rows))


if __name__ == "__main__":
    main()
