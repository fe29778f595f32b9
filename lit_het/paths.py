"""Checks of paths that import nothing heavy: commands report a wrong path before they load JAX."""

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path

from lit_het.errors import UserError

_SHIPPED = Path(__file__).parent / "configs"
_GLOB_OR_BRACES = re.compile(r"[*?\[{]")


def locate_config(path: Path, function: str = "get_config") -> Path:
    """Returns the path of a Python configuration file, which may be given as the name of a shipped one.

    Args:
        path: ``x.py``, or the name ``x`` of a module in `lit_het.configs`; ``:name=value`` after either is retained.
        function: the function that the file must define.
    """
    stem, colon, _ = str(path).rpartition(".py:")
    file = Path(f"{stem}.py") if colon else path
    if file.is_file():
        return path
    name, colon, arguments = str(path).partition(":")
    names = shipped_configs(function)
    if name in names:
        return Path(f"{_SHIPPED / name}.py{colon}{arguments}")
    raise UserError(f"no configuration file {file}; give a path, or the name of a shipped one: {', '.join(names)}")


def locate_training(path: Path) -> Path:
    """Returns the path of a training configuration: JSON, Python, or the name of a shipped one."""
    if path.suffix != ".json":
        return locate_config(path)
    require_saved_config(path)
    return path


def shipped_configs(function: str = "get_config") -> list[str]:
    """Returns the names of the modules in `lit_het.configs` that define a function."""
    return sorted(path.stem for path in _SHIPPED.glob("*.py") if f"\ndef {function}(" in path.read_text("utf-8"))


def require_run(run_dir: Path) -> None:
    """Checks that a directory holds the configuration of a run."""
    require_saved_config(run_dir / "config.json")


def member_dir(run_dir: Path, number: int) -> Path:
    """Returns the directory of one member of a deep ensemble that is trained into ``run_dir``, counted from 0."""
    return run_dir / f"member_{number}"


def runs_in(directory: Path) -> list[Path]:
    """Returns the runs of a directory: itself, or the members that ``lit-het train --members`` trained into it."""
    members: list[Path] = []
    if _is_missing(directory / "config.json"):
        numbers = (re.fullmatch(r"member_([0-9]+)", path.name) for path in directory.glob("member_*"))
        members = [member_dir(directory, number) for number in sorted(int(one[1]) for one in numbers if one)]
    for member in members:
        if _is_missing(member / "config.json"):
            raise UserError(f"{member} holds no run; train it with --resume, or remove the folder")
    if not members:
        require_run(directory)
    return members or [directory]


def require_different(directories: Sequence[Path]) -> None:
    """Checks that no run is listed twice, by any of its paths."""
    places = [directory.resolve() for directory in directories]
    for number, place in enumerate(places):
        if place in places[:number]:
            raise UserError(f"{directories[number]} is listed twice; list each run once")


def require_saved_config(path: Path) -> None:
    """Checks that the ``config.json`` of a run exists."""
    if _is_missing(path):
        raise UserError(f"{path} is missing; give the directory of a run of lit-het")


def require_file(address: str) -> None:
    """Checks that a local file exists; addresses such as ``gs://bucket/file`` are not checked."""
    if _is_local(address) and _is_missing(address):
        raise UserError(f"{address}: cannot be read (No such file or directory); check the path")


def require_shards(pattern: str) -> None:
    """Checks that a local file or folder of shards exists; globs, braces and addresses are not checked."""
    if _is_local(pattern) and not _GLOB_OR_BRACES.search(pattern) and _is_missing(pattern):
        raise UserError(f"{pattern}: no tar file matches; check the path of the shards")


def require_source(path: Path) -> None:
    """Checks that the published files of a data set exist."""
    if _is_missing(path):
        raise UserError(f"{path}: cannot be read (No such file or directory); check the path of the source")


def require_weights(address: str) -> None:
    """Checks that a local source of weights exists: a folder, a file, ``x.npz:part``, or ``x`` for ``x.index``."""
    file = re.sub(r"(\.npz):.*", r"\1", address)
    if _is_local(address) and _is_missing(file) and _is_missing(f"{file}.index"):
        raise no_weights(file)


def no_weights(address: str) -> UserError:
    """Returns the error of a local source of weights that does not exist, which may be the name of a repository."""
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", address) and _is_missing(address.partition("/")[0]):
        return UserError(f"{address} does not exist; did you mean hf://{address}, of the Hugging Face hub?")
    return UserError(f"{address} does not exist; give a file, a folder or an address such as hf://owner/model")


def named_folder(argument: str) -> tuple[str, str]:
    """Returns the name and the folder of a data set that is given as ``NAME=FOLDER`` or ``FOLDER``.

    Returns:
        The name, empty where there is none, and the folder without a slash at its end.
    """
    name, equals, path = argument.partition("=")
    if not equals or Path(argument).is_dir():
        name, path = "", argument
    if "/" in name:
        raise UserError(f"{argument}: the name of a set becomes that of a file; leave out the slash")
    folder = path.rstrip("/")
    if not folder:
        raise UserError(f"{argument!r} names no folder; write NAME=FOLDER, or FOLDER with classnames.txt and shards")
    if ("://" not in folder or folder.startswith("pipe:")) and not Path(folder).is_dir():
        raise UserError(f"no folder {folder}; name a folder with classnames.txt and shards")
    return name, folder


def _is_local(address: str) -> bool:
    """Returns whether an address is a path, neither one for fsspec (``gs://...``) nor a command (``pipe:...``)."""
    return "://" not in address and not address.startswith("pipe:")


def _is_missing(path: Path | str) -> bool:
    """Returns whether nothing exists at a path; a path that cannot be examined is left to the code that reads it."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except ValueError:
        return False
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    return False
