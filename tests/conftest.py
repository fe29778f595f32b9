"""One policy for every test: eight CPU devices, strict broadcasting, warnings are errors, shapes are checked."""

import gc
import os
from pathlib import Path

# Before JAX is imported anywhere; processes that tests start inherit it. Tests compile much and compute little:
# unoptimised code takes half of the time to compile, and without XLA's new emitters of fusions a third of that.
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
os.environ["JAX_PLATFORMS"] = "cpu"
# Runs that resume, processes and workers compile the same programs. Without a limit of its size: to keep one, JAX
# would look at every file of the cache whenever it writes one.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parents[1] / ".pytest_cache" / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

# What is compiled stays for long, and looking through it again and again would take a tenth of the suite's time.
gc.set_threshold(100_000, 20, 20)

from jaxtyping import install_import_hook

install_import_hook(["lit_het"], "beartype.beartype")

import hypothesis
import jax
from jax._src.interpreters.partial_eval import DynamicJaxprTracer

jax.config.update("jax_numpy_rank_promotion", "raise")
# Times of machines that are busy fail no test.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")
# Flax asks every tracer whether it has a sharding. JAX answers with an error that says where the tracer comes from,
# which is never shown and takes an eighth of the time of a training run.
DynamicJaxprTracer._origin_msg = lambda self: ""
