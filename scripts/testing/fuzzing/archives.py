"""Small published data sets, which the fuzzer damages."""

import io
import json
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from scripts.testing.fuzzing.seeds import GOLDEN, Files, encoded, made, write_files


def parquet() -> Iterator[Files]:
    """Tables of Hugging Face's data sets."""
    import pyarrow as arrow
    from pyarrow import parquet

    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["a", "b"]}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    image = encoded("JPEG")
    columns = {
        "image": [{"bytes": image, "path": f"{row}.jpg"} for row in range(5)],
        "label": [row % 2 for row in range(5)],
        "text": [f"caption {row}" for row in range(5)],
    }
    for compression in ("none", "snappy", "zstd", "gzip"):
        file = io.BytesIO()
        table = arrow.table(columns).replace_schema_metadata(metadata)
        parquet.write_table(table, file, row_group_size=2, compression=compression)
        yield {"train-00000-of-00001.parquet": file.getvalue()}


def cifar() -> Iterator[Files]:
    """The archive of CIFAR-10, and what is in it."""
    archive = (GOLDEN / "data" / "cifar-10-python.tar.gz").read_bytes()
    yield {"cifar-10-python.tar.gz": archive}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        held = {member.name: tar.extractfile(member) for member in tar if member.isfile()}
        yield {f"unpacked/{name.rpartition('/')[2]}": file.read() for name, file in held.items() if file}


def cifar_c() -> Iterator[Files]:
    """Arrays of the released CIFAR-10-C."""

    def make(folder: Path) -> None:
        (folder / "CIFAR-10-C").mkdir()
        np.save(folder / "CIFAR-10-C" / "labels.npy", np.arange(10, dtype=np.uint8))
        np.save(folder / "CIFAR-10-C" / "fog.npy", np.zeros((10, 32, 32, 3), np.uint8))

    yield made(make)


def objectnet() -> Iterator[Files]:
    """Mappings of ObjectNet, and an image."""
    mappings = {
        "folder_to_objectnet_label.json": json.dumps({"alarm_clock": "Alarm clock", "rake": "Rake"}),
        "objectnet_to_imagenet_1k.json": json.dumps({"Alarm clock": "analog clock; digital clock"}),
        "pytorch_to_imagenet_2012_id.json": json.dumps({"409": 1, "530": 0}),
        "imagenet_to_label_2012_v2": "digital clock\nanalog clock\n",
    }
    files = {f"objectnet-1.0/mappings/{name}": text.encode() for name, text in mappings.items()}
    yield {**files, "objectnet-1.0/images/alarm_clock/1.png": encoded("PNG")}


def captions() -> Iterator[Files]:
    """Caption files as they are published, with their images."""
    image = {"a/1.jpg": encoded("JPEG"), "a/2.jpg": encoded("JPEG")}
    karpathy = [
        {"split": "train", "filename": f"{n}.jpg", "filepath": "a", "sentences": [{"raw": "x"}, {"raw": "y z"}]}
        for n in (1, 2)
    ]
    yield {**image, "dataset_coco.json": json.dumps({"dataset": "coco", "images": karpathy}).encode()}
    listed = [{"id": n, "file_name": f"{n}.jpg"} for n in (1, 2)]
    annotations = [{"image_id": n, "id": n, "caption": "a bar"} for n in (1, 1, 2)]
    yield {**image, "captions_val2017.json": json.dumps({"images": listed, "annotations": annotations}).encode()}


def flowers() -> Iterator[Files]:
    """The lists of Oxford Flowers, MATLAB's files."""
    from scipy import io as matlab

    def make(folder: Path, compressed: bool) -> None:
        matlab.savemat(folder / "imagelabels.mat", {"labels": np.arange(1, 7)[None]}, do_compression=compressed)
        lists = {"trnid": [[1, 2]], "valid": [[3, 4]], "tstid": [[5, 6]]}
        matlab.savemat(folder / "setid.mat", {n: np.array(v) for n, v in lists.items()}, do_compression=compressed)
        write_files(folder / "jpg", {f"image_{n:05}.jpg": encoded("JPEG") for n in range(1, 7)})

    yield made(lambda folder: make(folder, True))
    yield made(lambda folder: make(folder, False))


def pets() -> Iterator[Files]:
    """The archives of the Oxford pets."""
    yield {path.name: path.read_bytes() for path in sorted((GOLDEN / "data" / "pets").iterdir())}


def svhn() -> Iterator[Files]:
    """The digits of SVHN, MATLAB's file."""
    from scipy import io as matlab

    def make(folder: Path, compressed: bool) -> None:
        images = np.arange(32 * 32 * 3 * 3, dtype=np.uint32).astype(np.uint8).reshape(32, 32, 3, 3)
        content = {"X": images, "y": np.array([[10], [1], [2]], np.uint8)}
        matlab.savemat(folder / "test_32x32.mat", content, do_compression=compressed)

    yield made(lambda folder: make(folder, True))
    yield made(lambda folder: make(folder, False))


def colorectal() -> Iterator[Files]:
    """The zip archive of colorectal histology."""
    tissues = ("TUMOR", "STROMA", "COMPLEX", "LYMPHO", "DEBRIS", "MUCOSA", "ADIPOSE", "EMPTY")
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for place, tissue in enumerate(tissues, 1):
            archive.writestr(f"{place:02}_{tissue}/1.tif", encoded("TIFF"))
    yield {"Kather_texture_2016_image_tiles_5000.zip": stream.getvalue()}
