"""The wheel holds whole packages, and goes together with modules of the user that have the names of its folders."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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


def test_an_installed_wheel_and_folders_of_the_user_do_not_collide(wheel, tmp_path):
    installed, user = tmp_path / "installed", tmp_path / "user"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    for name in ("eval.py", "configs/__init__.py", "data_pipelines/__init__.py"):
        (user / name).parent.mkdir(parents=True, exist_ok=True)
        (user / name).touch()
    script = user / "script.py"
    script.write_text(USERS_SCRIPT)
    # Nothing of this repository is in reach: not its root, nor what other tests may have set.
    environment = {"PYTHONPATH": str(installed), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    ended = subprocess.run([sys.executable, script], env=environment, cwd=user, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
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
