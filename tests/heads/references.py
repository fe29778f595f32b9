"""Slow heads: loops over examples and samples in float64, from the equations of HET-XL."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from lit_het import parameters
from lit_het.heads.covariance import CovarianceConfig, standard_normals
from lit_het.heads.het import HetConfig
from lit_het.heads.het_h import HetHConfig, hash_classes
from lit_het.heads.het_xl import HetXLConfig
from lit_het.losses.classification import mean_log_probabilities
from lit_het.types import LogitSamples, Queries


def with_random_parameters(build, seed=0):
    """Returns the module that a function builds, with parameters of NumPy: many programs would draw its own.

    No bias is zero, as all are at the start, where they would take no part in a test.
    """
    module, random = nnx.eval_shape(build), np.random.default_rng(seed)
    params = {
        path: jnp.asarray(random.normal(size=p.shape) / (1 if p.ndim < 2 else math.sqrt(p.shape[0])), p.dtype)
        for path, p in parameters.flatten(nnx.to_pure_dict(nnx.state(module))).items()
    }
    nnx.update(module, parameters.unflatten(params))
    return module


def in_float64(module):
    return {
        path: np.asarray(leaf, np.float64)
        for path, leaf in parameters.flatten(nnx.to_pure_dict(nnx.state(module))).items()
    }


def terms(params, config: CovarianceConfig, x):
    """V(x) = reshape(C φ + c, [r, q]), or V = J ∘ (1 v(x)ᵀ) with v = K2ᵀφ + k2; d(x) = softplus(K1ᵀφ + k1) + 10⁻³."""
    b, q, r = len(x), params["diagonal/bias"].size, config.num_factors
    factors, scale = np.zeros((b, r, q)), np.zeros((b, q))
    for n in range(b):
        for i in range(q):
            scale[n, i] = np.logaddexp(0, x[n] @ params["diagonal/kernel"][:, i] + params["diagonal/bias"][i]) + 1e-3
            for j in range(r):
                if config.form == "full":
                    row = j * q + i
                    factors[n, j, i] = x[n] @ params["factors/kernel"][:, row] + params["factors/bias"][row]
                else:
                    v = x[n] @ params["scale_of_factors/kernel"][:, i] + params["scale_of_factors/bias"][i]
                    factors[n, j, i] = params["shared_factors"][j, i] * v
    return factors, scale


def covariance(params, config: CovarianceConfig, x):
    """Σ = Vᵀ V + d dᵀ (Eq. 18), or Vᵀ V + diag(d²) (Eq. 17)."""
    factors, scale = terms(params, config, x)
    return np.stack(
        [
            v.T @ v + (np.diag(d**2) if config.is_diagonal else np.outer(d, d))
            for v, d in zip(factors, scale, strict=True)
        ]
    )


def noise(params, config: CovarianceConfig, x, normals):
    """ε_s = V(x)ᵀ ξ_s + d(x) η_s, one sample of one example at a time."""
    factors, scale = terms(params, config, x)
    result = np.zeros((*normals.shape[:2], scale.shape[1]))
    for n in range(len(x)):
        for s in range(normals.shape[1]):
            xi, eta = np.split(normals[n, s], [config.num_factors])
            result[n, s] = factors[n].T @ xi + scale[n] * eta
    return result


def temperature(params, config):
    """Eq. 16, or a constant."""
    if "temperature/position" not in params:
        return config.value
    return (config.maximum - config.minimum) / (1 + math.exp(-params["temperature/position"])) + config.minimum


def logits(params, config, x, normals=None):
    """u_s / τ of Eq. 1 (no normals), 2, 5, 9 and 14, one sample of one example at a time."""
    kernel, bias = params["logits/kernel"], params["logits/bias"]
    tau = temperature(params, config.temperature)
    if normals is None:
        return np.stack([[(kernel.T @ phi + bias) / tau] for phi in x])
    of_noise = {path.removeprefix("covariance/"): leaf for path, leaf in params.items()}
    epsilon = noise(of_noise, config.covariance, x, normals)
    result = np.zeros((*normals.shape[:2], len(bias)))
    for n, s in np.ndindex(*normals.shape[:2]):
        match config:
            case HetConfig():
                u = kernel.T @ x[n] + bias + epsilon[n, s]
            case HetHConfig():
                hashing = np.zeros((config.num_buckets, len(bias)))
                for k, bucket in enumerate(hash_classes(len(bias), config.num_buckets, config.hash_seed)):
                    hashing[bucket, k] = 1
                u = kernel.T @ x[n] + bias + hashing.T @ epsilon[n, s]
            case HetXLConfig(unshared_size=None):
                u = kernel.T @ (x[n] + epsilon[n, s]) + bias
            case _:
                u = kernel.T @ x[n] + params["unshared/kernel"].T @ epsilon[n, s] + bias
        result[n, s] = u / tau
    return result


def all_at_once(samples: LogitSamples):
    """Returns every sample of the logits ``[b s k]``, which training never holds."""
    numbers = jnp.arange(samples.num_samples)
    return samples.logits(samples.prepare(samples.features), samples.keys, numbers)


draw_normals = jax.jit(standard_normals, static_argnums=2)


def normals_of(samples: LogitSamples, config: CovarianceConfig, noise_size):
    """Returns the standard normals that a head's samples are made of."""
    assert samples.keys is not None
    count = config.num_factors + (noise_size if config.is_diagonal else 1)
    return draw_normals(samples.keys, np.arange(samples.num_samples), count)


def noise_norms(head, image, text):
    """Returns the noise norms of images and of texts."""
    found = jax.jit(lambda image, text: (head.image_noise_norm(image), head.text_noise_norm(text)))(image, text)
    return tuple(map(np.asarray, found))


def held_singly(queries: Queries) -> Float[Array, "b s d"]:
    """Samples one by one, whatever their form."""
    samples = queries.samples
    if queries.factors is not None and queries.normals is not None:
        samples = samples + jnp.einsum("bsr,brd->bsd", queries.normals, queries.factors)
    return samples if queries.scale is None else samples * queries.scale[:, :, None]


def mean_probabilities(samples: LogitSamples, activation: Callable[[Array], Array]) -> Float[Array, "b _"]:
    """``1/S Σ_s σ(u_s)``; arguments are those of `mean_log_probabilities`."""
    return jnp.exp(mean_log_probabilities(samples, activation))
