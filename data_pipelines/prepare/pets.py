"""The Oxford-IIIT Pet data set (Parkhi et al. 2012) from its images and annotations."""

from pathlib import Path

from lit_het.data_pipelines.prepare.archives import Files, FolderFiles, TarFiles, warn_unless_published
from lit_het.data_pipelines.prepare.dataset import DataSet, Split, images_in, select_splits, split_of_files
from lit_het.errors import UserError

TEMPLATES = (
    "a photo of a {c}, a breed of pet.",
    "a photo of a {c} at home.",
    "a close-up of a {c}, somebody's pet.",
    "a picture of the {c}.",
)

# In the order of the ids in the lists, which start at 1; file names start with these names.
_BREEDS = """
Abyssinian american_bulldog american_pit_bull_terrier basset_hound beagle Bengal Birman Bombay boxer British_Shorthair
chihuahua Egyptian_Mau english_cocker_spaniel english_setter german_shorthaired great_pyrenees havanese japanese_chin
keeshond leonberger Maine_Coon miniature_pinscher newfoundland Persian pomeranian pug Ragdoll Russian_Blue saint_bernard
samoyed scottish_terrier shiba_inu Siamese Sphynx staffordshire_bull_terrier wheaten_terrier yorkshire_terrier
"""
_BREEDS_IN_FILES = tuple(_BREEDS.split())
CLASS_NAMES = tuple(" ".join(word.capitalize() for word in breed.split("_")) for breed in _BREEDS_IN_FILES)

_LISTS = {"train": "trainval.txt", "test": "test.txt"}
_PUBLISHED = {"train": 3_680, "test": 3_669}
_MD5 = {"images": "5c4f3ee8e5d25df40f4fd59a7f44e54c", "annotations": "95a8c909bbe2e81eed6a22bccdf3f68f"}


def read_pets(source: Path, scratch: Path, split: str | None = None) -> DataSet:
    """Opens a folder with ``images.tar.gz`` and ``annotations.tar.gz``, or with the folders unpacked from them.

    Args:
        source: the folder.
        scratch: a folder with space for the decompressed archives.
        split: ``train``, which is the official trainval, or ``test``; None means both.
    """
    splits = select_splits(_LISTS, split, "Oxford-IIIT Pet")
    images, annotations = (_open(source, name, scratch) for name in ("images", "annotations"))
    return DataSet({name: _split(images, annotations, name) for name in splits}, CLASS_NAMES, TEMPLATES)


def _open(source: Path, name: str, scratch: Path) -> Files:
    folder, archive = source / name, source / f"{name}.tar.gz"
    if folder.is_dir():
        return FolderFiles(folder)
    if not archive.is_file():
        raise UserError(f"{source}: holds neither {archive.name} nor a folder {name}; put the official archives there")
    files = TarFiles(archive, scratch)
    warn_unless_published(archive, _MD5[name])
    return files


def _split(images: Files, annotations: Files, split: str) -> Split:
    paths = {Path(name).stem: name for name in images_in(images)}
    chosen_images: dict[str, int] = {}
    for name, label in _read_list(annotations, _LISTS[split]):
        if name not in paths:
            raise UserError(f"{images.path}: holds no {name}.jpg, which {_LISTS[split]} names; download it again")
        if paths[name] in chosen_images:
            raise UserError(f"{annotations.path}: {_LISTS[split]} names {name} twice; download it again")
        chosen_images[paths[name]] = label
    return split_of_files(images, [*chosen_images], [*chosen_images.values()], published=_PUBLISHED[split])


def _read_list(annotations: Files, base: str) -> list[tuple[str, int]]:
    """Returns the names of images and their classes, from 0."""
    path = next((name for name in annotations.sizes if name.rpartition("/")[2] == base), None)
    if path is None:
        raise UserError(f"{annotations.path}: holds no {base}; download it again")
    entries = []
    for number, line in enumerate(annotations.read(path).decode("utf-8", "replace").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, identifier = (*line.split(), "")[:2]
        label = int(identifier) - 1 if identifier.isdecimal() else -1
        if not 0 <= label < len(_BREEDS_IN_FILES) or name.rpartition("_")[0] != _BREEDS_IN_FILES[label]:
            raise UserError(f"{annotations.where(path)} line {number}: {line!r} is not an image with its class")
        entries.append((name, label))
    return entries
