"""Images that a published JSON file lists with their captions or questions."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_het.data_pipelines.prepare.archives import Files
from lit_het.data_pipelines.prepare.dataset import Sample, Split, fingerprint, images_in
from lit_het.errors import MissingImage, UserError
from lit_het.untrusted import read_json_object


@dataclasses.dataclass(frozen=True)
class Listed:
    """An image in a JSON file.

    Attributes:
        where: its entry, for error messages.
        path: of its file; ``name.*`` has any suffix.
        members: see `Sample`.
        key: of its sample; None uses the name of its file.
    """

    where: str
    path: str
    members: Mapping[str, bytes]
    key: str | None = None


def read_object(source: Path, most_bytes: int) -> dict[str, Any]:
    """Returns the JSON object in a published file."""
    try:
        return read_json_object(source, most_bytes)
    except OSError as error:
        raise UserError(f"{source}: cannot be read ({error.strerror}); put the published file there") from error
    except ValueError as error:
        raise UserError(f"{source}: is not a published file ({error}); download it again") from error


def match_name(source: Path, pattern: str, example: str) -> re.Match[str]:
    """Returns the match of a source's name, which is all that tells the split of some published files."""
    match = re.fullmatch(pattern, source.name)
    if match is None:
        raise UserError(f"{source}: its name is not that of a published file; name one, such as {example}")
    return match


def field(entry: Any, name: str, kind: type, where: str) -> Any:
    """Returns a field of an entry."""
    value = entry.get(name) if isinstance(entry, Mapping) else None
    # To Python, true is a whole number, too.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UserError(f"{where}: has no {name!r}, unlike published files; download it again")
    return value


def split_of_listed(
    listed: Sequence[Listed],
    files: Files,
    published: int | None,
    left_out: Mapping[str, int] | None = None,
    *,
    skip_missing: bool = False,
) -> Split:
    """Returns a split of listed images.

    Args:
        listed: the images.
        files: the folder or archive that contains them at any depth.
        published: see `Split`.
        left_out: see `Split`.
        skip_missing: leave out images that are missing, unless all are.
    """
    found = _find(listed, files)
    if skip_missing and any(found):
        left_out = {**(left_out or {}), "without image": found.count(None)}
        listed, found = zip(*((one, name) for one, name in zip(listed, found, strict=True) if name), strict=True)
    names = [_present(one, name, files) for one, name in zip(listed, found, strict=True)]
    keys = [one.key or key_of(name) for one, name in zip(listed, names, strict=True)]
    first: dict[str, Listed] = {}
    for key, one in zip(keys, listed, strict=True):
        if first.setdefault(key, one) is not one:
            raise UserError(f"{one.where}: {one.path} has the name of {first[key].where}; names must differ")

    def read(numbers: Sequence[int]) -> Iterator[Sample]:
        for number in numbers:
            name = names[number]
            yield Sample(files.read(name), files.where(name), listed[number].members, keys[number])

    texts = (content for one in listed for content in one.members.values())
    return Split(
        num_samples=len(listed),
        read=read,
        fingerprint=fingerprint([*(f"{name}:{files.sizes[name]}" for name in names), *texts]),
        published=published,
        left_out=left_out or {},
    )


def key_of(path: str) -> str:
    """Returns the key of an image: its name without its suffix, and without dots, which would end it in webdataset."""
    return Path(path).stem.replace(".", "_")


def _present(one: Listed, name: str | None, files: Files) -> str:
    """Returns the name of an image's file; raises `MissingImage` if it has none."""
    if name is None:
        raise MissingImage(f"{files.path}: holds no {one.path}, which {one.where} lists")
    return name


def _find(listed: Sequence[Listed], files: Files) -> list[str | None]:
    """Returns the file of each image: at the listed path, or else with the same name in any folder; None without."""
    anywhere: dict[str, list[str]] = {}
    for name in images_in(files):
        base = name.rpartition("/")[2]
        anywhere.setdefault(base, []).append(name)
        anywhere.setdefault(f"{base.rpartition('.')[0]}.*", []).append(name)
    found = list[str | None]()
    for one in listed:
        # Archives are unpacked into various folders; a name that is unique is enough.
        candidates = [one.path] if one.path in files.sizes else anywhere.get(one.path.rpartition("/")[2], [])
        if len(candidates) > 1:
            # The listed folder may lie below another one.
            candidates = [name for name in candidates if name.endswith(f"/{one.path}")] or candidates
        if len(candidates) > 1:
            raise UserError(f"{one.where}: {' and '.join(candidates[:2])} both match; choose with --images")
        found.append(candidates[0] if candidates else None)
    return found
