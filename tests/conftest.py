"""One policy for every test: eight CPU devices, strict broadcasting, warnings are errors, shapes are checked."""

import os

# Before JAX is imported anywhere.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

from jaxtyping import install_import_hook

install_import_hook(["lit_het", "data_pipelines", "eval"], "beartype.beartype")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
