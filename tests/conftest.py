"""One policy for every test: eight CPU devices, strict broadcasting, warnings are errors, shapes are checked."""

import gc
import os
from pathlib import Path

# Before JAX is imported anywhere; processes that tests start inherit it. Tests compile much and compute little, so
# unoptimised code saves half of their time.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
os.environ["JAX_PLATFORMS"] = "cpu"
# Most of the suite's time would go into compiling the same programs again, in other workers and in runs that resume.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parents[1] / ".pytest_cache" / "jax")
os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(2**30)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

# What is compiled stays for long, and looking through it again and again would take a tenth of the suite's time.
gc.set_threshold(100_000, 20, 20)

from jaxtyping import install_import_hook

install_import_hook(["lit_het"], "beartype.beartype")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
