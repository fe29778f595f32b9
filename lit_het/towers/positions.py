"""Fixed position embeddings of patches and of words."""

import numpy as np
from jaxtyping import Float

from lit_het.errors import UserError


def sine_cosine_positions(height: int, width: int, size: int) -> Float[np.ndarray, "n d"]:
    """Returns fixed 2-D positions ``[sin x, cos x, sin y, cos y]``, row by row (MoCo v3; Beyer et al. 2022)."""
    if size % 4:
        raise UserError(f"sine-cosine positions need a width that is a multiple of 4, not {size}")
    rows, columns = np.mgrid[:height, :width]
    frequencies = 1.0 / 10_000 ** np.linspace(0, 1, size // 4)
    x, y = (np.einsum("n,f->nf", axis.ravel(), frequencies) for axis in (columns, rows))
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1).astype(np.float32)


def sinusoidal_positions(length: int, size: int) -> Float[np.ndarray, "l d"]:
    """Returns ``sin(p / 10000^(2i/d))`` in even columns and the cosine in odd ones (Vaswani et al. 2017, Sec. 3.5)."""
    if size % 2:
        raise UserError(f"sinusoidal positions need an even width, not {size}")
    angles = np.arange(length)[:, None] / 10_000 ** (np.arange(0, size, 2) / size)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, size).astype(np.float32)
