"""Encoders of published sizes."""

from lit_het.errors import UserError
from lit_het.towers.encoder_config import ComputeType, EncoderConfig

# (width, depth, mlp_width, num_heads): ViT sizes of Dosovitskiy et al. 2021, Zhai et al. 2022, SoViT Table 1, PaLI
# (Chen et al. 2022) Table 1 for e, and of big_vision's variants for M, g-opt (SigLIP 2) and G-opt.
_SIZES: dict[str, tuple[int, int, int, int]] = {
    "mu": (32, 1, 128, 2),
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "M": (512, 12, 2048, 8),
    "B": (768, 12, 3072, 12),
    "So150m": (880, 18, 2320, 16),
    "L": (1024, 24, 4096, 16),
    "So400m": (1152, 27, 4304, 16),
    "H": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16),
    "g-opt": (1536, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
    "G-opt": (1536, 48, 8192, 16),
    "e": (1792, 56, 15360, 16),
}


def encoder_size(name: str, *, compute_type: ComputeType = "bfloat16") -> EncoderConfig:
    """Returns the encoder of a published size: mu, Ti, S, M, B, So150m, L, So400m, H, g, g-opt, G, G-opt or e."""
    if name not in _SIZES:
        raise UserError(f"unknown encoder size {name!r}; the sizes are {', '.join(_SIZES)}")
    width, depth, mlp_width, num_heads = _SIZES[name]
    return EncoderConfig(width, depth, mlp_width, num_heads, compute_type=compute_type)
