"""Linear maps that resize positions and the first layer of a ViT, as matrices.

An image resized by B has the patches B x. Their tokens stay the same if the kernel w becomes ``pinv(Bᵀ) w``: exactly if
patches grow, as then ``Bᵀ pinv(Bᵀ) = I``, and with the least squared error over patches of white noise if they shrink
(FlexiViT, Beyer et al. 2023, Eq. 3-5).
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def bilinear(old: int, new: int, *, smooth: bool = False) -> Float[np.ndarray, "new old"]:
    """Returns the matrix of linear interpolation between pixel centres; ``smooth`` antialiases when shrinking."""
    reach = max(old / new, 1.0) if smooth else 1.0
    return _triangles((np.arange(new) + 0.5) * old / new - 0.5, reach, old)


def bilinear_rows(places: Int[Array, "b n"], new: Int[Array, "b 1"], old: int) -> Float[Array, "b n old"]:
    """Returns rows of ``bilinear(old, new, smooth=True)``, where each example has its own length."""
    return _triangles((places + 0.5) * old / new - 0.5, jnp.maximum(old / new, 1.0)[..., None], old)


def _triangles(position: Any, reach: Any, old: int) -> Any:
    # At the edges, where a neighbour is missing, the weights are renormalised: this repeats the edge.
    pixels = np.arange(old).reshape((1,) * position.ndim + (-1,))
    weights = (1 - abs(position[..., None] - pixels) / reach).clip(0)
    return weights / weights.sum(axis=-1, keepdims=True)


@functools.cache
def patch_resize(old: int, new: int) -> Float[np.ndarray, "new_pixels old_pixels"]:
    """Returns ``pinv(Bᵀ)``, which maps kernels of ``old`` x ``old`` pixels to ``new`` x ``new``, in float64."""
    resize = np.kron(bilinear(old, new), bilinear(old, new))
    # In float64: a pseudo-inverse magnifies rounding errors.
    return np.linalg.pinv(resize.T)
