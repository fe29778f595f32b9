"""ObjectNet (Barbu et al. 2019): the images of its 113 classes that are ImageNet's, or unions of several of these."""

from pathlib import Path
from typing import Any

from lit_het.data_pipelines.prepare.archives import FolderFiles
from lit_het.data_pipelines.prepare.dataset import DataSet, images_in, select_splits, split_of_files
from lit_het.data_pipelines.prepare.imagenet import NUM_CLASSES, TEMPLATES
from lit_het.data_pipelines.texts.openai_clip import imagenet_names
from lit_het.errors import UserError
from lit_het.untrusted import Malformed, parse_json

BORDER = 2
"""Width of the red border around every released image, in pixels."""

# Images of the classes that ImageNet has; 50,273 in all.
_PUBLISHED = 18_574


def read_objectnet(source: Path, split: str | None = None) -> DataSet:
    """Opens the folder unpacked from ``objectnet-1.0.zip``, with ``images`` and ``mappings``.

    The classes are those of ``objectnet_to_imagenet_1k.json``, in the order of their folders; images of other classes
    are left out. All of ImageNet's names are candidates.

    Args:
        source: the folder.
        split: ``test``, the only one, or None.
    """
    select_splits(["test"], split, "ObjectNet")
    if source.is_file():
        # Its zip is encrypted, and Python takes hours to decrypt what unzip decrypts in minutes.
        raise UserError(f"{source}: unpack it (unzip -P, with the password of objectnet.dev) and name the folder")
    files = FolderFiles(source)
    classes = _classes(files)
    label_of = {folder: label for label, folder in enumerate(classes)}
    images = images_in(files)
    known = [name for name in images if _folder(name) in label_of]
    if not known:
        raise UserError(f"{source}: holds no images of ImageNet's classes; name the folder with images and mappings")
    test = split_of_files(
        files,
        known,
        [label_of[_folder(name)] for name in known],
        published=_PUBLISHED,
        left_out={"of classes that ImageNet lacks": len(images) - len(known)},
        border=BORDER,
    )
    names, groups = zip(*classes.values(), strict=True)
    return DataSet({"test": test}, names, TEMPLATES, imagenet_names(), groups)


def _folder(name: str) -> str:
    return Path(name).parent.name


def _classes(files: FolderFiles) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the name of each class and its classes among ImageNet's 1,000, by folder, sorted."""
    try:
        name_of: dict[str, str] = _json(files, "folder_to_objectnet_label.json")
        unions: dict[str, str] = _json(files, "objectnet_to_imagenet_1k.json")
        # Lines of the file of names, from 0, by label.
        lines: dict[str, int] = _json(files, "pytorch_to_imagenet_2012_id.json")
        names = _member(files, "imagenet_to_label_2012_v2").decode("utf-8").splitlines()
        label_of = {names[line].strip(): int(label) for label, line in lines.items()}
        classes = {
            folder: (name, tuple(label_of[one] for one in unions[name].split("; ")))
            for folder, name in sorted(name_of.items())
            if name in unions
        }
    except (Malformed, ValueError, TypeError, AttributeError, LookupError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{files.path}: its mappings cannot be read ({reason}); unpack the archive again") from error
    labels = [label for _, group in classes.values() for label in group]
    if len(classes) != len(unions) or not all(0 <= label < NUM_CLASSES for label in labels):
        raise UserError(f"{files.path}: its mappings do not fit together; unpack the archive again")
    return classes


def _json(files: FolderFiles, base: str) -> Any:
    return parse_json(_member(files, base))


def _member(files: FolderFiles, base: str) -> bytes:
    name = next((name for name in files.sizes if f"/{name}".endswith(f"/mappings/{base}")), None)
    if name is None:
        raise UserError(f"{files.path}: holds no mappings/{base}; name the folder with images and mappings")
    return files.read(name)
