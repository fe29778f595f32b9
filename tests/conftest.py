"""One policy for every test: one device, strict broadcasting, warnings are errors, shapes are checked.

Tests marked ``devices`` see eight virtual devices. Those marked ``slow`` run with ``scripts/test.sh --all`` only. They
and the tests of commands check no shapes: they call what the others do, and would take a third longer.
"""

import contextlib
import ctypes
import gc
import glob
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from unittest import mock

# Before JAX is imported anywhere; processes that tests start inherit it. Tests compile much and compute little:
# unoptimised code takes half of the time to compile, and without XLA's new emitters of fusions a third of that.
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
)
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):  # later ones stop at a flag that they do not know
    FLAGS += ("--xla_cpu_use_fusion_emitters=false",)
# Another platform, such as "cuda,cpu", is for tests that are marked neither ``devices`` nor ``slow``.
os.environ["JAX_PLATFORMS"] = os.environ.get("LIT_HET_TEST_PLATFORM", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
# Runs that resume, processes and workers compile the same programs. Without a limit of its size: to keep one, JAX
# would look at every file of the cache whenever it writes one.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
# Where an operation was written is looked up for each of them, and shown by no test.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# Processes that tests start need no PyTorch, whose import takes seconds wherever it is installed.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent / "without_torch"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# What is compiled stays for long, and looking through it again and again would take a tenth of the suite's time.
gc.set_threshold(100_000, 20, 20)

import jaxtyping

if not jaxtyping.config.jaxtyping_disable:
    # To prepare the checks of a function takes a millisecond: modules that name no shape are left out.
    tree = Path(__file__).parents[1]
    sources = glob.glob("lit_het/**/*.py", root_dir=tree, recursive=True)
    with_shapes = [source for source in sources if b"jaxtyping" in (tree / source).read_bytes()]
    modules = [source.removesuffix(".py").replace("/", ".") for source in with_shapes]
    jaxtyping.install_import_hook(modules, "beartype.beartype")

# It imports PyTorch wherever that is installed, which takes seconds; what is used of it here needs none.
sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
import webdataset  # noqa: F401

del sys.modules["torch"]
# Workers of pytest started as the processes below do; their tests compare with PyTorch.
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "sitecustomize"]

import hypothesis
import jax
import pytest
from filelock import FileLock
from jax._src.interpreters.partial_eval import DynamicJaxprTracer

jax.config.update("jax_numpy_rank_promotion", "raise")
# Times of machines that are busy fail no test.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")
# Flax asks every tracer whether it has a sharding. JAX answers with an error that says where the tracer comes from,
# which is never shown and takes an eighth of the time of a training run.
DynamicJaxprTracer._origin_msg = lambda self: ""

DEVICES, LOCAL_DEVICES = jax.devices, jax.local_devices


@contextlib.contextmanager
def one_device() -> Iterator[None]:
    """Whoever asks JAX sees one device: programs for eight take twice the time to compile and to run."""
    with mock.patch.multiple(
        jax,
        devices=lambda *backend: DEVICES(*backend)[:1],
        local_devices=lambda **options: LOCAL_DEVICES(**options)[:1],
        device_count=lambda: 1,
        local_device_count=lambda: 1,
    ):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    is_checked = item.get_closest_marker("slow") is None and item.path.parent.name != "cli"
    jaxtyping.config.update("jaxtyping_disable", not is_checked)
    # To store a program takes a fifth of a second, and those of unit tests are asked for once in a run.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5 if is_checked else 0.1)
    with contextlib.nullcontext() if item.get_closest_marker("devices") else one_device():
        result = yield
    if nextitem is None or nextitem.path != item.path:
        forget_programs()
    return result


def forget_programs() -> None:
    """Clears what JAX keeps: a program takes about twenty of the 65,530 memory maps that Linux gives a process."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 50_000:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # or a worker grows to 9 GB


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef) -> Iterator[None]:
    """What many files share must not depend on which of them asks first."""
    with one_device() if fixturedef.scope == "session" else contextlib.nullcontext():
        return (yield)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Makes a folder of a name once for all workers, which then only read it."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared

    def make_once(name: str, make: Callable[[Path], object]) -> Path:
        folder, finished = shared / name, shared / f"{name}.finished"
        with FileLock(shared / f"{name}.lock"):
            if not finished.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a failed attempt
                folder.mkdir()
                make(folder)
                finished.touch()
        return folder

    return make_once
