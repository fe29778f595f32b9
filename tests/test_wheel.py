"""The wheel holds whole packages, and goes together with modules of the user that have the names of its folders."""

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
USERS_SCRIPT = """
import configs, data_pipelines, eval
import lit_het, lit_het.configs, lit_het.data_pipelines, lit_het.eval
from lit_het.configs.lit_so400m_het_xl import get_config

for module in (configs, data_pipelines, eval, lit_het, lit_het.configs, lit_het.data_pipelines, lit_het.eval):
    print(module.__file__)
print(get_config().run_dir)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("setuptools", minversion="77", reason="the test extra names it")
    # A copy, as building leaves folders beside the sources.
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("lit_het", "data_pipelines", "eval", "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    flags = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target))
    subprocess.run([sys.executable, "-m", "pip", "wheel", *flags, str(source)], check=True, cwd=target)
    [built] = target.glob("*.whl")
    return built


def test_the_wheel_holds_every_module_once(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.endswith(".py")}
    modules = {path.relative_to(ROOT) for path in (ROOT / "lit_het").rglob("*.py")}
    for folder in ("data_pipelines", "eval", "configs"):
        modules |= {"lit_het" / path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py")}
    assert names == {path.as_posix() for path in modules}


def test_the_wheel_holds_the_data_of_others_with_their_licence(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("lit_het/") and not name.endswith(".py")]
        licence = archive.read("lit_het/data_pipelines/texts/openai_clip/LICENSE").decode()
    folders = [path for path in (ROOT / "data_pipelines", ROOT / "eval") for path in path.rglob("*.*")]
    shipped = {path for path in folders if path.suffix in (".txt", ".csv")}
    assert {f"lit_het/{path.relative_to(ROOT).as_posix()}" for path in shipped} < set(names)
    assert licence.startswith("MIT License\n\nCopyright (c) 2021 OpenAI")


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """An environment of its own with the installed wheel; its dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    [packages] = folder.glob("lib/python*/site-packages")
    # Not of this environment's own links, which would lead to the repository: only folders of an environment are
    # searched for them.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    flags = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index")
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin/python", "install")
    _run(folder, folder, *pip, *flags, wheel).check_returncode()
    return folder


def test_an_installed_wheel_and_folders_of_the_user_do_not_collide(environment, tmp_path):
    user = tmp_path / "user"
    for name in ("eval.py", "configs/__init__.py", "data_pipelines/__init__.py"):
        (user / name).parent.mkdir(parents=True, exist_ok=True)
        (user / name).touch()
    script = user / "script.py"
    script.write_text(USERS_SCRIPT)
    ended = _run(environment, user, environment / "bin/python", script)
    assert ended.returncode == 0, ended.stderr
    [installed] = environment.glob("lib/python*/site-packages")
    assert ended.stdout.splitlines() == [
        str(user / "configs/__init__.py"),
        str(user / "data_pipelines/__init__.py"),
        str(user / "eval.py"),
        str(installed / "lit_het/__init__.py"),
        str(installed / "lit_het/configs/__init__.py"),
        str(installed / "lit_het/data_pipelines/__init__.py"),
        str(installed / "lit_het/eval/__init__.py"),
        "runs/lit_so400m_het_xl",
    ]


def test_shipped_configurations_are_found_by_name_after_installing(environment, tmp_path):
    flags = ("--config", "lit_so400m_het_xl", "--no-such-flag", "1")
    ended = _run(environment, tmp_path, environment / "bin/lit-het", "train", *flags)
    assert ended.returncode == 1
    assert "unknown flag --no-such-flag" in ended.stderr


def _run(environment: Path, folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    # Nothing of this repository is in reach: not its root, nor what other tests may have set.
    variables = {"PATH": "/usr/bin:/bin", "HOME": str(environment)}
    return subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True)
