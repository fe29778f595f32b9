"""Oxford Flowers-102 (Nilsback and Zisserman 2008) from its images, labels and splits."""

from pathlib import Path

import numpy as np
from jaxtyping import Int

from lit_het.data_pipelines.prepare.archives import Files, FolderFiles, TarFiles, warn_unless_published
from lit_het.data_pipelines.prepare.dataset import DataSet, Split, select_splits, split_of_files
from lit_het.data_pipelines.prepare.matlab import MAX_VALUES, load_variables
from lit_het.errors import UserError
from lit_het.untrusted import Malformed

TEMPLATES = (
    "a photo of a {c}, a flower.",
    "a close-up of a {c} in bloom.",
    "a {c} in a garden.",
    "a picture of the {c}.",
)

# In the order of the labels, which start at 1.
CLASS_NAMES = tuple(
    name.strip()
    for name in """
pink primrose, hard-leaved pocket orchid, canterbury bells, sweet pea, english marigold, tiger lily, moon orchid,
bird of paradise, monkshood, globe thistle, snapdragon, colt's foot, king protea, spear thistle, yellow iris,
globe-flower, purple coneflower, peruvian lily, balloon flower, giant white arum lily, fire lily, pincushion flower,
fritillary, red ginger, grape hyacinth, corn poppy, prince of wales feathers, stemless gentian, artichoke,
sweet william, carnation, garden phlox, love in the mist, mexican aster, alpine sea holly, ruby-lipped cattleya,
cape flower, great masterwort, siam tulip, lenten rose, barberton daisy, daffodil, sword lily, poinsettia,
bolero deep blue, wallflower, marigold, buttercup, oxeye daisy, common dandelion, petunia, wild pansy, primula,
sunflower, pelargonium, bishop of llandaff, gaura, geranium, orange dahlia, pink-yellow dahlia, cautleya spicata,
japanese anemone, black-eyed susan, silverbush, californian poppy, osteospermum, spring crocus, bearded iris,
windflower, tree poppy, gazania, azalea, water lily, rose, thorn apple, morning glory, passion flower, lotus, toad lily,
anthurium, frangipani, clematis, hibiscus, columbine, desert-rose, tree mallow, magnolia, cyclamen, watercress,
canna lily, hippeastrum, bee balm, ball moss, foxglove, bougainvillea, camellia, mallow, mexican petunia, bromelia,
blanket flower, trumpet creeper, blackberry lily
""".replace("\n", " ").split(",")
)

# As published: the small part is for training, the large one for testing.
_LISTS = {"train": "trnid", "val": "valid", "test": "tstid"}
_PUBLISHED = {"train": 1_020, "val": 1_020, "test": 6_149}
_MD5 = {
    "102flowers.tgz": "52808999861908f626f3c1f4e79d11fa",
    "imagelabels.mat": "e0620be6f572b9609742df49c70aed4d",
    "setid.mat": "a5357ecc9cb78c4bef273ce3793fc85c",
}


def read_flowers(source: Path, scratch: Path, split: str | None = None) -> DataSet:
    """Opens a folder with ``102flowers.tgz`` (or ``jpg`` unpacked from it), ``imagelabels.mat`` and ``setid.mat``.

    Args:
        source: the folder.
        scratch: a folder with space for the decompressed archive.
        split: ``train``, ``val`` or ``test``; None means all.
    """
    splits = select_splits(_LISTS, split, "Oxford Flowers-102")
    images = _open(source, scratch)
    paths = {Path(name).stem: name for name in images.sizes if name.endswith(".jpg")}
    # MATLAB counts from 1.
    labels = _numbers(source, "imagelabels.mat", "labels") - 1
    if not ((labels >= 0) & (labels < len(CLASS_NAMES))).all():
        raise UserError(f"{source / 'imagelabels.mat'}: has labels that are not from 1 to 102; download it again")
    found = {name: _split(images, paths, labels, source, name) for name in splits}
    return DataSet(found, CLASS_NAMES, TEMPLATES)


def _open(source: Path, scratch: Path) -> Files:
    archive = source / "102flowers.tgz"
    if (source / "jpg").is_dir():
        return FolderFiles(source / "jpg")
    if not archive.is_file():
        raise UserError(f"{source}: holds neither {archive.name} nor a folder jpg; put the official archive there")
    files = TarFiles(archive, scratch)
    warn_unless_published(archive, _MD5[archive.name])
    return files


def _numbers(source: Path, file: str, variable: str) -> Int[np.ndarray, " n"]:
    """Returns a list of integers in a MATLAB file."""
    path = source / file
    if not path.is_file():
        raise UserError(f"{source}: holds no {file}; put the official one there")
    try:
        numbers = np.array(load_variables(path.read_bytes(), variable)[variable], np.float64)
    except (Malformed, ValueError, TypeError) as error:
        raise UserError(f"{path}: holds no readable {variable} ({error}); download it again") from error
    if not (numbers == np.floor(numbers)).all() or np.abs(numbers).max(initial=0) > MAX_VALUES:
        raise UserError(f"{path}: {variable} are not valid image numbers; download it again")
    warn_unless_published(path, _MD5[file])
    return numbers.astype(np.int64)


def _split(images: Files, paths: dict[str, str], labels: Int[np.ndarray, " n"], source: Path, split: str) -> Split:
    names, classes = [], []
    for number in _numbers(source, "setid.mat", _LISTS[split]).tolist():
        name = f"image_{number:05}"
        if name not in paths or not 1 <= number <= len(labels):
            raise UserError(f"{images.path}: {name}.jpg, which setid.mat names, has no image or label; download again")
        names.append(paths[name])
        classes.append(int(labels[number - 1]))
    return split_of_files(images, names, classes, published=_PUBLISHED[split])
